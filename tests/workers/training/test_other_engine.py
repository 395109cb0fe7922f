"""Another engine, over plain torch, heals as Megatron's does: the same iteration trains both."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import plain_engine
import plain_rank
import pytest
import torch
from rank_driver import Drive, Driver
from unicron.events.records import reports as r
from unicron.events.spec.job import Train

STRUCK, ITERATIONS, RANKS = 3, 7, [0, 1, 2]
TOLERANCE = 1e-5
"""Other orders of addition in fp32 differ by less; a micro-batch too many or too few by more."""


@pytest.fixture
def three(drive: Drive, request: pytest.FixtureRequest) -> Driver:
    """Three ranks of the plain engine, whose reduction overlaps or not."""
    driver = drive(iterations=ITERATIONS, overlap=request.param, optimizer={"lr": 1e-2})
    driver.patch = plain_rank.PATCH
    driver.start(*RANKS)
    return driver


def check_end(driver: Driver, ranks: list[int]) -> None:
    """These ranks end with what torch alone trains in one process, bit by bit the same."""
    driver.finish(ranks)
    assert isinstance(driver.work, Train)
    losses, params = plain_engine.undisturbed(driver.work)
    ends: list[Any] = [torch.load(Path(driver.work.output) / f"{rank}.pt") for rank in ranks]
    for own_losses, own_params in ends:
        assert own_losses == pytest.approx(losses, rel=TOLERANCE)
        for own, expected, first in zip(own_params, params, ends[0][1], strict=True):
            torch.testing.assert_close(own, expected, rtol=TOLERANCE, atol=TOLERANCE)
            assert own.equal(first)


def forwards(driver: Driver, ranks: list[int]) -> list[int]:
    """The micro-batches of the struck iteration that these ranks have run."""
    return sorted(
        line["micro_batch"]
        for rank in ranks
        for line in driver.trace(rank)
        if line["event"] == "forward" and line["iteration"] == STRUCK
    )


@pytest.mark.parametrize("event", ["backward", "bucket", "reduced", "stepped"])
@pytest.mark.parametrize("three", [False, True], indirect=True, ids=["at once", "overlapped"])
def test_a_killed_rank_changes_nothing(three: Driver, event: str) -> None:
    three.hold(1, event, STRUCK)
    three.form(RANKS)
    three.held(1, STRUCK)
    three.kill(1)
    three.left_by_themselves([0, 2])
    held = three.quiesced([0, 2])
    kept = [item for report in held.values() for item in report.micro_batches]
    assert len(kept) == len(set(kept))
    three.form([0, 2])
    check_end(three, [0, 2])
    if {report.step_version for report in held.values()} == {STRUCK}:
        again = set(range(12)).difference(kept)
        assert forwards(three, [0, 2]) == sorted([*kept, *again]), "one has run twice or never"


@pytest.mark.parametrize("three", [False, True], indirect=True, ids=["at once", "overlapped"])
def test_an_aborted_reduction_keeps_the_local_sums(three: Driver) -> None:
    """All ranks live, and are ordered to stop inside the reduction."""
    hold = three.hold(1, "bucket", STRUCK)
    three.form(RANKS)
    three.held(1, STRUCK)
    for rank in (0, 2):
        three.strike(rank, iteration=STRUCK, event="bucket")
    held = three.quiesce(RANKS, "now", hold)
    assert {report.step_version for report in held.values()} == {STRUCK}
    assert sorted(item for report in held.values() for item in report.micro_batches) == list(
        range(12)
    )
    reports = three.form(RANKS)
    assert not any(report.remaining_micro_batches for report in reports.values())
    check_end(three, RANKS)


@pytest.mark.parametrize("three", [False], indirect=True, ids=["at once"])
def test_a_stopped_rank_is_left_behind(three: Driver) -> None:
    """Nothing closes its connections: the others are ordered to leave the wait."""
    three.hold(1, "bucket", STRUCK)
    three.form(RANKS)
    three.held(1, STRUCK)
    three.processes[1].signal(signal.SIGSTOP)
    for rank in (0, 2):
        three.strike(rank, iteration=STRUCK, event="bucket")
    held = three.quiesce([0, 2], "now")
    assert [len(report.micro_batches) for report in held.values()] == [4, 4]
    three.kill(1)
    three.form([0, 2])
    check_end(three, [0, 2])


@pytest.mark.parametrize("three", [False], indirect=True, ids=["at once"])
def test_an_exception_in_the_reduction_is_a_failure_of_the_generation(three: Driver) -> None:
    three.hold(1, "bucket", STRUCK, then="fail")
    three.form(RANKS)
    assert "injected" in three.wait(r.CollectiveFailed, 1).error
    three.left_by_themselves(RANKS)
    three.quiesced(RANKS)
    three.form(RANKS)
    check_end(three, RANKS)
