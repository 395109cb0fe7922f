"""The planner bench: the solvers agree, and results are compared correctly."""

from __future__ import annotations

import itertools

import pytest
from bench.planner import main, trial
from bench.recovery.rows import Row, row
from planner_cases import case


@pytest.mark.parametrize("seed", range(5))
def test_plain_dynamic_programming_finds_our_plan(seed: int) -> None:
    problem = case(12, 256, seed)
    assert trial.unicron(problem, 1.0) == trial.plain_dp(problem, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_case_is_a_valid_planning_problem(seed: int) -> None:
    problem = case(100, 4096, seed)
    assert problem == case(100, 4096, seed)
    assert sum(wish.now for wish in problem.demands) <= problem.num_slots
    assert any(wish.faulted for wish in problem.demands)
    assert any(wish.now == 0 for wish in problem.demands)
    for wish in problem.demands:
        assert wish.now in (0, *wish.sizes)
        assert all(small < large for small, large in itertools.pairwise(wish.sizes))
        assert not (wish.faulted and wish.now == 0)


def test_a_plan_that_is_worth_more_than_ours_is_an_error() -> None:
    assert main.compared([10**9, 5], [10**9, 5], "highs") == (
        "objectives equal to ours, to the last digit"
    )
    assert main.compared([10**9], [10**9 - 1000], "highs") == "up to 0.0001 % below ours"
    assert main.compared([10**9], [10**9 + 1], "highs").startswith("BROKEN")
    assert main.compared([10**9], [10**8], "highs").startswith("BROKEN")


def test_a_late_solver_has_no_figure_and_goals_are_listed() -> None:
    told = {
        "unicron": [{"plan_ms": 4.0, "objective": 7, "explained_ms": 14.0}],
        "glpk_mi": [{"plan_ms": 100.0, "objective": 7}, {"late": True}],
        "highs": [{"plan_ms": 50.0, "objective": 7}],
        "plain_dp": [{"plan_ms": 6.0, "objective": 7}],
    }
    rows = main.rows_of("100x4096", told, 60.0)
    assert Row("100x4096", "glpk_mi", "plan_ms", None, "ms", 0, "not within 60 s") in rows
    assert main.held_to(rows) == [
        "holds   100x4096 plan_ms (the bare solver): 4, goal at most 10",
        "misses  100x4096 explained_ms (what production runs) over plan_ms: 3.5, goal at most 3",
        "holds   100x4096 highs, the fastest peer, over unicron: 12.5, goal at least 10",
    ]
    rows.append(row("100x4096", "cp_sat", "plan_ms", [1.0], "ms", "BROKEN: 3 % below ours"))
    assert main.held_to(rows)[-1] == "100x4096 cp_sat BROKEN: 3 % below ours"
