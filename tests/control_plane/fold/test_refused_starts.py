"""A node that cannot start a process because its machine lacks something: no fault of the task."""

from __future__ import annotations

import pytest
from decider import Driver, kinds, spec, task_of, the
from unicron.control_plane.api import needs
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.pauses import REFUSED_PAUSE_S_MAX
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

WHY = "cannot start sh: [Errno 28] No space left on device"


def refuse(d: Driver, start: Record, errno: str) -> list[Record]:
    assert isinstance(start.body, o.StartRank)
    node = start.body.slot.node
    return d.tell(d.source(node), r.OrderRefused(node=node, order=start.seq, why=WHY, errno=errno))


def starts(records: list[Record]) -> list[Record]:
    return [record for record in records if isinstance(record.body, o.StartRank)]


def needed(d: Driver) -> list[str]:
    return [
        one.why for one in needs.needs(view(d.state), d.state.at_s) if one.what == "not started"
    ]


@pytest.fixture
def command(d: Driver) -> int:
    task = d.submit(spec(train=None, command=("sleep", "9"), slots={"min": 1, "max": 1}))
    d.obey(d.log[-20:])
    return task


@pytest.mark.parametrize("errno", ["ENOSPC", "EMFILE", "EAGAIN"])
def test_the_task_is_held_and_told_and_goes_on(d: Driver, command: int, errno: str) -> None:
    (start,) = starts(d.exit(command, 0))
    for num in range(20):
        before_s = d.now_s
        assert kinds(refuse(d, start, errno)) == [], "no fault, no plan, no experiment"
        assert len(needed(d)) == (num > 0)
        (start,) = starts(d.due(f"restart/{command}/0"))
        assert 0.5 < d.now_s - before_s < REFUSED_PAUSE_S_MAX * 1.2
    assert task_of(d, command).restarts == {0: 1}, "that it was killed"
    assert needed(d)[0].endswith(WHY)
    d.obey([start])
    assert needed(d) == []
    assert task_of(d, command).phase == "training"
    assert len(task_of(d, command).recovering) == 1


def test_what_is_wrong_with_the_task_itself_still_counts(d: Driver, command: int) -> None:
    records = d.exit(command, 0)
    for _ in range(20):
        if not (found := starts(records)):
            break
        records = refuse(d, found[0], "")
        if task_of(d, command).phase != "ended":
            records += d.due(f"restart/{command}/0") if d.pauses() else []
    assert task_of(d, command).outcome == "failed"


def test_survivors_train_on_without_the_rank(d: Driver, task: int) -> None:
    records = d.exit(task, 2)
    (start,) = starts(records)
    records = [record for record in records if record is not start]
    records += refuse(d, start, "ENOSPC")
    d.obey(records, start=False)
    assert task_of(d, task).phase == "training"
    assert [member.rank for member in task_of(d, task).members] == [0, 1, 3]
    (start,) = starts(d.due(f"restart/{task}/2"))
    refuse(d, start, "ENOSPC")
    (start,) = starts(d.due(f"restart/{task}/2"))
    d.obey([start])
    d.progress(task)
    assert len(task_of(d, task).members) == 4
    assert task_of(d, task).iterations_lost == 0


def test_a_cancelled_task_ends_and_asks_for_nobody(d: Driver, command: int) -> None:
    (start,) = starts(d.exit(command, 0))
    for _ in range(2):
        refuse(d, start, "ENOSPC")
        (start,) = starts(d.due(f"restart/{command}/0"))
    records = refuse(d, start, "ENOSPC")
    assert needed(d)
    records = d.tell("operator/cancel", r.TaskCancelRequested(task=command))
    assert the(decisions.TaskEnded, records).outcome == "cancelled"
    assert needed(d) == []
