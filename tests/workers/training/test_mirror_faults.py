"""Jobs with mirrored shards, struck where it is awkward: they end with the bits of an undisturbed
run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import LocalKeeper
from loop_driver import FLAGS, Changes, changed_example, drive_loop
from matrix.scenes import newest
from nursery import Nursery
from rank_driver import Driver
from reference import differing, read
from unicron.events.spec.model import Axes

ITERATIONS, MICRO_BATCHES, STRUCK = 7, 8, 2
BOTH = [*FLAGS["bf16"], *FLAGS["overlapped gather"]]
DP3 = Axes(dp=3)
Loops = Callable[..., Driver]


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """Factory of drivers of the example with these changes, mirrored and bit for bit."""

    def make(changes: Changes, **options: Any) -> Driver:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        driver = closed(
            drive_loop(
                folder,
                nursery,
                [],
                iterations=ITERATIONS,
                micro_batches=MICRO_BATCHES,
                slots_max=4,
                script=changed_example(folder, changes),
                reproducible="bitwise",
                optimizer="mirrored",
                **options,
            )
        )
        driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
        return driver

    return make


def calm(driver: Driver, axes: Axes = DP3) -> dict[str, Any]:
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    return finish(driver, ranks)


def finish(driver: Driver, ranks: list[int]) -> dict[str, Any]:
    driver.finish(ranks)
    assert "not bit for bit" not in "".join(one.log.read_text() for one in driver.started)
    return read(driver.final_checkpoint())


def struck(
    driver: Driver, victim: int, event: str, iteration: int, ranks: list[int], *more: int
) -> list[int]:
    """The victim dies at this event, with `more` ranks; returns the others, which have quiesced."""
    driver.held(victim, iteration)
    for rank in (victim, *more):
        driver.kill(rank)
    (driver.trace_dir / "hold" / f"7-{victim}").unlink()
    left = [rank for rank in ranks if rank not in (victim, *more)]
    driver.quiesce(left, "now")
    return left


CASES: dict[str, tuple[Changes, dict[str, Any], Axes, int, str, int]] = {
    "evaluation": ([*BOTH, *FLAGS["held evaluation"]], {}, DP3, 1, "evaluate", 0),
    "evaluation, first": ([*BOTH, *FLAGS["held evaluation"]], {}, DP3, 0, "evaluate", 0),
    "checkpoint begun": (BOTH, {"checkpoint_every": 3}, DP3, 0, "save", 3),
    "checkpoint half written": (BOTH, {"checkpoint_every": 3}, DP3, 0, "save_mid", 3),
    "copy begun": (BOTH, {"copy_every": 2}, DP3, 1, "copy", 2),
    "copy half sent": (BOTH, {"copy_every": 2}, DP3, 1, "copy_mid", 2),
    "sending to a mirror": (BOTH, {}, DP3, 1, "mirror", STRUCK),
    "a bucket": (BOTH, {}, DP3, 1, "bucket", STRUCK),
    "gather": (FLAGS["bf16"], {}, DP3, 1, "gather", STRUCK),
    "gather for an evaluation": (BOTH, {}, DP3, 1, "gather", 4),
    "skipped step": (
        [*FLAGS["fp16"], *FLAGS["overlapped gather"]],
        {},
        DP3,
        1,
        "scaler",
        STRUCK,
    ),
    "after a skipped step": (
        [*FLAGS["fp16"], *FLAGS["overlapped gather"]],
        {},
        DP3,
        1,
        "mirror",
        STRUCK + 1,
    ),
    "clip": ([*BOTH, *FLAGS["clipping"]], {}, DP3, 1, "clip", STRUCK),
    "tied embeddings": (
        [*BOTH, *FLAGS["tied embeddings"]],
        {"pipeline": [2]},
        Axes(pp=2, dp=2),
        3,
        "embedding",
        STRUCK,
    ),
}
"""Changes of the example, options, layout; victim, event and iteration."""


QUICK = ("evaluation",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in CASES],
)
def test_a_lost_rank_changes_no_bit(loops: Loops, case: str) -> None:
    changes, options, axes, victim, event, iteration = CASES[case]
    expected = calm(loops(changes, **options), axes)
    driver = loops(changes, **options)
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks, axes=axes)
    driver.hold(victim, event, iteration)
    driver.form(ranks, axes=axes)
    struck(driver, victim, event, iteration, ranks)
    driver.start(victim, attempt=2)
    reports = driver.form(ranks, axes=axes)
    assert {one.origin for one in reports.values()} <= {"own", "peer"}, reports
    assert differing(finish(driver, ranks), expected) == []


@pytest.mark.thorough
@pytest.mark.parametrize("event", ["backward", "mirror", "gate", "step_mid"])
def test_a_shard_lost_with_its_mirror_goes_on_from_the_last_copy(loops: Loops, event: str) -> None:
    """Rank 2 mirrors rank 1. Both are lost, and what follows the copy is done again."""
    axes, ranks = Axes(dp=4), [0, 1, 2, 3]
    expected = calm(loops(BOTH), axes)
    driver = loops(BOTH, copy_every=2)
    driver.start(*ranks, axes=axes)
    driver.hold(1, event, 4)
    driver.form(ranks, axes=axes)
    left = struck(driver, 1, event, 4, ranks, 2)
    copies = newest(driver)
    reports = driver.form(left, axes=Axes(dp=2), copies=copies)
    assert {(one.origin) for one in reports.values()} == {"copy"}
    assert {one.step_version for one in reports.values()} <= {2, 4}
    driver.start(1, 2, attempt=2)
    driver.quiesce(left, "boundary")
    driver.form(ranks, axes=axes)
    assert differing(finish(driver, ranks), expected) == []


@pytest.mark.thorough
def test_fewer_and_more_replicas_change_no_bit(loops: Loops) -> None:
    """Four replicas, then three, two, three and four; each loss is before the last one's rank is
    there again."""
    ranks = [0, 1, 2, 3]
    expected = calm(loops(BOTH), Axes(dp=4))
    driver = loops(BOTH)
    driver.start(*ranks, axes=Axes(dp=4))
    driver.hold(1, "mirror", 1)
    driver.form(ranks, axes=Axes(dp=4))
    left = struck(driver, 1, "mirror", 1, ranks)
    driver.hold(2, "step_mid", 2)
    assert {one.step_version for one in driver.form(left, axes=DP3).values()} == {1}
    left = struck(driver, 2, "step_mid", 2, left)
    driver.start(1, attempt=2)
    hold = driver.hold(0, "forward", 3)
    reports = driver.form(left, axes=Axes(dp=2))
    assert {one.origin for one in reports.values()} <= {"own", "peer"}
    driver.held(0, 3)
    driver.quiesce(left, "boundary", hold)
    hold = driver.hold(3, "gate", 4)
    left = [0, 1, 3]
    driver.form(left, axes=DP3)
    left = struck(driver, 3, "gate", 4, left)
    driver.start(2, attempt=2)
    driver.start(3, attempt=2)
    reports = driver.form(ranks, axes=Axes(dp=4))
    assert {one.step_version for one in reports.values()} == {4}
    assert differing(finish(driver, ranks), expected) == []
