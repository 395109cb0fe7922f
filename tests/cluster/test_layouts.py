"""Tasks of several layouts on a running cluster: one rank is killed, the next layout goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_cluster import RealCluster
from twins import RATE, Twins

ITERATIONS, STRUCK, GROWN = 12, 3, 6
Parallel = dict[str, list[int]]


class Case(NamedTuple):
    """What a task may be, and the layouts (tp, pp, dp) that it goes through when a rank is lost."""

    parallel: Parallel
    layouts: tuple[tuple[int, int, int], ...]
    kept: bool
    """Whether the micro-batches of an intact replica are not done again."""


CASES = {
    "tensor": Case({"tensor": [2]}, ((2, 1, 2), (2, 1, 1), (2, 1, 2)), kept=True),
    "pipeline": Case({"pipeline": [2, 3]}, ((1, 2, 2), (1, 3, 1), (1, 2, 2)), kept=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_lost_rank_costs_no_iteration_in_any_layout(two: RealCluster, twins: Twins, name: str,
                                                      tmp_path: Path) -> None:
    case = CASES[name]
    spec: dict[str, Any] = {
        "apiVersion": "unicron/v1", "name": name, "slots": {"min": 1, "max": 4},
        "train": {
            "model": {"num_layers": 6, "hidden": 64, "num_heads": 2, "sequence": 64},
            "batch": {"global": 16, "micro": 2}, "iterations": ITERATIONS, "seed": 7,
            "optimizer": {"lr": RATE, "min_lr": RATE, "decay": "constant"},
            "output": str(tmp_path / "out"), "copy_every": 0, "parallel": case.parallel,
        },
    }
    after = two.seq()
    task = two.submit(spec)
    # The first member waits for the newcomer: the task is no longer than the test needs it.
    grown = two.hold(task, 0, event="reduce", iteration=GROWN)
    begun = two.wait_told(after, "Resume", task=task).seq
    two.hold(task, 3, event="reduce", iteration=STRUCK)
    line = two.wait_held(task, 3, 0.0)
    before = two.pids(task)
    os.kill(line["pid"], signal.SIGSTOP)
    # Nor is it there before the others are in the layout without it.
    came = two.hold(task, 3, event="start", iteration=-1)
    os.kill(line["pid"], signal.SIGKILL)
    two.wait_told(begun, "Resume", task=task)
    came.unlink()
    two.wait_told(after, "Quiesce", task=task, mode="boundary")
    grown.unlink()
    assert two.wait_ended(task)["state"] == "finished", two.tail(after)

    orders = [record.body.axes for record in two.told(after, "Reconfigure", task=task)]
    assert [(axes.tp, axes.pp, axes.dp) for axes in orders] == list(case.layouts)
    closed, = two.told(after, "IncidentClosed")
    assert closed.body.outcome == "healed"
    assert closed.body.iterations_lost == 0
    assert not closed.body.ckpt_read
    assert (closed.body.kept > 0) == case.kept, two.tail(after)
    pids = {(traced["rank"], traced["pid"]) for traced in two.traced(task)}
    assert {(rank, pid) for rank, pid in before.items()} <= pids
    assert len(pids) == 5, "four, and the one that came instead"
    twins.hold(*twins.start(spec), two.losses(task))
    two.verify()
