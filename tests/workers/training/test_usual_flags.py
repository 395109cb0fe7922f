"""The example loop with the flags that Megatron jobs usually set heals with an equal result."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import LocalKeeper
from loop_driver import changed_example, drive_loop, finish_as, flagged_example
from matrix.scenes import newest
from nursery import Nursery
from rank_driver import Driver
from reference import compare
from struck import PP2DP2, TP2DP2, Case, strike
from unicron.events.records.reports import LossNotFinite, RankFinished
from unicron.events.records.types import MemoryCheckpoint
from unicron.events.spec.model import Axes

ITERATIONS, MICRO_BATCHES, STRUCK = 6, 8, 3
RELATIVE_MAX = 1e-5
SPLIT = {"tensor": [1, 2], "pipeline": [1, 2]}
Loops = Callable[..., Driver]


def loop(folder: Path, nursery: Nursery, *flags: str, **options: Any) -> Driver:
    """A driver whose ranks run the example with these flags."""
    return drive_loop(
        folder,
        nursery,
        [],
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        slots_max=8,
        script=flagged_example(folder, flags),
        **options,
    )


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """Factory of drivers: `loops("recompute", pipeline=[2])`."""

    def make(*flags: str, **options: Any) -> Driver:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return closed(loop(folder, nursery, *flags, **options))

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Path]:
    """The final checkpoint of one rank that trains without a flag and without a fault."""
    driver = loop(tmp_path_factory.mktemp("undisturbed"), nursery, **SPLIT)
    try:
        driver.start(0)
        driver.form([0], axes=Axes())
        driver.finish([0])
        yield driver.final_checkpoint()
    finally:
        driver.close()


def finish(driver: Driver, ranks: list[int], undisturbed: Path) -> None:
    finish_as(driver, ranks, undisturbed, ITERATIONS, RELATIVE_MAX)


CASES = {
    "tp2dp2": Case(TP2DP2, 3, "backward", (0, 1), Axes(tp=2)),
    "pp2dp2": Case(PP2DP2, 3, "backward", (0, 2), Axes(pp=2)),
}
CHOSEN = {
    "sequence parallel": "tp2dp2",
    "recompute": "pp2dp2",
    "recompute selectively": "tp2dp2",
    "overlapped reduction": "pp2dp2",
}
"""The layout in which `make test` runs each flag."""


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        pytest.param(layout, flag, marks=[pytest.mark.thorough] * (layout != chosen))
        for layout in CASES
        for flag, chosen in CHOSEN.items()
    ],
)
def test_training_continues_after_a_lost_rank(
    loops: Loops, undisturbed: Path, layout: str, flag: str
) -> None:
    case, driver = CASES[layout], loops(flag, **SPLIT)
    strike(driver, case)
    finish(driver, list(case.members), undisturbed)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(Axes(dp=3), marks=pytest.mark.thorough),
        TP2DP2,
        pytest.param(PP2DP2, marks=pytest.mark.thorough),
    ],
    ids=["dp3", "tp2dp2", "pp2dp2"],
)
def test_a_gather_in_the_next_forward(loops: Loops, undisturbed: Path, axes: Axes) -> None:
    driver = loops("overlapped gather", **SPLIT, optimizer="sharded")
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks)
    driver.form(ranks, axes=axes)
    finish(driver, ranks, undisturbed)


@pytest.mark.parametrize(
    "axes",
    [Axes(dp=3), pytest.param(TP2DP2, marks=pytest.mark.thorough), PP2DP2],
    ids=["dp3", "tp2dp2", "pp2dp2"],
)
@pytest.mark.thorough
def test_a_gather_that_breaks_off_loses_nothing(
    loops: Loops, undisturbed: Path, axes: Axes
) -> None:
    """Rank 1 is held before its forward, so the others wait for its parameters."""
    driver = loops("overlapped gather", **SPLIT, optimizer="sharded")
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks)
    hold = driver.hold(1, "micro_batch", STRUCK)
    driver.form(ranks, axes=axes)
    driver.held(1, STRUCK)
    driver.quiesce(ranks, "now", hold)
    reports = driver.form(ranks, axes=axes)
    assert {one.step_version for one in reports.values()} == {STRUCK}
    finish(driver, ranks, undisturbed)


USUAL = ("bf16", "overlapped gather", "sequence parallel", "recompute")
TP2PP2DP2 = Axes(tp=2, pp=2, dp=2)
EIGHT = list(range(8))
FAULTS = ((1, "backward", 1), (2, "gate", 3), (7, "stage", 4))
"""Victim, event and iteration of each fault."""


def test_the_usual_job_heals_three_times(loops: Loops) -> None:
    """bf16, distributed optimizer, both overlaps, sequence parallel, full recomputation, TP 2 x
    PP 2 x DP 2. A lost shard sets the task back to its last in-memory checkpoint."""
    options: dict[str, Any] = {"tensor": [2], "pipeline": [2], "optimizer": "sharded"}
    calm = loops(*USUAL, **options)
    calm.start(*EIGHT)
    calm.form(EIGHT, axes=TP2PP2DP2)
    calm.finish(EIGHT)
    driver = loops(*USUAL, copy_every=2, **options)
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    driver.start(*EIGHT)
    copies: tuple[MemoryCheckpoint, ...] = ()
    for attempt, (victim, event, iteration) in enumerate(FAULTS, 2):
        hold = driver.hold(victim, event, iteration)
        driver.form(EIGHT, axes=TP2PP2DP2, copies=copies)
        driver.held(victim, iteration)
        driver.kill(victim)
        hold.unlink()
        driver.quiesce([rank for rank in EIGHT if rank != victim], "now")
        copies = newest(driver)
        driver.start(victim, attempt=attempt)
    driver.form(EIGHT, axes=TP2PP2DP2, copies=copies)
    driver.finish(EIGHT)
    gap = compare(driver.final_checkpoint(), calm.final_checkpoint())
    print(gap)
    assert gap.num_losses == ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX


def test_the_usual_job_with_mirrors_loses_no_iteration(loops: Loops) -> None:
    """As before, without in-memory checkpoints: each lost shard is on a second rank."""
    options: dict[str, Any] = {"tensor": [2], "pipeline": [2]}
    calm = loops(*USUAL, optimizer="sharded", **options)
    calm.start(*EIGHT)
    calm.form(EIGHT, axes=TP2PP2DP2)
    calm.finish(EIGHT)
    driver = loops(*USUAL, optimizer="mirrored", **options)
    driver.start(*EIGHT)
    for attempt, (victim, event, iteration) in enumerate(FAULTS, 2):
        hold = driver.hold(victim, event, iteration)
        driver.form(EIGHT, axes=TP2PP2DP2)
        driver.held(victim, iteration)
        driver.kill(victim)
        hold.unlink()
        driver.quiesce([rank for rank in EIGHT if rank != victim], "now")
        driver.start(victim, attempt=attempt)
    reports = driver.form(EIGHT, axes=TP2PP2DP2)
    assert {one.step_version for one in reports.values()} == {FAULTS[-1][2]}
    driver.finish(EIGHT)
    gap = compare(driver.final_checkpoint(), calm.final_checkpoint())
    print(gap)
    assert gap.num_losses == ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX


def test_a_rank_that_joins_after_the_last_step_evaluates_nothing(
    loops: Loops, undisturbed: Path
) -> None:
    driver = loops("evaluation at the end", **SPLIT)
    driver.start(0, 1)
    hold = driver.hold(0, "save", ITERATIONS)
    driver.form([0, 1], axes=Axes(dp=2))
    driver.held(0, ITERATIONS)
    driver.start(2)
    driver.quiesce([0, 1], "boundary", hold)
    driver.form([0, 1, 2], axes=Axes(dp=3))
    for rank in (0, 1, 2):
        driver.wait(RankFinished, rank)
    assert compare(driver.final_checkpoint(), undisturbed).param_rel < RELATIVE_MAX


def test_a_loss_that_is_not_finite_is_named_with_its_micro_batch(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = changed_example(
        tmp_path,
        [
            (
                "    return tokens(iteration",
                "    asked.now = iteration, micro_batch\n    return tokens(iteration",
            ),
            ("losses.float().sum()", "losses.float().sum() * (1, torch.nan)[asked.now == (2, 5)]"),
        ],
    )
    driver = drive_loop(tmp_path, nursery, [], iterations=3, micro_batches=8, script=script)
    try:
        driver.start(0, 1)
        driver.form([0, 1], axes=Axes(dp=2))
        driver.finish([0, 1])
        assert [told.iteration for told in driver.told(LossNotFinite)] == [2]
        healthy, other = (driver.processes[rank].log.read_text() for rank in (0, 1))
        assert "the loss is nan" not in healthy
        (line,) = (line for line in other.splitlines() if "the loss is nan" in line)
        assert re.search(r"iteration\W+2\b.*micro_batch\W+5\b", line), line
    finally:
        driver.close()
