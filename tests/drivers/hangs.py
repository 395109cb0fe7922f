"""Reports of a stalled task, for tests of hangs."""

from __future__ import annotations

from typing import Any

from decider import Driver, kinds, task_of
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

VICTIM = 2
IN = "collective"
NORMAL_S = 0.5


def stalled(
    d: Driver,
    task: int,
    rank: int,
    where: r.Whereabouts = IN,
    /,
    *,
    collective: int = 1,
    iteration: int = 1,
    in_s: float = 1.6,
    **changes: Any,
) -> list[Record]:
    it = task_of(d, task)
    process = it.ranks[rank]
    told: dict[str, Any] = {
        "task": task,
        "rank": rank,
        "attempt": process.attempt,
        "generation": it.generation,
        "iteration": iteration,
        "where": where,
        "what": "backward",
        "collective": collective,
        "in_s": in_s,
        "normal_s": NORMAL_S,
    }
    return d.tell(d.source(process.slot.node), r.RankStalled(**(told | changes)))


def stacks_kept(d: Driver, task: int, rank: int) -> list[Record]:
    """The agent of a rank that is to be ended has kept its stacks."""
    process = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(process.slot.node),
        r.StacksKept(
            task=task,
            rank=rank,
            attempt=process.attempt,
            path=f"/logs/rank-{rank}.attempt-{process.attempt}.stacks",
            num_bytes=5000,
            reader="py-spy",
            stack="sleep (train.py:9)\n" * 200,
            mark="iteration 1, backward",
        ),
    )


def went_on(d: Driver, task: int, rank: int) -> list[Record]:
    it = task_of(d, task)
    process = it.ranks[rank]
    return d.tell(
        d.source(process.slot.node),
        r.RankUnstalled(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=it.generation,
            iteration=1,
            stalled_s=2.0,
        ),
    )


def hung(d: Driver, task: int, *victims: int) -> list[int]:
    """All ranks stall, the victims outside collectives. Returns the seqs of the reports."""
    reports = [
        stalled(
            d,
            task,
            rank,
            *(("own",) if rank in victims else ()),
            collective=0 if rank in victims else 1,
        )
        for rank in sorted(task_of(d, task).ranks)
    ]
    assert [kinds(x) for x in reports] == [[]] * len(reports)
    return [x[0].seq for x in reports]


def deadline(d: Driver, task: int) -> str:
    return f"hang/{task}/{task_of(d, task).generation}"
