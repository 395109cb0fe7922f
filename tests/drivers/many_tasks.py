"""A log of many tasks on a small cluster, by the real decider."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from decider import Driver, spec
from unicron.control_plane.decide.decide import decide
from unicron.control_plane.fold.fold import fold
from unicron.events.records.envelope import Record
from unicron.events.records.reports import TaskCancelRequested, TaskSubmitted

NUM_NODES, NUM_SLOTS, NUM_WAITING = 16, 8, 84
DAY_S = 86400.0
ALIKE: dict[str, Any] = {"train": None, "command": ["sleep", "9"], "slots": {"min": 8, "max": 8}}


class Quick(Driver):
    """Without the checks of the state."""

    decide = staticmethod(decide)


def records(num: int) -> list[Record]:
    """16 of the tasks run, 84 wait, and the others were cancelled while they waited.

    The decider decides about two of those; the others repeat the records of the second, as it would
    decide again.
    """
    driver = Quick(nodes=NUM_NODES, slots=NUM_SLOTS, now_s=time.time() - DAY_S)
    for number in range(NUM_NODES):
        driver.obey(
            driver.tell(
                f"operator/run-{number}",
                TaskSubmitted(spec=spec(name=f"run-{number}", team="a", **ALIKE)),
            )
        )
    begin = 0
    for number in range(2):
        begin = len(driver.log)
        task = driver.tell(
            f"operator/sweep-{number}",
            TaskSubmitted(spec=spec(name=f"sweep-{number}", team="c", **ALIKE)),
        )[0].seq
        driver.tell(
            f"operator/end-{number}",
            TaskCancelRequested(task=task, reason="superseded", who="owner"),
        )
    last = driver.log[begin:]
    for number in range(1, num - NUM_NODES - NUM_WAITING - 1):
        for one in last:
            driver.log.append(again(one, number, number * len(last)))
            fold(driver.state, driver.log[-1])
    driver.now_s = driver.state.at_s
    for number in range(NUM_WAITING):
        driver.tell(
            f"operator/wait-{number}",
            TaskSubmitted(spec=spec(name=f"wait-{number}", team="b", **ALIKE)),
        )
    return driver.log


def again(record: Record, number: int, later: int) -> Record:
    """The record, about the task `number`, whose records come `later`."""
    body: Any = record.body
    if isinstance(body, TaskSubmitted):
        body = TaskSubmitted(spec=msgspec.structs.replace(body.spec, name=f"sweep-{number + 1}"))
    elif getattr(body, "task", 0):
        body = msgspec.structs.replace(body, task=body.task + later)
    return msgspec.structs.replace(
        record,
        seq=record.seq + later,
        at_s=record.at_s + number,
        body=body,
        occurred_s=record.occurred_s + number,
        cause=record.cause and record.cause + later,
        source=f"{record.source}-{number}" if record.source_seq else record.source,
    )
