"""Without a kept sum, a failed reduction redoes its iteration, and no iteration is lost."""

from __future__ import annotations

from typing import Any

import pytest
from rank_driver import Drive, Twins
from unicron.events.spec.model import Axes

NUM_ITERATIONS, STRUCK = 4, 2
MODEL = {"num_layers": 4, "hidden": 32, "num_heads": 4, "sequence": 32}
UNTIED = MODEL | {"tie_embeddings": False}
NO_SUM: dict[str, Any] = {"iterations": NUM_ITERATIONS, "kept_sum": False, "model": MODEL}
OVERLAPPED = {"overlap": True, "bucket_params": 10_000}
PARALLEL = {"parallel": {"pipeline": [1, 2]}}


@pytest.mark.parametrize(
    ("changes", "event", "bucket", "is_kept"),
    [
        ({}, "reduce", -1, True),
        ({}, "bucket", 0, False),
        (OVERLAPPED, "reduce", -1, True),
        (OVERLAPPED, "bucket", 1, False),
    ],
    ids=["before", "in the reduction", "overlapped, before", "overlapped, in the reduction"],
)
def test_a_failed_reduction_redoes_the_iteration(
    drive: Drive, twin: Twins, changes: dict[str, Any], event: str, bucket: int, is_kept: bool
) -> None:
    driver = drive(**NO_SUM, **changes)
    driver.start(0, 1, 2)
    driver.hold(2, event, STRUCK, **({"bucket": bucket} if bucket >= 0 else {}))
    holds = [driver.hold(rank, event, STRUCK) for rank in (0, 1)] if is_kept else []
    driver.form([0, 1, 2])
    for rank in (0, 1, 2) if is_kept else (2,):
        driver.held(rank, STRUCK)
    for rank in () if is_kept else (0, 1):
        driver.strike(rank, iteration=STRUCK, event="bucket", nth=1)
    driver.kill(2)
    driver.ask_to_leave([0, 1], "now")
    driver.heard(0, 1)
    for hold in holds:
        hold.unlink()
    told = driver.quiesced([0, 1])
    for rank in (0, 1):
        assert told[rank].step_version == STRUCK
        assert bool(told[rank].micro_batches) == is_kept
    reports = driver.form([0, 1])
    redone = sum(len(one.remaining_micro_batches) for one in reports.values())
    assert (redone < 12) == is_kept
    _finish(driver, [0, 1], twin)


def test_a_reduced_sum_that_does_not_count_is_lost(drive: Drive, twin: Twins) -> None:
    driver = drive(**NO_SUM | {"model": UNTIED}, **PARALLEL)
    driver.start(0, 1, 2, 3)
    driver.hold(3, "reduced", STRUCK)
    late = driver.hold(0, "bucket_done", STRUCK)
    driver.form([0, 1, 2, 3], axes=Axes(pp=2, dp=2))
    driver.held(3, STRUCK)
    driver.held(0, STRUCK)
    for rank in (1, 2):
        driver.strike(rank, iteration=STRUCK, event="gate")
    driver.kill(3)
    told = driver.quiesce([0, 1, 2], "now", late)
    assert {one.step_version for one in told.values()} == {STRUCK}
    assert {one.micro_batches for one in told.values()} == {()}
    reports = driver.form([0, 2], axes=Axes(pp=2))
    assert {one.step_version for one in reports.values()} == {STRUCK}
    assert {len(one.remaining_micro_batches) for one in reports.values()} == {12}
    _finish(driver, [0, 2], twin, UNTIED)


def _finish(driver: Any, ranks: list[int], twin: Twins, model: dict[str, Any] = MODEL) -> None:
    driver.finish(ranks)
    gap = twin(iterations=NUM_ITERATIONS, model=model).difference(driver.final_checkpoint())
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < 1e-5
    assert gap.param_rel < 1e-5
