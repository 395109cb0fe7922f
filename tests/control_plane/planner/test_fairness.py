"""Alpha-fairness: arithmetic, plans, and what the plan record reports."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import wished
from brute_force import check_best
from decider import Driver, spec, task_of
from explained import explained
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_cases import case
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.planner import (
    alternative_names,
    constraints,
    explain,
    objective,
    pending,
    planner,
)
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand, transition_cost_s, waf_of
from unicron.events.records import reports as r
from unicron.events.spec.policy import ALPHAS, Policy
from wished import rising, slots

pytestmark = pytest.mark.nodes(3)

CLOSE_RATIO = 1e-9
FAIR = (0.5, 1.0, 2.0)


def wish(task: int, now: int, rates: dict[int, float], **more: Any) -> TaskDemand:
    """`rates`: throughput by slots, without the weight."""
    weight = more.get("weight", 1.0)
    return wished.wish(task, now, {x: weight * rate for x, rate in rates.items()}, **more)


def linear(task: int, rate: float = 1.0, **more: Any) -> TaskDemand:
    return wish(task, more.pop("now", 0), {x: rate * x for x in range(1, 9)}, **more)


def asking(demands: list[TaskDemand], num_slots: int, alpha: float, **more: Any) -> PlanProblem:
    return wished.asking(demands, num_slots, alpha=alpha, **more)


# --- the arithmetic -----------------------------------------------------------------------------
@given(st.floats(1e-300, 1e300) | st.floats(0.5, 2.0))
@settings(max_examples=2000, deadline=None)
def test_the_logarithm_is_within_its_bound(value: float) -> None:
    found = float(objective.logarithm(np.array([value]))[0])
    assert abs(found - math.log(value)) <= 2.0**-50 * abs(math.log(value))


def test_logarithms_of_powers_and_next_to_one() -> None:
    values = np.array([1.0, 2.0, 0.5, 2.0**-1000, np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0)])
    found = objective.logarithm(values)
    assert found[0] == 0.0
    assert found[1] == -found[2] == math.log(2.0)
    for value, one in zip(values.tolist(), found.tolist(), strict=True):
        assert one == pytest.approx(math.log(value), rel=2.0**-50)


@pytest.mark.parametrize("alpha", FAIR)
def test_the_marginal_is_the_slope_of_the_utility(alpha: float) -> None:
    rates = np.array([1e-3, 0.4, 0.999, 1.0])
    step = 1e-6
    slope = (objective.utility(rates * (1 + step), alpha) - objective.utility(rates, alpha)) / step
    assert slope == pytest.approx(objective.marginal(rates, alpha), rel=1e-5)
    none = np.array([0.0])
    assert objective.utility(none, alpha) == objective.marginal(none, alpha) == 0.0


def test_rates_are_scaled_by_the_largest() -> None:
    found = objective.in_units(np.array([0.0, 3e15, 1e15, 1e-300])).tolist()
    assert found[0] == 0.0
    assert 0.5 <= found[1] < 1.0
    assert (found[2], found[3]) == (found[1] / 3, 2.0**-objective.RATIO_BITS)
    assert objective.in_units(np.zeros(2)).tolist() == [0.0, 0.0]


# --- examples -----------------------------------------------------------------------------------
def test_a_larger_alpha_shares_more_equally() -> None:
    demands = [linear(1), linear(2, weight=3.0)]
    by_alpha = {alpha: slots(asking(demands, 8, alpha)) for alpha in ALPHAS}
    assert by_alpha == {0.0: (0, 8), 0.5: (1, 7), 1.0: (2, 6), 2.0: (3, 5)}
    nine = {alpha: slots(asking([linear(1), linear(2, weight=9.0)], 8, alpha)) for alpha in FAIR}
    assert nine == {0.5: (0, 8), 1.0: (1, 7), 2.0: (2, 6)}


def test_slots_of_a_slower_task_grow_with_alpha() -> None:
    demands = [linear(1, 9.0), linear(2)]
    assert slots(asking(demands, 8, 0.0)) == (8, 0)
    assert slots(asking(demands, 8, 0.5)) == (7, 1)
    assert slots(asking(demands, 8, 1.0)) == (4, 4)
    assert slots(asking(demands, 8, 2.0)) == (2, 6)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_all_tasks_run_if_they_fit_else_the_heaviest(alpha: float) -> None:
    demands = [
        linear(1, 1e3, weight=5.0),
        linear(2, 1e-3),
        linear(3, weight=2.0),
        wish(4, 0, {1: 0.0}),
    ]
    assert all(slots(asking(demands, 3, alpha))[:3])
    problem = asking(demands, 2, alpha)
    assert slots(problem) == (1, 0, 1, 0)
    assert constraints.below_floor(problem, (1, 0, 1, 0)) == {2: 1}
    assert constraints.unserved_tasks(problem, (1, 0, 1, 0)) == (2,)
    running = asking(
        [replace(one, now=x) for one, x in zip(demands, (0, 1, 1, 0), strict=True)], 2, alpha
    )
    assert slots(running) == (1, 0, 1, 0)


@pytest.mark.parametrize("alpha", FAIR)
def test_a_change_costs_by_the_same_utility(alpha: float) -> None:
    """The task grows if and only if D (U(T') - U(T)) exceeds d T^(1 - alpha)."""

    def u(rate: float) -> float:
        return 2 * math.sqrt(rate) if alpha == 0.5 else math.log(rate) if alpha == 1 else -1 / rate

    gain, span_s = u(1.1) - u(1.0), 7.2e6 / 4
    for times, x in ((0.999, 4), (1.001, 2)):
        one = wish(1, 2, {2: 1.0, 4: 1.1}, transition_s=times * span_s * gain)
        assert slots(asking([one], 4, alpha)) == (x,)


@pytest.mark.parametrize("alpha", FAIR)
def test_gain_min_is_the_least_speedup_of_a_change(alpha: float) -> None:
    demands = [
        wish(1, 2, {2: 1.0, 4: 1.02}, transition_s=0.0),
        wish(2, 2, {2: 1.0}, transition_s=0.0),
    ]
    for share, x in ((0.019, 4), (0.021, 2)):  # on 4 slots task 1 is 2 % faster
        assert slots(asking(demands, 6, alpha, gain_min=share)) == (x, 2)


# --- compared with brute force ------------------------------------------------------------------
@st.composite
def inputs(draw: st.DrawFn) -> PlanProblem:
    demands: list[TaskDemand] = []
    for task in range(1, draw(st.integers(1, 4)) + 1):
        rates = rising(draw)
        demands.append(
            wish(
                task,
                draw(st.sampled_from([0, *rates, 6])),
                rates,
                faulted=draw(st.booleans()),
                floor=draw(st.sampled_from([0, 0, 2])),
                transition_s=draw(st.sampled_from([0.0, 10.0, 1e5])),
                priority=draw(st.sampled_from([0, 0, 1])),
                weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
            )
        )
    return asking(
        demands,
        draw(st.integers(0, 10)),
        draw(st.sampled_from(FAIR)),
        floor=draw(st.booleans()),
        gain_min=draw(st.sampled_from([0.0, 0.1])),
        moves_max=draw(st.none() | st.integers(0, 2)),
    )


def expected(one: TaskDemand, x: int, problem: PlanProblem) -> float:
    """D w U(T) - (d + gain_min D) w T(now)^(1 - alpha), computed with the math module."""
    alpha, rate, had = problem.alpha, waf_of(one, x) / one.weight, waf_of(one, one.now) / one.weight
    made = 0.0 if not rate else math.log(rate) if alpha == 1 else rate ** (1 - alpha) / (1 - alpha)
    held_s = (
        problem.gain_min
        * problem.running_s
        * (not one.faulted and x != one.now <= problem.num_slots)
    )
    lost = (transition_cost_s(one, x) + held_s) * had ** (1 - alpha) if had else 0.0
    return one.weight * (problem.running_s * made - lost)


@given(inputs())
@settings(max_examples=400, deadline=None)
def test_no_plan_is_fairer(problem: PlanProblem) -> None:
    demands, least = problem.demands, constraints.granted_floors(problem)
    priorities = sorted({one.priority for one in demands}, reverse=True)
    values: dict[tuple[int, ...], list[float]] = {}
    for plan in itertools.product(*[(0, *one.sizes) for one in demands]):
        pairs = list(zip(demands, plan, strict=True))
        if sum(plan) > problem.num_slots or any(x < y for x, y in zip(plan, least, strict=True)):
            continue
        if problem.alpha >= 1 and any(
            x and not y and any(one.wafs) for (one, x), y in zip(pairs, least, strict=True)
        ):
            continue
        values[plan] = [
            math.fsum(expected(w, x, problem) for w, x in pairs if w.priority == one)
            for one in priorities
        ]
    size = math.fsum(abs(expected(w, x, problem)) for w in demands for x in (0, *w.sizes)) + 1.0
    size += problem.running_s * math.fsum(w.weight for w in demands) * 50
    check_best(problem, values, CLOSE_RATIO * size)


@given(st.floats(1e-12, 1e12), inputs())
@settings(max_examples=60, deadline=None)
def test_the_unit_of_rates_does_not_matter(unit: float, problem: PlanProblem) -> None:
    """The unit is a power of two, so scaling changes no rounding."""
    times = 2.0 ** round(math.log2(unit))
    scaled = replace(
        problem,
        demands=tuple(
            replace(one, wafs=tuple(times * waf for waf in one.wafs)) for one in problem.demands
        ),
    )
    assert slots(scaled) == slots(problem)


@pytest.mark.parametrize("alpha", FAIR)
def test_large_clusters(alpha: float) -> None:
    problem = replace(case(100, 4096, 3, gain_min=0.005), alpha=alpha)
    choice = planner.choose_plan(problem)
    assert sum(choice.plan.slots) <= 4096
    if alpha >= 1:
        assert all(choice.plan.slots)
    most = planner.choose_plan(replace(problem, alpha=0.0)).plan
    assert choice.plan.waf < most.waf


# --- what is reported ---------------------------------------------------------------------------
def test_the_plan_says_by_how_much_the_runner_up_is_less_fair() -> None:
    problem = asking([linear(1, 9.0), linear(2, 6.0)], 8, 1.0)
    choice, _, why = explained(problem)
    by_what = {other.what: other for other in choice.alternatives}
    assert choice.plan.waf == 4 * 9.0 + 4 * 6.0
    assert why == (
        "t1 begins on 4, t2 begins on 4: the runner-up is worth 3.2 % less by alpha-fairness 1"
    )
    assert by_what["the next best"].behind_share == pytest.approx(math.log(16 / 15) / 2)
    assert explain.paid_back_s(problem, choice.plan.slots) == 0.0
    assert pending.prices(problem, choice.plan) == {}


def test_the_waf_cost_of_fairness_is_computed_on_request() -> None:
    problem = asking([linear(1, 9.0), linear(2, 6.0)], 8, 1.0)
    by_what = {
        x.what: x
        for x in explain.without_each_limit(problem, planner.choose_plan(problem).plan.slots)
    }
    most = by_what[alternative_names.ALPHALESS]
    assert ([x for _, x in most.slots], most.waf) == ([8, 0], 72.0)
    assert (most.objective, most.behind_share) == (alternative_names.NOT_COMPARABLE_NUM, 0.0)


def test_without_alpha_no_fairness_is_reported() -> None:
    problem = asking([linear(1, 9.0), linear(2, 6.0)], 8, 0.0)
    choice, _, why = explained(problem)
    assert explain.without_each_limit(problem, choice.plan.slots) == ()
    assert not any(other.behind_share for other in choice.alternatives)
    assert "alpha" not in why


def test_gain_min_holds_with_alpha() -> None:
    problem = asking([wish(1, 2, {2: 1.0, 4: 1.02}), wish(2, 2, {2: 1.0})], 6, 1.0, gain_min=0.5)
    assert planner.choose_plan(problem).plan.slots == (2, 2)
    assert planner.choose_plan(replace(problem, gain_min=0.0)).plan.slots == (4, 2)


def test_alpha_keeps_no_hot_spare(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(alpha=0.5, hot_spare=True)))
    d.running(spec())
    assert d.state.plan is not None
    assert d.state.plan.hot_spare is None


def test_with_alpha_1_all_tasks_run_and_the_screen_says_so(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(alpha=1.0)))
    table = {x: 1e12 * x for x in range(1, 7)}
    first = d.running(spec(slots={"max": 6}, throughput=table))
    assert len(task_of(d, first).target) == 6
    second = d.submit(spec(name="heavy", weight=2.0, slots={"max": 6}, throughput=table))
    plan = d.state.plan
    assert plan is not None
    assert [(x.task, x.slots) for x in plan.allocations] == [(first, 2), (second, 4)]
    assert (plan.alpha, plan.waf) == (1.0, 2e12 + 2.0 * 4e12)
    held = 6e12 * d.state.policy.gain_min * plan.running_s
    assert plan.objective_flop == pytest.approx(
        plan.waf * plan.running_s - plan.transition_flop - held
    )
    rows = plan_screen._alternatives(
        {
            "waf": plan.waf,
            "alpha": plan.alpha,
            "objective_flop": plan.objective_flop,
            "alternatives": [
                {
                    "what": x.what,
                    "objective": x.objective,
                    "waf": x.waf,
                    "behind_flop": x.behind_flop,
                    "behind_share": x.behind_share,
                }
                for x in plan.alternatives
            ],
        }
    )
    page = "\n".join(rows)
    assert "by alpha-fairness 1" in page
