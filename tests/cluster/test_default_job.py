"""The usual job, on real agents: Megatron's distributed optimizer, both overlaps, bf16.

It is submitted as `sharded`, has mirrors, and ends with the bits of a run without faults.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from loop_driver import flagged_example
from real_cluster import RealCluster
from reference import differing, read

pytestmark = pytest.mark.thorough
ITERATIONS, MICRO_BATCHES, RANKS, EVERY, STRUCK = 60, 8, 4, 2, 5
Spec = dict[str, Any]


def job(folder: Path, name: str, script: Path) -> Spec:
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": 2, "max": RANKS},
        "command": [
            sys.executable,
            str(script),
            "--sharded",
            *("--iterations", str(ITERATIONS)),
            *("--micro-batches", str(MICRO_BATCHES)),
        ],
        "heal": "in-memory",
        "loop": {
            "micro_batches": MICRO_BATCHES,
            "iterations": ITERATIONS,
            "copy_every": EVERY,
            "reproducible": "required",
            "parallel": {"optimizer": "sharded"},
            "output": str(folder / name),
        },
    }


def ended(cluster: RealCluster, task: int, folder: Path) -> dict[str, Any]:
    """The last state of a task that has finished."""
    view = cluster.wait_ended(task)
    assert view["state"] == "finished", (view, cluster.endings(task))
    return read((folder / "latest").resolve())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flagged_example(tmp_path_factory.mktemp("script"), ("bf16", "overlapped gather"))


@pytest.fixture(scope="module")
def undisturbed(
    cluster: RealCluster, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calm")
    return ended(cluster, cluster.submit(job(folder, "calm", script)), folder / "calm")


def begin(
    cluster: RealCluster, folder: Path, script: Path, event: str
) -> tuple[int, list[int], Path]:
    """Submit the job and wait until position 1 is held at this event; the ranks by position, and
    the file that holds it."""
    task = cluster.submit(job(folder, "struck", script))
    cluster.wait_whole(task, RANKS)
    order: Any = cluster.told(0, "Reconfigure", task=task)[-1].body
    ranks = [member.rank for member in order.members]
    hold = cluster.hold(task, ranks[1], event=event, iteration=STRUCK)
    cluster.wait_held(task, ranks[1], 0.0)
    assert cluster.task(task)["lost_rank"].startswith("nothing; kept on a peer")
    return task, ranks, hold


@pytest.mark.parametrize(
    ("event", "positions", "lost_max"),
    [
        ("mirror", (1,), 0),
        ("gather", (1,), 0),
        ("mirror", (1, 3), 0),
        ("mirror", (1, 2), EVERY + 1),
        ("gather", (1, 2), EVERY + 1),
    ],
)
def test_lost_ranks_change_no_bit(
    cluster: RealCluster,
    script: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    event: str,
    positions: tuple[int, ...],
    lost_max: int,
) -> None:
    """Of neighbours, both holders of a shard are lost: the task goes on from its last copy."""
    after = cluster.seq()
    task, ranks, hold = begin(cluster, tmp_path, script, event)
    pids = cluster.pids(task)
    for position in positions:
        os.kill(pids[ranks[position]], signal.SIGKILL)
    hold.unlink()
    cluster.wait_told(after, "IncidentClosed")
    found = ended(cluster, task, tmp_path / "struck")
    (closed,) = [one.body for one in cluster.told(after, "IncidentClosed")]
    body: Any = closed
    print(body)
    is_lost = lost_max > 0
    assert (body.outcome, body.ckpt_read) == ("set back" if is_lost else "healed", False)
    assert is_lost <= body.iterations_lost <= lost_max
    assert differing(found, undisturbed) == []


def test_a_lost_node_changes_no_bit(
    cluster: RealCluster, script: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """No two neighbours are on one node."""
    after = cluster.seq()
    task, ranks, hold = begin(cluster, tmp_path, script, "backward")
    nodes = {one["rank"]: one["node"] for one in cluster.task(task)["ranks"]}
    assert all(nodes[one] != nodes[other] for one, other in pairwise(ranks))
    cluster.kill_node(nodes[ranks[1]])
    hold.unlink()
    closed: Any = cluster.wait_told(after, "IncidentClosed").body
    assert (closed.outcome, closed.iterations_lost, closed.ckpt_read) == ("healed", 0, False)
    cluster.start_agent(nodes[ranks[1]])
    assert differing(ended(cluster, task, tmp_path / "struck"), undisturbed) == []
