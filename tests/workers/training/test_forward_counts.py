"""Counted forward passes: what survives a fault is not computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from rank_driver import Drive, Twins
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions, replica

NUM_ITERATIONS, STRUCK, NUM_ITEMS = 4, 2, 20
CHANGES: dict[str, Any] = {
    "iterations": NUM_ITERATIONS,
    "batch": {"global": NUM_ITEMS, "micro": 1},
    "model": {"num_layers": 4, "hidden": 32, "num_heads": 4, "sequence": 32, "dropout": 0.1},
}


class Case(NamedTuple):
    """In `axes`, the last rank dies while the first one begins the micro-batch `held`. The first
    replica then keeps the micro-batches up to `kept`. Tensor-parallel members agree one later."""

    axes: Axes
    parallel: dict[str, Any]
    held: int
    kept: int


CASES = {
    "pp2dp2": Case(Axes(pp=2, dp=2), {"pipeline": [1, 2]}, 8, 8),
    "pp2dp2 with chunks": Case(
        Axes(pp=2, dp=2, chunks=2), {"pipeline": [1, 2], "chunks": 2}, 8, 10
    ),
    "pp4dp2": Case(Axes(pp=4, dp=2), {"pipeline": [1, 4]}, 10, 10),
    "tp2pp2dp2": Case(Axes(tp=2, pp=2, dp=2), {"tensor": [1, 2], "pipeline": [1, 2]}, 6, 8),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name != "pp2dp2 with chunks"))
        for name in CASES
    ],
)
def test_an_intact_pipeline_keeps_what_it_began(drive: Drive, twin: Twins, name: str) -> None:
    case = CASES[name]
    axes, num_ranks = case.axes, num_positions(case.axes)
    driver = drive(**CHANGES, parallel=case.parallel)
    ranks, intact = list(range(num_ranks)), list(replica(axes, 0))
    victim = num_ranks - 1
    driver.start(*ranks)
    driver.hold(victim, "backward", STRUCK)
    hold = driver.hold(0, "forward", STRUCK, micro_batch=case.held)
    driver.form(ranks, axes=axes)
    driver.held(victim, STRUCK)
    driver.held(0, STRUCK)
    driver.kill(victim)
    kept = tuple(range(0, case.kept + 1, 2))
    told = driver.quiesce(ranks[:-1], "now", hold)
    for rank in ranks[:-1]:
        assert told[rank].micro_batches == (kept if rank in intact else ()), driver.story()
    reports = driver.form(intact, axes=Axes(tp=axes.tp, pp=axes.pp, chunks=axes.chunks))
    assert {report.kept_micro_batches for report in reports.values()} == {kept}
    finished = driver.finish(intact)
    for rank in intact:
        passes = Counter(
            (line["iteration"], line["micro_batch"])
            for line in driver.trace(rank)
            if line["event"] == "forward"
        )
        mine = {
            (at, item)
            for at in range(NUM_ITERATIONS)
            for item in range(NUM_ITEMS)
            if at >= STRUCK or item % 2 == 0
        }
        assert passes == Counter(dict.fromkeys(mine, axes.chunks))
        assert finished[rank].forward_calls == passes.total()
    gap = twin(**CHANGES).difference(driver.final_checkpoint())
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < 1e-5
    assert gap.param_rel < 1e-5


@pytest.mark.parametrize(
    ("axes", "parallel"),
    [(Axes(tp=2, dp=2), {"tensor": [1, 2]}), (Axes(pp=2, dp=2), {"pipeline": [1, 2]})],
    ids=["tp2dp2", "pp2dp2"],
)
def test_a_reduction_that_all_survivors_completed_is_kept(
    drive: Drive, twin: Twins, axes: Axes, parallel: dict[str, Any]
) -> None:
    driver = drive(**CHANGES, parallel=parallel)
    driver.start(0, 1, 2, 3)
    driver.hold(0, "gate", STRUCK)
    driver.form([0, 1, 2, 3], axes=axes)
    driver.held(0, STRUCK)
    for rank in (1, 2, 3):
        driver.strike(rank, iteration=STRUCK, event="gate")
    driver.kill(0)
    told = driver.quiesce([1, 2, 3], "now")
    assert {one.step_version for one in told.values()} == {STRUCK}
    intact = list(replica(axes, 1))
    reports = driver.form(intact, axes=Axes(tp=axes.tp, pp=axes.pp))
    assert {one.step_version for one in reports.values()} == {STRUCK + 1}
    driver.finish(intact)
    passes = Counter(
        (line["iteration"], line["micro_batch"])
        for rank in range(4)
        for line in driver.trace(rank)
        if line["event"] == "forward"
    )
    assert passes == Counter(
        {(at, item): 2 for at in range(NUM_ITERATIONS) for item in range(NUM_ITEMS)}
    ), "each part once"
    gap = twin(**CHANGES).difference(driver.final_checkpoint())
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < 1e-5
    assert gap.param_rel < 1e-5
