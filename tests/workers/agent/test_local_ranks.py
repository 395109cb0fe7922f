"""A rank sees the devices of its task on its node, and its own is that of its local rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unicron.events.records.orders import StartRank
from unicron.events.records.types import Slot
from unicron.events.spec.job import JobSpec, parse
from unicron.workers.agent.main import _by_uuid
from unicron.workers.agent.processes.launcher import NodeConfig, environment
from unicron.workers.host import gpus
from unicron.workers.training.model.cpu_device import own_device

NUM = 8
DEVICES = tuple(f"GPU-{at:02}" for at in range(NUM))
KINDS: dict[str, dict[str, Any]] = {
    "train": {"train": {"iterations": 1, "output": "/o"}},
    "command": {"command": ["python", "train.py"]},
    "loop": {
        "command": ["python", "train.py"],
        "heal": "in-memory",
        "loop": {"micro_batches": 8, "iterations": 1, "output": "/o"},
    },
    "torchrun": {"command": ["torchrun", "train.py"]},
}


def job(kind: str) -> JobSpec:
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "job",
            "slots": {"min": 1, "max": NUM},
            **KINDS[kind],
        }
    )


def started(
    kind: str, slots: list[int], rank: int, lost: frozenset[int] = frozenset(), **inherited: str
) -> dict[str, str]:
    """The environment of a rank of a task whose ranks on this node have these slots, in order."""
    order = StartRank(
        nodes=("n1",),
        task=1,
        rank=rank,
        attempt=1,
        slot=Slot(node="n1", index=slots[rank]),
        num_seats=len(slots),
        spec=job(kind),
        host="127.0.0.1",
        port=20_000,
        checkpoint="",
        local_slots=tuple(slots),
    )
    node = NodeConfig(
        name="n1",
        incarnation=1,
        cluster="c",
        host="127.0.0.1",
        num_slots=NUM,
        state_dir=Path("/nowhere"),
        devices=DEVICES,
    )
    return environment(order, node, inherited, lost)


def shown(visible: str, lost: frozenset[int]) -> list[str]:
    """What CUDA shows of these: none behind the first that is not there. Source: CUDA's guide,
    environment variable CUDA_VISIBLE_DEVICES."""
    found: list[str] = []
    for device in visible.split(","):
        if device in {DEVICES[slot] for slot in lost}:
            break
        found.append(device)
    return found


@given(
    kind=st.sampled_from(sorted(KINDS)),
    slots=st.lists(st.integers(0, NUM - 1), min_size=1, unique=True),
    lost=st.frozensets(st.integers(0, NUM - 1)),
)
def test_each_rank_uses_the_device_of_its_slot(
    kind: str, slots: list[int], lost: frozenset[int]
) -> None:
    """Whatever the order of the slots is, and whatever is gone: nobody takes another's."""
    for rank, slot in enumerate(slots):
        env = started(kind, slots, rank, lost)
        if slot in lost:
            continue
        seen = shown(env["CUDA_VISIBLE_DEVICES"], lost)
        local = 0 if kind == "torchrun" else int(env["LOCAL_RANK"])  # it numbers its one process
        assert seen[own_device(env["CUDA_VISIBLE_DEVICES"], local, len(seen))] == DEVICES[slot]
        assert seen[local] == DEVICES[slot], "so a script chooses"
        if not lost:
            assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank), str(len(slots)))


def test_a_lost_device_that_nobody_has_noticed_is_named() -> None:
    env = started("train", [4, 1, 6], 2)
    seen = shown(env["CUDA_VISIBLE_DEVICES"], frozenset({1}))
    assert seen == ["GPU-04"]
    with pytest.raises(RuntimeError, match=r"1 of the 3 GPUs .* GPU-06: GPU-01 is not there"):
        own_device(env["CUDA_VISIBLE_DEVICES"], 2, len(seen))
    assert own_device(env["CUDA_VISIBLE_DEVICES"], 0, len(seen)) == 0, "the others go on"


@pytest.mark.parametrize(
    ("given", "local_rank", "num_seen", "own"),
    [
        ("", 3, 8, 3),  # a torchrun of the user's own
        ("", 3, 1, 0),  # a container, or a step of Slurm, with one GPU for each process
        ("5", 3, 1, 0),
        ("2,5", 1, 2, 1),
    ],
)
def test_without_an_agent_a_process_uses_the_gpu_that_it_was_given(
    given: str, local_rank: int, num_seen: int, own: int
) -> None:
    assert own_device(given, local_rank, num_seen) == own


def test_an_order_of_an_older_leader_gives_a_rank_its_own_device() -> None:
    order = StartRank(
        nodes=("n1",),
        task=1,
        rank=2,
        attempt=1,
        slot=Slot(node="n1", index=5),
        num_seats=3,
        spec=job("command"),
        host="",
        port=0,
        checkpoint="",
    )
    node = NodeConfig(
        name="n1",
        incarnation=1,
        cluster="c",
        host="127.0.0.1",
        num_slots=NUM,
        state_dir=Path("/nowhere"),
        devices=DEVICES,
    )
    env = environment(order, node, {})
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-05"


def test_what_the_agent_was_given_does_not_reach_a_rank() -> None:
    """An agent may itself be a process of torchrun or srun."""
    agents = {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "9", "CUDA_VISIBLE_DEVICES": "0,1"}
    env = started("command", [3, 0], 1, **agents)
    assert {name: env[name] for name in agents} == {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "GPU-03,GPU-00",
    }


def test_an_index_is_another_gpu_once_one_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an agent names its GPUs by UUID when it starts, and a GPU that was exchanged is known by
    its new one after that."""
    tool = tmp_path / "nvidia-smi"

    def install(*uuids: str) -> None:
        lines = "\n".join(
            f"GPU {index}: NVIDIA H100 (UUID: {uuid})" for index, uuid in enumerate(uuids) if uuid
        )
        tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{lines}\nEND\n")
        tool.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert (gpus.uuids(), _by_uuid(("0", "1"))) == (None, ("0", "1"))
    install("GPU-aa", "GPU-bb", "GPU-cc")
    assert _by_uuid(("2", "0")) == ("GPU-cc", "GPU-aa")
    assert _by_uuid(("GPU-bb", "MIG-1")) == ("GPU-bb", "MIG-1")
    install("GPU-aa", "GPU-new", "GPU-cc")  # after a repair
    assert _by_uuid(("0", "1", "2")) == ("GPU-aa", "GPU-new", "GPU-cc")
    install("GPU-aa", "", "GPU-cc")
    assert _by_uuid(("0", "1", "2")) == ("GPU-aa", "1", "GPU-cc")
