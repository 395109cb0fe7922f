"""Commands that stop printing progress lines, for tests of hangs."""

from __future__ import annotations

from typing import Any

from command_logs import begin, printed
from decider import Driver, task_of
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

AFTER_S = 600.0
TELLER = 3


def running(d: Driver, **more: Any) -> int:
    task = begin(d, **{"hang_after_s": AFTER_S, **more})
    for iteration in (10, 20, 30):
        printed(d, task, iteration)
    return task


def stalled(d: Driver, task: int, rank: int = TELLER, in_s: float = 61.0) -> list[Record]:
    process = task_of(d, task).ranks[rank]
    d.now_s += in_s
    return d.tell(
        d.source(process.slot.node),
        r.RankStalled(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=0,
            iteration=30,
            where="own",
            what="no line of progress",
            collective=0,
            in_s=in_s,
            normal_s=1.0,
            stack="sleeps in futex",
        ),
    )


def deadlines(d: Driver) -> list[str]:
    return [name for name in d.state.deadlines if name.startswith("printed/")]
