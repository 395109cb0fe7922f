"""Reports of slow ranks, for tests of stragglers."""

from __future__ import annotations

from typing import Any

from decider import Driver, kinds, task_of
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

VICTIM = 2


def paced(
    d: Driver,
    task: int,
    rank: int,
    own_s: float = 1.0,
    /,
    *,
    normal_s: float = 1.0,
    iteration_s: float = 0.0,
    **changes: Any,
) -> list[Record]:
    it = task_of(d, task)
    process = it.ranks[rank]
    told: dict[str, Any] = {
        "task": task,
        "rank": rank,
        "attempt": process.attempt,
        "generation": it.generation,
        "iteration": 20,
        "num_iterations": 10,
        "iteration_s": iteration_s or own_s + 0.1,
        "own_s": own_s,
        "normal_s": normal_s,
    }
    return d.tell(d.source(process.slot.node), r.StepTimeChanged(**(told | changes)))


def known(d: Driver, task: int, **changes: Any) -> None:
    """Report a normal step time for every rank."""
    for rank in sorted(task_of(d, task).ranks):
        assert kinds(paced(d, task, rank, iteration_s=1.1, **changes)) == []
    assert not task_of(d, task).slow
