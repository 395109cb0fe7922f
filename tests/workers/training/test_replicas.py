"""Tasks whose replicas span several ranks: after a fault they continue in another layout."""

from __future__ import annotations

from typing import Any

import pytest
from rank_driver import Drive, Twins
from struck import PP2DP2, TP2DP2, Case, strike
from unicron.events.spec.model import Axes

NUM_ITERATIONS = 6
MODEL = {"num_layers": 6, "hidden": 64, "num_heads": 4, "sequence": 64, "dropout": 0.0}
ANY = {"tensor": [1, 2], "pipeline": [1, 2, 3]}


CASES = {
    "tp2dp2_to_tp2": Case(TP2DP2, 3, "forward", (0, 1), Axes(tp=2)),
    "tp2dp2_to_dp3": Case(TP2DP2, 3, "backward", (0, 1, 2), Axes(dp=3)),
    "tp2dp2_to_pp3": Case(TP2DP2, 0, "reduce", (1, 2, 3), Axes(pp=3)),
    "pp2dp2_to_pp2": Case(PP2DP2, 3, "forward", (0, 2), Axes(pp=2)),
    "pp2dp2_to_dp3": Case(PP2DP2, 0, "backward", (1, 2, 3), Axes(dp=3)),
    "dp4_to_tp2_beside": Case(Axes(dp=4), 1, "reduce", (0, 2, 3), Axes(tp=2)),
    "tp2dp2_at_the_gate": Case(TP2DP2, 2, "gate", (0, 1, 3), Axes(tp=2)),
    "tp2dp2_stepping": Case(TP2DP2, 2, "step", (0, 1, 3), Axes(tp=2)),
}


def finish(driver: Any, ranks: list[int], twin: Any) -> None:
    driver.finish(ranks)
    gap = twin.difference(driver.final_checkpoint())
    print(gap, twin.noise)
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < 1e-5
    assert gap.param_rel < 1e-5


@pytest.mark.parametrize(
    "axes",
    [
        PP2DP2,
        *(
            pytest.param(axes, marks=pytest.mark.thorough)
            for axes in (Axes(tp=2), Axes(pp=2), TP2DP2, Axes(pp=3))
        ),
    ],
    ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}",
)
def test_an_undisturbed_task_equals_the_twin(drive: Drive, twin: Twins, axes: Axes) -> None:
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks)
    driver.form(ranks, axes=axes)
    finish(driver, ranks, twin(iterations=NUM_ITERATIONS, model=MODEL))


AS_OTHERS = set(CASES) - {"tp2dp2_to_pp3", "tp2dp2_stepping"}
"""Cases like those that test_own_layouts.py, test_points.py and test_forward_counts.py have."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in AS_OTHERS)) for name in CASES],
)
def test_training_continues_after_a_lost_rank(drive: Drive, twin: Twins, name: str) -> None:
    case = CASES[name]
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    reports = strike(driver, case)
    assert {one.step_version for one in reports.values()} <= {2, 3}
    assert len({one.step_version for one in reports.values()}) == 1
    finish(driver, list(case.members), twin(iterations=NUM_ITERATIONS, model=MODEL))


def test_tensor_ranks_told_in_a_forward_stop_after_its_micro_batch(
    drive: Drive, twin: Twins
) -> None:
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    driver.start(0, 1)
    path = driver.hold(0, "forward", 2, micro_batch=1)
    driver.form([0, 1], axes=Axes(tp=2))
    driver.held(0, 2)
    reports = driver.quiesce([0, 1], "now", path)
    assert {report.micro_batches for report in reports.values()} == {(0, 1)}
    driver.form([0, 1], axes=Axes(tp=2))
    finish(driver, [0, 1], twin(iterations=NUM_ITERATIONS, model=MODEL))
