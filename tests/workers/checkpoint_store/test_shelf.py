"""What a keeper holds: the newest of each task, in bounded memory; what goes, and what is told."""

from __future__ import annotations

import errno
import mmap

import pytest
from checkpoint_stores import TASK, keep, offer, steps
from unicron.workers.checkpoint_store.protocol import CheckpointRequest, Offer
from unicron.workers.checkpoint_store.store import (
    ENDED_NUM_MAX,
    CheckpointStore,
    StoredCheckpoint,
    StoreRefused,
)


def wish(generation: int, step_version: int, step_version_max: int = -1) -> CheckpointRequest:
    return CheckpointRequest(task=TASK, generation=generation, step_version=step_version,
                step_version_max=step_version_max)


def test_the_two_newest_copies_of_each_task_stay() -> None:
    shelf = CheckpointStore(10_000, lambda task: None)
    for step in (10, 20, 30):
        keep(shelf, offer(step))
        keep(shelf, offer(step + 1, task=8))
    assert (steps(shelf), steps(shelf, 8)) == ([20, 30], [21, 31])
    assert shelf.used_bytes == 400
    found = shelf.find(wish(1, 20))
    assert found is not None
    assert found.offer.step_version == 30, "the newest that is as new as was asked for"
    assert shelf.find(wish(1, 31)) is None
    assert shelf.find(wish(2, 10)) is None
    found = shelf.find(wish(1, 10, 29))
    assert found is not None
    assert found.offer.step_version == 20, "what is beyond was left behind"
    assert shelf.find(wish(1, 10, 19)) is None
    shelf.forget(TASK)
    assert (steps(shelf), steps(shelf, 8), shelf.used_bytes) == ([], [21, 31], 200)


def test_memory_is_bounded_and_what_has_a_newer_one_goes_first() -> None:
    lost: list[int] = []
    shelf = CheckpointStore(450, lost.append)
    keep(shelf, offer(10))
    keep(shelf, offer(10, task=8))
    keep(shelf, offer(20, task=8))
    keep(shelf, offer(20))
    keep(shelf, offer(30))  # takes the place of the oldest of those that have a newer one
    assert (steps(shelf), steps(shelf, 8)) == ([20, 30], [10, 20])
    keep(shelf, offer(5, task=9, size=250))
    assert [steps(shelf, task) for task in (TASK, 8, 9)] == [[30], [20], [5]]
    with pytest.raises(StoreRefused, match="does not fit beside the 450 of 450 in use"):
        shelf.reserve(offer(1, task=10))
    with pytest.raises(StoreRefused, match="checkpoint of 451 bytes does not fit into 450"):
        shelf.reserve(offer(40, size=451))
    assert [steps(shelf, task) for task in (TASK, 8, 9)] == [[30], [20], [5]], "nothing went"
    assert lost == []


def test_none_goes_for_one_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []
    shelf = CheckpointStore(400, lost.append)
    for task in (TASK, 8):
        keep(shelf, offer(10, task=task))
        keep(shelf, offer(20, task=task))
    with pytest.raises(StoreRefused, match="checkpoint of 301 bytes does not fit beside the 400"):
        shelf.reserve(offer(1, task=9, size=301))
    with pytest.raises(StoreRefused, match="checkpoint of 350 bytes does not fit beside the 400"):
        shelf.reserve(offer(30, size=350))
    monkeypatch.setattr("unicron.workers.checkpoint_store.store.mmap.mmap", _no_memory)
    with pytest.raises(StoreRefused, match="no memory for 100 bytes"):
        shelf.reserve(offer(30))
    assert (steps(shelf), steps(shelf, 8), lost) == ([10, 20], [10, 20], [])


def _no_memory(*asked: int) -> mmap.mmap:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_task_may_replace_its_only_copy_and_it_is_told_when_nothing_is_left() -> None:
    lost: list[int] = []
    shelf = CheckpointStore(150, lost.append)
    keep(shelf, offer(10))
    keep(shelf, offer(20))
    assert (steps(shelf), lost) == ([20], [])
    broken = offer(30)
    shelf.cancel(broken, shelf.reserve(broken))
    assert (steps(shelf), lost, shelf.used_bytes) == ([], [TASK], 0)
    shelf.cancel(broken, shelf.reserve(broken))
    assert lost == [TASK], "there was nothing to lose"


def test_a_member_of_an_old_generation_takes_nobodys_place() -> None:
    shelf = CheckpointStore(1000, lambda task: None)
    keep(shelf, offer(10, generation=3))
    with pytest.raises(StoreRefused, match="generation 2 of task 7 is over"):
        shelf.reserve(offer(50, generation=2))
    keep(shelf, offer(8, generation=4))  # from an older copy, in a later generation
    assert steps(shelf) == [10, 8]


def test_a_copy_on_its_way_to_a_task_that_ended_is_not_taken() -> None:
    shelf = CheckpointStore(1000, lambda task: None)
    one = offer(10)
    memory = shelf.reserve(one)
    shelf.forget(TASK)
    assert shelf.used_bytes == 0
    with pytest.raises(StoreRefused, match="task 7 has ended"):
        shelf.add(StoredCheckpoint(offer=one, checksum="", memory=memory))
    shelf.cancel(one, memory)
    assert (steps(shelf), shelf.used_bytes) == ([], 0)
    with pytest.raises(StoreRefused, match="task 7 has ended"):
        shelf.reserve(offer(20))
    for task in range(10_000, 10_000 + ENDED_NUM_MAX):
        shelf.forget(task)
    shelf.reserve(offer(20))  # what it knows of the past is bounded


@pytest.mark.parametrize(("newer", "why"), [
    (offer(8, generation=2), "generation 1 of task 7 is over"),
    (offer(30), "task 7 has a newer checkpoint than generation 1 step 20"),
])
def test_a_copy_that_comes_too_late_takes_nobodys_place(newer: Offer, why: str) -> None:
    shelf = CheckpointStore(1000, lambda task: None)
    keep(shelf, offer(10))
    late = offer(20)
    memory = shelf.reserve(late)
    keep(shelf, newer)
    with pytest.raises(StoreRefused, match=why):
        shelf.add(StoredCheckpoint(offer=late, checksum="", memory=memory))
    shelf.cancel(late, memory)
    assert (steps(shelf), shelf.used_bytes) == ([10, newer.step_version], 200)


def test_what_is_lost_is_told_also_when_the_one_before_has_just_come() -> None:
    lost: list[int] = []
    shelf = CheckpointStore(150, lost.append)
    one, two = offer(10), offer(20)
    memory = shelf.reserve(one)
    shelf.add(StoredCheckpoint(offer=one, checksum="", memory=memory))
    after = shelf.reserve(two)  # before the talk that brought the first one is over
    shelf.cancel(one, memory)
    assert lost == []
    shelf.cancel(two, after)
    assert lost == [TASK]
