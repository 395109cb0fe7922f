"""torchrun and srun as a command: what is refused."""

from __future__ import annotations

import pytest
from unicron.events.errors import SpecError
from unicron.events.spec.job import parse
from unicron.events.spec.launchers import launcher_of


def job(*command: str, **more: object) -> dict[str, object]:
    return {
        "apiVersion": "unicron/v1",
        "name": "launched",
        "command": list(command),
        "slots": {"min": 2, "max": 2},
        **more,
    }


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (("torchrun", "train.py"), "torchrun"),
        (("/opt/venv/bin/torchrun", "train.py"), "torchrun"),
        (("python3", "-m", "torch.distributed.run", "train.py"), "torchrun"),
        (("srun", "python", "train.py"), "srun"),
        (("/usr/bin/srun", "a"), "srun"),
        (("python", "train.py"), ""),
        (("python", "torchrun"), ""),
        ((), ""),
    ],
)
def test_the_launcher_of_a_command(command: tuple[str, ...], launcher: str) -> None:
    assert launcher_of(command) == launcher


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("torchrun", "--nproc-per-node", "8", "train.py"), "torchrun --nproc-per-node"),
        (("torchrun", "--nproc_per_node=gpu", "train.py"), "torchrun --nproc-per-node"),
        (("torchrun", "--max-restarts", "3", "--nnodes=2", "train.py"), "torchrun --nnodes"),
        (
            ("python", "-m", "torch.distributed.run", "--standalone", "x.py"),
            "torchrun --standalone",
        ),
        (("srun", "--gpus=1", "-n8", "python", "train.py"), "srun -n"),
        (("srun", "-N", "2", "python", "train.py"), "srun -N"),
    ],
)
def test_another_world_than_that_of_the_slots_is_refused(
    command: tuple[str, ...], option: str
) -> None:
    with pytest.raises(SpecError, match=f"command: {option} is set by agents") as error:
        parse(job(*command))
    assert "slots: {min: 8, max: 8}" in error.value.hint


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "train.py", "--nnodes", "3"),
        ("torchrun", "-m", "pkg.train", "--nnodes=3"),
        ("torchrun", "--max-restarts", "3", "train.py", "--nproc-per-node", "8"),
        ("srun", "--container-image", "img", "python", "train.py", "-n", "3"),
        ("srun", "--gpus=1", "python", "-w"),
        ("python", "train.py", "--nproc-per-node", "8"),
    ],
)
def test_the_programs_own_options_are_not_the_launchers(command: tuple[str, ...]) -> None:
    assert parse(job(*command)).command == command


def test_a_loop_that_heals_in_memory_is_no_launchers() -> None:
    loop = {"micro_batches": 4, "iterations": 2, "output": "out"}
    with pytest.raises(SpecError, match="starts torchrun, whose processes do not reach the agent"):
        parse(job("torchrun", "train.py", heal="in-memory", loop=loop))
