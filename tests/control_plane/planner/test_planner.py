"""The planner is exact: brute force agrees, ties are deterministic, alternatives are reported."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from decider import spec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_problems import ALIKE, KINDS, MTBF_GPU_S, TRANSITION_S, asking, wishes
from unicron.control_plane.planner import pending, planner
from unicron.control_plane.planner.objective import objective_flop
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand, waf_of
from unicron.control_plane.planner.solver import knapsack
from unicron.control_plane.planner.solver.candidates import Candidates
from unicron.control_plane.throughput import table as throughput
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records.decisions import ThroughputSet


def pairs(rows: Candidates) -> list[list[tuple[int, int]]]:
    """(size, gain) by row."""
    flat = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    return [flat[begin:end] for begin, end in itertools.pairwise(rows.starts.tolist())]


def brute_force(
    rows: list[list[tuple[int, int]]], num_slots: int
) -> list[tuple[int, tuple[int, ...]]]:
    """(objective, slots) of all plans that fit, best first; a tie goes to the first task."""
    plans = [
        (sum(gain for _, gain in plan), tuple(size for size, _ in plan))
        for plan in itertools.product(*rows)
        if sum(size for size, _ in plan) <= num_slots
    ]
    return sorted(plans, reverse=True)


@given(wishes())
@settings(max_examples=300, deadline=None)
def test_the_solver_finds_the_best_plan(case: tuple[list[TaskDemand], int]) -> None:
    found, num_slots = case
    rows = planner.allowed_candidates(asking(found, num_slots))
    plans = brute_force(pairs(rows), num_slots)
    assert knapsack.best(rows, num_slots) == (plans[0][1], plans[0][0])


@given(wishes())
@settings(max_examples=100, deadline=None)
def test_sums_stay_exact_in_a_double(case: tuple[list[TaskDemand], int]) -> None:
    rows = planner.allowed_candidates(asking(*case))
    assert sum(max(abs(gain) for _, gain in row) for row in pairs(rows)) < 2**53


def test_linear_rates_stay_linear_to_the_last_bit() -> None:
    """Multiples of these rates are rounded. Each slot of a task still gains the same integer."""
    found = [
        _demand(task, 0, {size: 1e14 / (3 + task) * size for size in range(1, 200)})
        for task in range(1, 101)
    ]
    for row in pairs(planner.allowed_candidates(asking(found, 4096))):
        assert [gain for _, gain in row] == [row[1][1] * size for size, _ in row]


def test_sizes_with_equal_rates_have_equal_gains() -> None:
    """The rate is constant over several sizes, but its value per slot is no integer."""
    found = [_demand(task, 0, {1: 1.0, 2: 1.0, 3: 1.0, 7: 1.5, 9: 1.5}) for task in range(1, 4)]
    for row in pairs(planner.allowed_candidates(asking(found, 7))):
        assert row[1][1] == row[2][1] == row[3][1] < row[4][1] == row[5][1]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_a_size_above_the_capacity_does_not_affect_the_scale(alpha: float) -> None:
    """now=3: task 1 has this size, but a node loss has reduced the capacity."""
    for now in (0, 3):
        found = [
            _demand(1, now, {1: 1.0, 2: 1.5, 3: 1e300}, transition_s=0.0),
            _demand(2, 0, {1: 1.0, 2: 1.5, 1 << 40: 1e308}),
        ]
        assert planner.choose_plan(replace(asking(found, 2), alpha=alpha)).plan.slots == (1, 1)


@given(wishes())
@settings(max_examples=200, deadline=None)
def test_the_choice_is_consistent(case: tuple[list[TaskDemand], int]) -> None:
    found, num_slots = case
    choice = planner.choose_plan(asking(found, num_slots))
    assert sum(x.slots for x in choice.allocations) <= num_slots
    for demand, allocation in zip(found, choice.allocations, strict=True):
        assert allocation.slots == 0 or allocation.slots in demand.sizes
        assert allocation.waf == waf_of(demand, allocation.slots)
    assert choice.plan.waf == math.fsum(x.waf for x in choice.allocations)
    assert all(
        tuple(x for _, x in other.slots) != choice.plan.slots for other in choice.alternatives
    )


def _demand(
    task: int,
    now: int,
    wafs: dict[int, float],
    *,
    faulted: bool = False,
    transition_s: float = TRANSITION_S,
) -> TaskDemand:
    return TaskDemand(
        task=task,
        name=f"t{task}",
        now=now,
        faulted=faulted,
        transition=Transition.uniform(transition_s),
        sizes=tuple(wafs),
        wafs=tuple(wafs.values()),
    )


def _choose(found: list[TaskDemand], num_slots: int) -> planner.Choice:
    return planner.choose_plan(asking(found, num_slots))


def test_a_healthy_task_gives_a_slot() -> None:
    alpha = _demand(1, 4, {2: 3.2, 3: 4.7, 4: 6.16}, faulted=True)
    beta = _demand(2, 2, {1: 1.5, 2: 2.5})
    choice = _choose([alpha, beta], 4)
    assert choice.plan.slots == (3, 1)
    by_name = {other.what: other.slots for other in choice.alternatives}
    assert by_name == {"the next best": ((1, 4), (2, 0))}
    assert [other.waf for other in choice.alternatives] == [6.16]


def test_the_unchanged_plan_and_the_next_best_are_reported() -> None:
    choice = _choose([_demand(1, 2, {2: 3.2, 4: 5.0}), _demand(2, 0, {2: 2.5})], 4)
    assert choice.plan.slots == (2, 2)
    assert [(x.what, x.slots, x.waf) for x in choice.alternatives] == [
        ("keep as it is", ((1, 2), (2, 0)), 3.2),
        ("the next best", ((1, 4), (2, 0)), 5.0),
    ]


def test_a_next_best_that_takes_too_long_is_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        _demand(task, 0, {size: size**0.9 + (7 * task * size % 11) / 50 for size in range(1, 12)})
        for task in range(1, 9)
    ]
    exact = {other.what: other for other in _choose(found, 40).alternatives}
    monkeypatch.setattr(planner, "RUNNERS_WORK_NUM_MAX", 0)
    choice = _choose(found, 40)
    by_name = {other.what: other for other in choice.alternatives}
    assert "the next best" in exact
    assert "the next best" not in by_name
    near = by_name[planner.NEAREST]
    slots = tuple(x for _, x in near.slots)
    assert sum(slots) <= 40
    assert sum(x != y for x, y in zip(slots, choice.plan.slots, strict=True)) == 2
    assert near.objective <= exact["the next best"].objective
    assert near.objective == sum(
        dict(row)[x]
        for row, x in zip(pairs(planner.allowed_candidates(asking(found, 40))), slots, strict=True)
    )


def test_a_small_gain_changes_no_healthy_task() -> None:
    choice = _choose([_demand(1, 2, {2: 100.0, 3: 100.4}), _demand(2, 2, {1: 50.0, 2: 50.1})], 4)
    assert choice.plan.slots == (2, 2)
    assert planner.choose_plan(
        replace(
            asking([_demand(1, 2, {2: 100.0, 3: 100.4}), _demand(2, 2, {1: 50.0, 2: 50.1})], 4),
            gain_min=0.0,
        )
    ).plan.slots == (3, 1)


@pytest.mark.parametrize(("more", "changes"), [(0.0049, False), (0.0051, True)])
def test_gain_min_is_relative_to_the_task_itself(more: float, changes: bool) -> None:
    found = [_demand(1, 2, {2: 1e9}), _demand(2, 1, {1: 1.0, 2: 1.0 + more}, transition_s=0.0)]
    assert _choose(found, 4).plan.slots == (2, 2 if changes else 1)


def test_costs_of_faulted_tasks_do_not_lower_gain_min() -> None:
    """The MTBF is so short that the objective is below 0."""
    found = [
        _demand(1, 2, {2: 1e5}, faulted=True),
        _demand(2, 1, {1: 1.0, 2: 1.004}, transition_s=0.0),
    ]
    choice = planner.choose_plan(asking(found, 4, mtbf_gpu_s=4.0))
    assert choice.plan.objective < 0
    assert choice.plan.slots == (2, 1)


def exact_objective(problem: PlanProblem, slots: tuple[int, ...]) -> Fraction:
    """The objective of a plan by the equation of objective.py, as an exact fraction."""
    total, running_s = Fraction(0), Fraction(problem.running_s)
    for demand, x in zip(problem.demands, slots, strict=True):
        waf = {0: 0.0, **dict(zip(demand.sizes, demand.wafs, strict=True))}
        kinds, now = demand.transition, demand.now
        cost_s = (
            0.0
            if not now or (x == now and not demand.faulted)
            else kinds.same_s
            if x == now
            else kinds.stop_s
            if not x
            else kinds.grow_s
            if x > now
            else kinds.shrink_s
        )
        held = (
            Fraction(problem.gain_min)
            * running_s
            * (not demand.faulted and now <= problem.num_slots and x != now)
        )
        total += Fraction(waf[x]) * running_s - Fraction(waf[now]) * (Fraction(cost_s) + held)
    return total


@given(wishes(), st.sampled_from([0.0, 0.005, 0.2]), st.sampled_from([MTBF_GPU_S, 100.0]))
@settings(max_examples=200, deadline=None)
def test_no_plan_is_worth_more_by_the_equation(
    case: tuple[list[TaskDemand], int], gain_min: float, mtbf_gpu_s: float
) -> None:
    """The plan is compared with all plans, in fractions. The planner rounds each size once."""
    problem = asking(*case, gain_min=gain_min, mtbf_gpu_s=mtbf_gpu_s)
    worth = {
        slots: exact_objective(problem, slots)
        for slots in itertools.product(*((0, *demand.sizes) for demand in problem.demands))
        if sum(slots) <= problem.num_slots
    }
    choice = planner.choose_plan(problem)
    most = sum(
        max((abs(Fraction(waf)) for waf in demand.wafs), default=Fraction(0))
        for demand in problem.demands
    ) * (Fraction(problem.running_s) + 700)
    close = most / 2**40
    assert worth[choice.plan.slots] >= max(worth.values()) - close
    for other in choice.alternatives:
        assert worth[tuple(x for _, x in other.slots)] <= worth[choice.plan.slots] + close
        assert other.objective <= choice.plan.objective
    assert abs(objective_flop(problem, choice.plan.slots) - worth[choice.plan.slots]) <= close


def test_equal_plans_go_to_the_first_task() -> None:
    assert _choose([_demand(1, 0, {2: 5.0}), _demand(2, 0, {2: 5.0})], 2).plan.slots == (2, 0)


def test_a_hundred_tasks_fill_the_cluster() -> None:
    found = [
        _demand(task, 0, {size: size * (1.0 + task / 100) for size in range(8, 136, 8)})
        for task in range(1, 101)
    ]
    choice = _choose(found, 1024)
    assert sum(choice.plan.slots) == 1024


def test_sizes_between_declared_ones_have_the_lower_rate() -> None:
    table = throughput.table(7, spec(throughput={2: 10.0, 4: 30.0}))
    assert table.origin == "declared"
    assert dict(zip(table.sizes, table.rates_flops, strict=True)) == {
        1: 0.0,
        2: 10.0,
        3: 10.0,
        4: 30.0,
    }
    assert throughput.candidates(table, 0) == [(2, 10.0), (4, 30.0)]
    assert throughput.candidates(table, 3) == [(2, 10.0), (3, 10.0), (4, 30.0)]


def test_modelled_time_follows_the_fullest_rank() -> None:
    table = throughput.table(
        7, spec(train={"iterations": 5, "output": "/o", "batch": {"global": 10, "micro": 2}})
    )
    assert table.origin == "modelled"
    rates = dict(zip(table.sizes, table.rates_flops, strict=True))
    assert rates[2] == rates[1] * 5 / 3
    assert rates[3] == rates[4] == rates[1] * 5 / 2
    assert [size for size, _ in throughput.candidates(table, 0)] == [1, 2, 3]


def test_a_command_task_has_a_rate_linear_in_slots() -> None:
    table = throughput.table(7, spec(train=None, command=["true"]))
    assert table.rates_flops[3] == 4 * table.rates_flops[0]


def test_a_size_with_idle_workers_has_the_rate_of_fewer() -> None:
    table = ThroughputSet(task=1, origin="measured", sizes=(1, 2, 3), rates_flops=(4.0, 9.0, 7.0))
    assert throughput.candidates(table, 3) == [(1, 4.0), (2, 9.0), (3, 9.0)]


# --- the price of a waiting task ----------------------------------------------------------------
@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[TaskDemand], int, float]:
    """More demand than slots, and rates that a weight can outbid."""
    rate = st.floats(0.5, 50.0, allow_nan=False)
    found: list[TaskDemand] = []
    for task in range(1, draw(st.integers(2, 4)) + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=4)))
        wafs = [draw(rate) for _ in sizes]
        found.append(
            TaskDemand(
                task=task,
                name=f"t{task}",
                now=draw(st.sampled_from([0, *sizes])),
                faulted=draw(st.booleans()),
                transition=draw(st.sampled_from([ALIKE, KINDS])),
                sizes=tuple(sizes),
                wafs=tuple(wafs),
            )
        )
    return found, draw(st.integers(1, 8)), draw(st.sampled_from([0.0, 0.005, 0.2]))


@given(crowded())
@settings(max_examples=400, deadline=None)
def test_a_task_runs_from_its_price_on(case: tuple[list[TaskDemand], int, float]) -> None:
    """Slightly above the price, the next plan gives slots to the task; slightly below, none."""
    found, num_slots, gain_min = case
    problem = asking(found, num_slots, gain_min=gain_min)
    plan = planner.choose_plan(problem).plan
    after = [
        replace(demand, now=slots, faulted=False)
        for demand, slots in zip(found, plan.slots, strict=True)
    ]
    prices = pending.prices(problem, plan)
    assert set(prices) == {
        demand.task
        for demand, slots in zip(found, plan.slots, strict=True)
        if slots == 0 and min(demand.sizes) <= num_slots
    }
    for task, price in prices.items():

        def slots_at(times: float, task: int = task) -> int:
            demands = [
                replace(demand, wafs=tuple(waf * times for waf in demand.wafs))
                if demand.task == task
                else demand
                for demand in after
            ]
            return planner.choose_plan(asking(demands, num_slots, gain_min=gain_min)).plan.slots[
                task - 1
            ]

        assert slots_at(price.times * (1 + 1e-6)) > 0
        assert slots_at(price.times * (1 - 1e-6)) == 0
        wafs = [
            math.fsum(waf_of(demand, x) for demand, x in zip(found, slots, strict=True))
            for _, slots in brute_force(
                pairs(planner.allowed_candidates(asking(after, num_slots, gain_min=gain_min))),
                num_slots,
            )
            if slots[task - 1] > 0
        ]
        assert price.plan.waf == wafs[0], "the best plan in which the task runs"
        assert price.cost_waf == max(plan.waf - wafs[0], 0.0)


def test_a_price_in_numbers() -> None:
    """Task 1 loses a WAF of 10 and task 2 adds 8. Without hysteresis the cost is a WAF of 2."""
    found = [_demand(1, 4, {2: 20.0, 4: 30.0}, transition_s=0.0), _demand(2, 0, {2: 8.0})]
    problem = asking(found, 4, mtbf_gpu_s=1e9, gain_min=0.0)
    price = pending.prices(problem, planner.choose_plan(problem).plan)[2]
    assert (price.plan.slots, price.cost_waf) == ((2, 2), 2.0)
    assert math.isclose(price.times, 10.0 / 8.0)


def test_of_many_waiting_tasks_only_the_first_have_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [_demand(1, 4, {4: 30.0}), *(_demand(i, 0, {2: 8.0}) for i in range(2, 6))]
    problem = asking(found, 4)
    plan = planner.choose_plan(problem).plan
    every = pending.prices(problem, plan)
    assert list(every) == [2, 3, 4, 5]
    monkeypatch.setattr(pending, "_price_work", lambda _: (1, 5))
    assert pending.prices(problem, plan) == {i: every[i] for i in (2, 3)}


def test_gain_min_raises_the_price() -> None:
    found = [_demand(1, 4, {2: 20.0, 4: 30.0}), _demand(2, 0, {2: 10.01})]
    assert _choose(found, 4).plan.slots == (4, 0), "a gain of 0.01 on 30 is below gain_min"
    price = pending.prices(asking(found, 4), _choose(found, 4).plan)[2]
    assert price.cost_waf == 0.0
    assert price.times > 10.15 / 10.01


def test_the_ideal_waf_ignores_changes_and_faults() -> None:
    found = [_demand(1, 2, {2: 20.0, 4: 30.0}, faulted=True), _demand(2, 0, {2: 8.0})]
    assert planner.ideal_waf(found, 6) == 38.0
    assert planner.ideal_waf(found, 4) == 30.0
    assert planner.ideal_waf([], 4) == 0.0
