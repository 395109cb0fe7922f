"""What a rank reports of saves that fail, once each, and of a loop that saves by itself."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from decider import spec
from unicron.events.object_storage import errno_name, reason, root_of
from unicron.events.records.orders import StartRank
from unicron.events.records.types import Slot
from unicron.workers.training.adopt.own_loop import OwnLoop
from unicron.workers.training.checkpoint.checkpoint import NotSaved
from unicron.workers.training.checkpoint.save_reports import SaveReports
from unicron.workers.training.megatron_lm.own_loop import StoredRun

START = StartRank(
    nodes=("n1",),
    task=7,
    rank=3,
    attempt=1,
    slot=Slot("n1", 0),
    spec=spec(),
    num_seats=1,
    host="",
    port=0,
    checkpoint="",
)


def full() -> NotSaved:
    return NotSaved.of("/o", OSError(errno.ENOSPC, "No space left on device"))


def test_a_failure_is_reported_once_in_a_generation_until_its_reason_changes() -> None:
    told: list[Any] = []
    reports = SaveReports(START, "checkpoint", told.append)
    assert reports.failed(full(), 1, 10)
    assert not reports.failed(full(), 1, 20)
    assert reports.failed(NotSaved("/o", "Permission denied", "EACCES"), 1, 30)
    assert reports.failed(full(), 1, 40)
    assert reports.failed(full(), 2, 50), "another generation"
    assert reports.failed(full(), 2, 60, final=True)
    assert not reports.failed(full(), 2, 60, final=True)
    assert not reports.failed(full(), 2, 60, is_repeated=True, final=True)
    assert [(one.step_version, one.errno, one.final) for one in told] == [
        (10, "ENOSPC", False),
        (30, "EACCES", False),
        (40, "ENOSPC", False),
        (50, "ENOSPC", False),
        (60, "ENOSPC", True),
        (60, "ENOSPC", True),
    ]
    assert reports.worked("/o", 2, 70, is_whole=True)
    assert not reports.worked("/o", 2, 80, is_whole=True)
    assert len(told) == 6, "the publication tells it"


def test_what_nobody_publishes_is_reported_to_work_again() -> None:
    told: list[Any] = []
    reports = SaveReports(START, "export", told.append)
    assert not reports.worked("/o", 1, 10, is_whole=True)
    reports.failed(full(), 1, 20)
    assert reports.worked("/o", 1, 30, is_whole=False)
    reports.failed(full(), 1, 40)
    reports.worked("/o", 1, 50, is_whole=True)
    assert [(one.step_version, one.why) for one in told] == [
        (20, "No space left on device"),
        (40, "No space left on device"),
        (50, ""),
    ]
    SaveReports(START, "export", told.append, is_unknown=True).worked("/o", 1, 60, is_whole=True)
    assert told[-1].why == "", "an earlier process may have reported a failure"


def test_the_reason_is_the_operating_systems() -> None:
    """torch raises another error when it closes its archive after a failed write."""
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 (as torch does)
    except RuntimeError as error:
        found = error
    assert (reason(root_of(found)), errno_name(found)) == ("No space left on device", "ENOSPC")
    alone = RuntimeError("unexpected pos 64 vs 0")
    assert (root_of(alone), errno_name(alone)) == (alone, "")


def test_a_save_of_megatron_lms_own_loop_that_fails_is_reported_and_raised() -> None:
    told: list[Any] = []
    is_full = True

    def save_checkpoint(iteration: int, *given: Any) -> str:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return f"saved {iteration}"

    training = SimpleNamespace(
        setup_model_and_optimizer=None,
        train=None,
        checkpoint_and_decide_exit=None,
        save_checkpoint=save_checkpoint,
    )
    memory = OwnLoop(None, 0, SaveReports(START, "export", told.append))
    run = StoredRun(memory, training, lambda: SimpleNamespace(save="/m", train_iters=20))
    for iteration in (10, 20):
        with pytest.raises(OSError, match="No space left"):
            run.save(iteration, "model")
    assert [(one.step_version, one.path, one.final) for one in told] == [
        (10, "/m", False),
        (20, "/m", True),
    ]
    is_full = False
    assert run.save(20, "model") == "saved 20"
    assert told[-1].why == ""
