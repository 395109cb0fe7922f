"""A rank dies at every point of an iteration: the others finish it, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unicron.events.reports import CheckpointSaved, CollectiveFailed, Quiesced, RankErrored

Drive = Callable[..., Any]
Twins = Callable[[float], Any]
STRUCK = 4
"""The iteration that is struck; rank 1 has micro-batches 1, 4, 7, 10."""
BEFORE_THE_REDUCTION = [
    ("micro_batch", {"micro_batch": 1}), ("micro_batch", {"micro_batch": 7}),
    ("forward", {"micro_batch": 4}), ("forward_mid", {"micro_batch": 4}),
    ("backward", {"micro_batch": 4}), ("backward_mid", {"micro_batch": 10}),
    ("reduce", {}), ("stats", {}), ("bucket", {"bucket": 0}),
]
AFTER_IT = [("bucket_done", {"bucket": 0}), ("reduced", {}), ("scale", {}), ("unscale", {}),
            ("clip", {}), ("step", {}), ("stepped", {}), ("schedule", {}), ("done", {})]


def named(cells: list[tuple[str, dict[str, int]]]) -> list[object]:
    return [pytest.param(event, where, id="-".join([event, *map(str, where.values())]))
            for event, where in cells]


@pytest.fixture
def three(drive: Drive, nursery: Any) -> Any:
    """Three ranks; rank 1 is to be struck."""
    driver = drive()
    driver.argv = nursery
    driver.start(0, 1, 2)
    return driver


def heal(driver: Any, twin: Any, *, struck: int) -> None:
    """The others finish the struck iteration with what they have; in the end they are the twin."""
    held: dict[int, Quiesced] = driver.quiesce([0, 2], "now")
    assert {told.step_version for told in held.values()} == {struck}
    told = driver.form([0, 2])
    assert {rank: told[rank].kept for rank in told} == {
        rank: held[rank].micro_batches for rank in held}, "nothing is done twice"
    driver.finish([0, 2])
    assert sorted(driver.losses()) == list(range(14)), "no iteration is lost"
    forwards = [line["micro_batch"] for rank in (0, 2) for line in driver.trace(rank)
                if line["event"] == "forward" and line["iteration"] == struck]
    assert sorted(forwards) == list(range(12)), "the whole batch, each once"
    saved = driver.told(CheckpointSaved)[-1]
    assert saved.final
    assert twin.is_equal(Path(driver.spec.train.output) / saved.path)


@pytest.mark.parametrize(("event", "where"), named(BEFORE_THE_REDUCTION))
def test_a_rank_dies_before_the_reduction_is_whole(
        three: Any, twin: Twins, event: str, where: dict[str, int]) -> None:
    three.hold(1, event, STRUCK, **where)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    three.kill(1)
    for rank in (0, 2):
        failed = three.wait(CollectiveFailed, rank)
        assert failed.iteration == STRUCK
    heal(three, twin(0.0), struck=STRUCK)


@pytest.mark.parametrize(("event", "where"), named(AFTER_IT))
def test_a_rank_dies_after_the_reduction(
        three: Any, twin: Twins, event: str, where: dict[str, int]) -> None:
    """The others have stepped without it, and meet its end in the next iteration."""
    three.hold(1, event, STRUCK, **where)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    for rank in (0, 2):
        three.strike(rank, iteration=STRUCK + 1, event="reduce")
    three.kill(1)
    for rank in (0, 2):
        failed = three.wait(CollectiveFailed, rank)
        assert failed.iteration == STRUCK + 1
    heal(three, twin(0.0), struck=STRUCK + 1)


@pytest.mark.parametrize(("event", "where"), named(BEFORE_THE_REDUCTION[2:] + AFTER_IT[1:]))
def test_an_exception_at_the_point_is_told_and_the_others_finish(
        three: Any, twin: Twins, event: str, where: dict[str, int]) -> None:
    three.hold(1, event, STRUCK, then="raise", **where)
    three.form([0, 1, 2])
    told = three.wait(RankErrored, 1)
    assert told.error == "Struck"
    assert three.processes.pop(1).popen.wait(20) == 1
    struck = {three.wait(CollectiveFailed, rank).iteration for rank in (0, 2)}
    assert len(struck) == 1
    heal(three, twin(0.0), struck=struck.pop())
