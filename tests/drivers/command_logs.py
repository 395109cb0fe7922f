"""Progress lines of a command: they calibrate its throughput and give its restart time."""

from __future__ import annotations

from typing import Any

from decider import Driver, task_of
from described_jobs import KNOWN, job
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.reports import IterationsLogged
from unicron.events.spec.job import parse


def begin(d: Driver, **more: Any) -> int:
    """Submit a command with four slots, and start it."""
    data = {**job(), **more}
    begun = d.tell(
        f"operator/{len(d.seqs)}",
        r.TaskSubmitted(
            spec=parse({key: value for key, value in data.items() if value is not None}),
            modelled=KNOWN if data["model"] else None,
        ),
    )
    d.obey(begun)
    return begun[0].seq


def printed(
    d: Driver,
    task: int,
    iteration: int,
    num: int = 10,
    step_s: float = 1.0,
    *,
    rank: int = 3,
    **more: Any,
) -> list[Record]:
    process = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(process.slot.node),
        IterationsLogged(
            **{
                "task": task,
                "rank": rank,
                "attempt": process.attempt,
                "iteration": iteration,
                "iterations": 1000,
                "num_iterations": num,
                "step_s": step_s,
                "loss": 2.5,
                "global_batch": 24,
                **more,
            }
        ),
    )
