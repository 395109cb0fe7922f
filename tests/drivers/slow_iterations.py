"""Reports of iterations that do not end although the rank makes progress."""

from __future__ import annotations

from typing import Any

from decider import Driver, kinds, task_of
from hangs import stalled
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

OTHERS = (0, 1, 3)


def crawls(d: Driver, task: int, rank: int, own_s: float, /, **changes: Any) -> list[Record]:
    it = task_of(d, task)
    process = it.ranks[rank]
    told: dict[str, Any] = {
        "task": task,
        "rank": rank,
        "attempt": process.attempt,
        "generation": it.generation,
        "iteration": 1,
        "num_iterations": 1,
        "iteration_s": own_s + 0.1,
        "own_s": own_s,
        "normal_s": 0.4,
    }
    return d.tell(d.source(process.slot.node), r.StepTimeChanged(**(told | changes)))


def waited_for(d: Driver, task: int) -> list[int]:
    """All other ranks stall in a collective. Returns the seqs of the reports."""
    reports = [stalled(d, task, rank) for rank in OTHERS]
    assert [kinds(x) for x in reports] == [[]] * len(reports)
    return [x[0].seq for x in reports]
