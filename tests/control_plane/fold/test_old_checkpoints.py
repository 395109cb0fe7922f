"""Which old checkpoints an order to publish names, to be removed."""

from __future__ import annotations

import pytest
from decider import Driver, only, spec, task_of
from unicron.control_plane.decide.transition import PUBLICATIONS_NUM_MAX
from unicron.control_plane.fold.checkpoints import REMOVALS_NUM_MAX, UNPUBLISHED_NUM_MAX
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

pytestmark = pytest.mark.nodes(2)


def task_with(d: Driver, **train: object) -> int:
    given = {"iterations": 500, "output": "/tmp/out", "batch": {"global": 24, "micro": 2}}
    return d.running(spec(train=given | train))


def save(d: Driver, task: int) -> list[Record]:
    """One more iteration, and its checkpoint, which is not published yet."""
    d.progress(task)
    return d.save(task, 0)


def removed(records: list[Record]) -> tuple[str, ...]:
    (record,) = only(o.PublishCheckpoint, records)
    found: tuple[str, ...] = record.body.remove
    return found


def paths(d: Driver, task: int) -> list[str]:
    return [one.path for one in task_of(d, task).stored]


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_newest_stay(d: Driver, keep: int) -> None:
    task, saved = task_with(d, checkpoint_keep=keep), []
    for number in range(16):
        records = save(d, task)
        saved.append(paths(d, task)[-1])
        gone = removed(records)
        # What was published before stays until the log knows of the publication.
        stays = max(keep, 2) if number else keep
        old = saved[: max(len(saved) - stays, 0)]
        assert set(old[-REMOVALS_NUM_MAX:]) <= set(gone) <= set(old), number
        d.obey(records)
    assert len(paths(d, task)) == REMOVALS_NUM_MAX + keep, "the state has a bound"


def test_by_default_three_stay(d: Driver) -> None:
    task = task_with(d)
    for _ in range(3):
        records = save(d, task)
        assert removed(records) == ()
        d.obey(records)
    assert removed(save(d, task)) == (paths(d, task)[0],)


def test_all_keeps_every_one(d: Driver) -> None:
    task = task_with(d, checkpoint_keep="all")
    for _ in range(20):
        records = save(d, task)
        assert removed(records) == ()
        d.obey(records)
    assert len(paths(d, task)) == REMOVALS_NUM_MAX, "the state has a bound"


def test_none_goes_that_a_recovery_may_read(d: Driver) -> None:
    """Publications are slow: the log names an old checkpoint as long as none is confirmed."""
    task = task_with(d, checkpoint_keep=1)
    d.obey(save(d, task))
    known = task_of(d, task).checkpoint_path
    for _ in range(4):
        records = save(d, task)
        assert known not in removed(records)
        assert task_of(d, task).checkpoint_path == known
    waiting = {one.path for one in task_of(d, task).publishing.values()}
    assert not waiting & set(removed(records))


def test_checkpoints_that_nobody_publishes_have_a_bound(d: Driver) -> None:
    """A node that reports new paths and publishes none made the leader's memory grow."""
    task = task_with(d, checkpoint_keep=1)
    d.obey(save(d, task))
    published = paths(d, task)
    ordered = sum(len(only(o.PublishCheckpoint, save(d, task))) for _ in range(400))
    assert ordered == len(task_of(d, task).publishing) == PUBLICATIONS_NUM_MAX
    assert len(paths(d, task)) == UNPUBLISHED_NUM_MAX + len(published)
    assert paths(d, task)[: len(published)] == published, "a recovery may read it"
    num_orders = len(d.state.orders)
    newest = max(task_of(d, task).publishing)
    path = task_of(d, task).publishing[newest].path
    records = d.tell(d.source("n1"), r.CheckpointPublished(task=task, order=newest, path=path))
    (next_order,) = only(o.PublishCheckpoint, records)
    assert next_order.body.path == paths(d, task)[-1], "the newest is published next"
    assert len(d.state.orders) == num_orders - PUBLICATIONS_NUM_MAX + 1
