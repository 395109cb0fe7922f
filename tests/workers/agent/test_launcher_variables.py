"""torchrun and srun as a command: what an agent gives them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from unicron.events.records.orders import StartRank
from unicron.events.records.types import Slot
from unicron.events.spec.job import parse
from unicron.workers.agent.processes.launcher import NodeConfig, environment, on_this_node

RUN = (sys.executable, "-P", "-m", "torch.distributed.run")
LIMIT_S = 120
WORKER = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
print(json.dumps({name: os.environ[name] for name in names}), file=open(sys.argv[1], "a"))
sys.exit(int(sys.argv[2]))
"""


def started(
    command: tuple[str, ...], rank: int, port: int = 20_000, **inherited: str
) -> dict[str, str]:
    """The environment of a rank on a node with GPUs."""
    order = StartRank(
        nodes=("n1",),
        task=1,
        rank=rank,
        attempt=1,
        slot=Slot(node="n1", index=rank),
        num_seats=2,
        spec=parse(
            {
                "apiVersion": "unicron/v1",
                "name": "launched",
                "command": list(command),
                "slots": {"min": 2, "max": 2},
            }
        ),
        host="127.0.0.1",
        port=port,
        checkpoint="",
        local_slots=(0, 1),
    )
    node = NodeConfig(
        name="n1",
        incarnation=1,
        cluster="c",
        host="127.0.0.1",
        num_slots=8,
        state_dir=Path("/nowhere"),
        devices=tuple(f"GPU-{at}" for at in range(8)),
    )
    return environment(order, node, inherited)


def test_a_task_of_srun_has_its_own_rank() -> None:
    """The agent itself may be task 3 of 16 of its srun."""
    agents = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "0",
        "SLURM_NPROCS": "16",
        "SLURM_JOB_NODELIST": "n[1-16]",
    }
    found = started(("python", "train.py"), 1, **agents)
    assert {name: found[name] for name in agents} == agents | {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
    }
    assert "SLURM_PROCID" not in started(("python", "train.py"), 1)


def test_srun_starts_one_task_on_the_agents_node() -> None:
    asked = on_this_node(("srun", "--gpus=1", "python", "x"), {"SLURMD_NODENAME": "gpu7"})
    assert asked == (
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=gpu7",
        "--gpus=1",
        "python",
        "x",
    )
    assert on_this_node(("srun", "python"), {}) == ("srun", "python")
    assert on_this_node(("python",), {"SLURMD_NODENAME": "gpu7"}) == ("python",)


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_two_torchruns_are_one_world(tmp_path: Path, code: int) -> None:
    """Each with one process, on its own GPU; its failure is that of the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, out = tmp_path / "worker.py", tmp_path / "out"
    script.write_text(WORKER)
    command = (*RUN[:1], *RUN[2:], str(script), str(out), str(code))
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, **started(command, rank, port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        codes = [run.wait(LIMIT_S) for run in runs]
    finally:
        for run in runs:
            run.kill()
    told = sorted(
        (json.loads(line) for line in out.read_text().splitlines()), key=lambda one: one["RANK"]
    )
    assert [one["RANK"] for one in told] == (
        ["0", "1"] if not code else [one["RANK"] for one in told]
    )
    assert told
    for one in told:
        assert (one["WORLD_SIZE"], one["LOCAL_RANK"]) == ("2", "0")
        assert one["CUDA_VISIBLE_DEVICES"] == f"GPU-{one['RANK']}"
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("127.0.0.1", str(port))
    assert all(bool(each) == bool(code) for each in codes), codes
