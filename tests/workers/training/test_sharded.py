"""Tasks with a sharded optimizer: what a lost rank costs, and that the result equals the twin's."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_stores import LocalKeeper, named, whole_steps
from rank_driver import Drive, Twins
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.spec.model import Axes

NUM_ITERATIONS = 6
STRUCK = 4
EVERY = 3
SHARDED = {"optimizer": "sharded"}
EVENTS = ("backward", "gate", "step_mid", "gather")
RELATIVE_MAX = {"fp32": 1e-5, "bf16": 3e-3}


def ready(
    drive: Drive, ranks: list[int], *, parallel: dict[str, Any] = SHARDED, **changes: Any
) -> Any:
    driver = drive(iterations=NUM_ITERATIONS, parallel=parallel, **changes)
    driver.start(*ranks)
    return driver


def finish(driver: Any, ranks: list[int], twin: Twins, precision: str = "fp32") -> None:
    """Finish, and compare the result with the twin's."""
    driver.finish(ranks)
    gap = twin(iterations=NUM_ITERATIONS, precision=precision).difference(driver.final_checkpoint())
    print(gap)
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX[precision]
    assert gap.param_rel < RELATIVE_MAX[precision]


def stopped(driver: Any, held: int, event: str, iteration: int, ranks: list[int]) -> None:
    """Wait until rank `held` is held at `event` and the others are as far as they can get.

    A rank steps only if it has passed the step barrier itself. A test that expects the step must
    see each rank after the barrier.
    """
    driver.held(held, iteration)
    reached = {"step_mid": "step", "gather": "gather"}.get(event, "stats")
    for rank in ranks:
        if rank != held:
            driver.strike(rank, iteration=iteration, event=reached)


def copied(driver: Any) -> tuple[Any, ...]:
    """Wait for the in-memory checkpoint of step EVERY; return it as an order names it."""
    driver.until(lambda: EVERY in whole_steps(driver.keepers), "all ranks have stored their shares")
    return (named(driver.keepers, driver.wait(MemoryCheckpointStored, 0)),)


def pairs(fp32: tuple[str, ...], events: tuple[str, ...] = EVENTS) -> list[Any]:
    """Every event with every precision. `make test` runs each event once.

    `fp32`: the events that `make test` runs in fp32. It runs the others in bf16.
    """
    return [
        pytest.param(
            precision,
            event,
            marks=[pytest.mark.thorough] * ((event in fp32) != (precision == "fp32")),
        )
        for precision in ("fp32", "bf16")
        for event in events
    ]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
def test_an_undisturbed_task_equals_the_twin(drive: Drive, twin: Twins, precision: str) -> None:
    ranks = [0, 1, 2]
    driver = ready(drive, ranks, precision=precision)
    driver.form(ranks)
    finish(driver, ranks, twin, precision)


@pytest.mark.parametrize(("precision", "event"), pairs(fp32=("backward", "gate")))
def test_a_quiesce_at_any_event_loses_nothing(
    drive: Drive, twin: Twins, precision: str, event: str
) -> None:
    """A change of layout after a quiesce also keeps the sums of an unfinished iteration."""
    ranks = [0, 1, 2]
    driver = ready(drive, ranks, precision=precision)
    driver.form(ranks)
    hold = driver.hold(1, event, STRUCK)
    stopped(driver, 1, event, STRUCK, ranks)
    driver.quiesce(ranks, "now", hold)
    hold = driver.hold(1, event, STRUCK + 1)
    reports = driver.form(ranks)
    has_stepped = event in ("step_mid", "gather")
    assert {one.step_version for one in reports.values()} == {STRUCK + has_stepped}
    assert {one.origin for one in reports.values()} == {"peer" if has_stepped else "own"}
    stopped(driver, 1, event, STRUCK + 1, ranks)
    driver.quiesce(ranks, "now", hold)
    kept = [one.kept_micro_batches for one in driver.form(ranks, axes=Axes(dp=2)).values()]
    assert any(kept) == (not has_stepped)
    finish(driver, ranks[:2], twin, precision)


@pytest.mark.parametrize("event", ["backward", "gate", "gather"])
def test_a_lost_shard_restores_the_checkpoint(drive: Drive, twin: Twins, event: str) -> None:
    driver = drive(iterations=NUM_ITERATIONS, parallel=SHARDED, copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1")]
    driver.start(0, 1, 2)
    driver.hold(1, event, STRUCK)
    driver.form([0, 1, 2])
    driver.held(1, STRUCK)
    copies = copied(driver)
    driver.kill(1)
    driver.quiesce([0, 2], "now")
    first, second = driver.form([0, 2], copies=copies).values()
    assert (first.origin, first.step_version, first.kept_micro_batches) == ("copy", EVERY, ())
    assert (second.origin, second.step_version, second.source) == ("copy", EVERY, -1)
    finish(driver, [0, 2], twin)


def test_without_a_checkpoint_training_restarts_from_the_seed(drive: Drive, twin: Twins) -> None:
    driver = ready(drive, [0, 1])
    driver.hold(1, "backward", 2)
    driver.form([0, 1])
    driver.held(1, 2)
    driver.kill(1)
    driver.quiesce([0], "now")
    (report,) = driver.form([0]).values()
    assert (report.origin, report.step_version) == ("seed", 0)
    finish(driver, [0], twin)


MIRRORED = {"optimizer": "mirrored"}


@pytest.mark.parametrize(("precision", "event"), pairs(("step_mid", "gather"), (*EVENTS, "mirror")))
def test_with_mirrors_a_lost_shard_costs_no_iteration(
    drive: Drive, twin: Twins, precision: str, event: str
) -> None:
    """Two ranks are lost in turn. The second loss uses mirrors that were filled after the first."""
    driver = ready(drive, [0, 1, 2, 3], parallel=MIRRORED, precision=precision)
    ranks = [0, 1, 2, 3]
    driver.form(ranks)
    for struck, victim in ((2, 1), (STRUCK, 3)):
        driver.hold(victim, event, struck)
        stopped(driver, victim, event, struck, ranks)
        driver.kill(victim)
        ranks.remove(victim)
        driver.quiesce(ranks, "now")
        reports = driver.form(ranks, axes=Axes(dp=len(ranks)))
        has_stepped = event in ("step_mid", "gather")
        assert {one.step_version for one in reports.values()} == {struck + has_stepped}
        assert any(one.kept_micro_batches for one in reports.values()) == (not has_stepped)
    finish(driver, ranks, twin, precision)


@pytest.mark.parametrize("victim", [0, 3])
def test_each_tensor_parallel_shard_has_a_mirror(drive: Drive, twin: Twins, victim: int) -> None:
    """The third survivor is a standby member until the layout becomes dp=3."""
    ranks = [0, 1, 2, 3]
    driver = ready(drive, ranks, parallel={**MIRRORED, "tensor": [1, 2]})
    driver.form(ranks, axes=Axes(tp=2, dp=2))
    driver.hold(victim, "gather", 2)
    stopped(driver, victim, "gather", 2, ranks)
    driver.kill(victim)
    left = [rank for rank in ranks if rank != victim]
    driver.quiesce(left, "now")
    reports = driver.form(left, axes=Axes(tp=2))
    assert {one.step_version for one in reports.values()} == {3}
    driver.quiesce(left, "boundary")
    driver.form(left, axes=Axes(dp=3))
    finish(driver, left, twin)


def test_a_shard_lost_with_its_mirror_restores_the_checkpoint(drive: Drive, twin: Twins) -> None:
    driver = drive(iterations=NUM_ITERATIONS, parallel=MIRRORED, copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1")]
    driver.start(0, 1, 2, 3)
    driver.hold(1, "backward", STRUCK)
    driver.form([0, 1, 2, 3])
    driver.held(1, STRUCK)
    copies = copied(driver)
    driver.kill(1)
    driver.kill(2)
    driver.quiesce([0, 3], "now")
    first, second = driver.form([0, 3], copies=copies).values()
    assert (first.origin, first.step_version) == ("copy", EVERY)
    assert (second.origin, second.step_version) == ("copy", EVERY)
    finish(driver, [0, 3], twin)
