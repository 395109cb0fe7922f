"""Floors: every task has its floor if all floors fit; else floors are granted in order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from brute_force import check_best
from decider import Driver, spec, task_of, waits_of
from explained import explained
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_cases import case
from unicron.control_plane.planner import alternative_names, constraints, explain, pending, planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand, transition_cost_s, waf_of
from unicron.events.records import reports as r
from unicron.events.spec.policy import Policy
from wished import asking, rising, slots, wish

pytestmark = pytest.mark.nodes(3)

CLOSE_RATIO = 1e-9


# --- single problems ----------------------------------------------------------------------------
def test_a_floor_holds_and_its_cost_is_reported() -> None:
    demands = [wish(1, 0, {1: 9.0, 2: 18.0, 3: 27.0}), wish(2, 0, {1: 1.0, 2: 2.0})]
    assert slots(asking(demands, 3)) == (3, 0)
    problem = asking([demands[0], replace(demands[1], floor=2)], 3)
    choice, _, why = explained(problem)
    assert choice.plan.slots == (1, 2)
    by_name = {other.what: other for other in choice.alternatives}
    assert [x for _, x in by_name[alternative_names.FLOORLESS].slots] == [3, 0]
    assert explain.binding_constraint(problem, choice, {}) == ("floor", (2,))
    assert "without floors it would be worth" in why


def test_the_policy_floor_is_the_smallest_size_with_a_waf() -> None:
    demands = [
        wish(1, 0, {1: 9.0, 4: 90.0}),
        wish(2, 0, {1: 0.0, 2: 0.5, 3: 0.6}),
        wish(3, 0, {1: 0.0, 2: 0.0}),
    ]
    assert slots(asking(demands, 4)) == (4, 0, 0)
    assert slots(asking(demands, 4, floor=True)) == (1, 3, 0)
    assert slots(asking(demands, 6, floor=True)) == (4, 2, 0)


def test_a_floor_without_cost_is_not_reported() -> None:
    problem = asking([wish(1, 0, {1: 9.0}, floor=1), wish(2, 0, {1: 5.0}, floor=1)], 4, floor=True)
    choice = planner.choose_plan(problem)
    assert alternative_names.FLOORLESS not in [other.what for other in choice.alternatives]
    assert explain.binding_constraint(problem, choice, {})[0] == "nothing"


@pytest.mark.parametrize(
    ("num_slots", "granted"),
    [
        (9, (2, 3, 4, 0)),
        (8, (0, 3, 4, 0)),
        (7, (0, 3, 4, 0)),
        (6, (2, 0, 4, 0)),
        (3, (0, 3, 0, 0)),
        (2, (2, 0, 0, 0)),
        (1, (0, 0, 0, 0)),
    ],
)
def test_floors_are_granted_by_priority_then_weight_then_age(
    num_slots: int, granted: tuple[int, ...]
) -> None:
    """Task 3 comes first by priority, then task 2 by weight. Floors that do not fit are skipped."""
    demands = [
        wish(1, 0, {2: 5.0}, floor=2),
        wish(2, 0, {3: 5.0}, floor=3, weight=2.0),
        wish(3, 0, {4: 1.0}, floor=4, priority=1),
        wish(4, 0, {1: 0.0}, floor=1),
    ]
    problem = asking(demands, num_slots)
    assert constraints.granted_floors(problem) == granted
    assert all(x >= floor for x, floor in zip(slots(problem), granted, strict=True))


def test_a_floor_that_does_not_fit_falls_back_to_the_policy_floor() -> None:
    demands = [wish(1, 0, {1: 1.0, 4: 4.0}, floor=4), wish(2, 0, {1: 9.0, 3: 27.0}, floor=2)]
    problem = asking(demands, 4, floor=True)
    assert constraints.granted_floors(problem) == (4, 0)
    problem = replace(problem, demands=(demands[0], replace(demands[1], priority=1)))
    assert constraints.granted_floors(problem) == (1, 3)
    assert constraints.below_floor(problem, (1, 3)) == {1: 4}


def test_a_quota_comes_before_floors() -> None:
    demands = [wish(task, 0, {2: 5.0, 4: 9.0}, floor=2, team="red") for task in (1, 2)]
    problem = asking([*demands, wish(3, 0, {1: 1.0, 2: 2.0}, floor=2)], 8, quotas=(("red", 3),))
    assert constraints.granted_floors(problem) == (2, 0, 2)
    assert slots(problem) == (2, 0, 2)
    assert constraints.below_floor(problem, (2, 0, 2)) == {2: 2}


@pytest.mark.parametrize("more", [{}, {"moves_max": 0}, {"quotas": (("none", 0), ("all", 8))}])
def test_hysteresis_counts_for_a_task_that_gives_slots_for_a_floor(more: dict[str, Any]) -> None:
    """A new task with a floor joins a full cluster. Task 3 gives the slot: task 2 would lose less
    throughput, but it has the larger hysteresis."""
    demands = [
        wish(1, 3, {1: 10.0, 2: 20.0, 3: 30.0}, team="all"),
        wish(2, 3, {1: 10.0, 2: 20.2, 3: 30.0}, team="all"),
        wish(3, 2, {1: 10.1, 2: 20.0, 3: 30.5}, team="all"),
    ]
    new = wish(4, 0, {1: 0.1}, floor=1, team="all")
    before = asking(demands, 8, gain_min=0.05, **more)
    assert slots(before) == (3, 3, 2)
    after = replace(before, demands=(*demands, new))
    choice = planner.choose_plan(after)
    assert choice.plan.slots == (3, 3, 1, 1)
    assert planner.choose_plan(replace(after, gain_min=0.0)).plan.objective >= choice.plan.objective
    if not more:
        assert slots(replace(after, gain_min=0.0)) == (2, 2, 3, 1)


def test_a_healthy_task_grows_only_to_its_floor() -> None:
    demands = [wish(1, 1, {1: 10.0, 2: 10.1, 3: 10.2}, floor=2), wish(2, 3, {2: 20.0, 3: 30.0})]
    assert slots(asking(demands, 4, gain_min=0.1)) == (2, 2)
    demands = [replace(demands[0], floor=1), demands[1]]
    assert slots(asking(demands, 4, gain_min=0.1)) == (1, 3)


def test_floors_have_no_prices() -> None:
    problem = asking([wish(1, 0, {2: 9.0}), wish(2, 0, {2: 5.0})], 2)
    assert pending.prices(problem, planner.choose_plan(problem).plan)
    problem = replace(problem, floor=True)
    assert not pending.prices(problem, planner.choose_plan(problem).plan)


# --- compared with brute force ------------------------------------------------------------------
@st.composite
def inputs(draw: st.DrawFn) -> PlanProblem:
    demands: list[TaskDemand] = []
    for task in range(1, draw(st.integers(1, 4)) + 1):
        wafs = rising(draw)
        demands.append(
            wish(
                task,
                draw(st.sampled_from([0, *wafs, 6])),
                wafs,
                faulted=draw(st.booleans()),
                floor=draw(st.sampled_from([0, 0, 1, 2, 4])),
                team=draw(st.sampled_from(["", "red"])),
                priority=draw(st.sampled_from([0, 0, 1])),
                weight=draw(st.sampled_from([1.0, 2.0])),
            )
        )
    return asking(
        demands,
        draw(st.integers(0, 10)),
        floor=draw(st.booleans()),
        gain_min=draw(st.sampled_from([0.0, 0.1])),
        moves_max=draw(st.none() | st.integers(0, 2)),
        quotas=draw(st.just(()) | st.just((("red", 4),))),
    )


def granted(problem: PlanProblem) -> list[int]:
    """The granted floors, task by task."""
    found: dict[int, int] = {}
    used = {"": 0, "red": 0}
    for one in sorted(problem.demands, key=lambda one: (-one.priority, -one.weight, one.task)):
        earning = [x for x in one.sizes if waf_of(one, x) > 0]
        wanted = [min((x for x in earning if x >= one.floor), default=0)] if one.floor else []
        wanted += [min(earning, default=0)] if problem.floor else []
        room = problem.num_slots - sum(found.values())
        if one.team == "red" and problem.quotas:
            room = min(room, problem.quotas[0][1] - used["red"])
        found[one.task] = next((x for x in wanted if 0 < x <= room), 0)
        used[one.team] += found[one.task]
    return [found[one.task] for one in problem.demands]


@given(inputs())
@settings(max_examples=400, deadline=None)
def test_the_best_plan_that_keeps_the_floors(problem: PlanProblem) -> None:
    held_s = problem.gain_min * problem.running_s
    demands, least, quota = problem.demands, granted(problem), dict(problem.quotas).get("red", 99)
    priorities = sorted({one.priority for one in demands}, reverse=True)
    values: dict[tuple[int, ...], list[float]] = {}
    for plan in itertools.product(
        *[
            [x for x in (0, *one.sizes) if x >= floor]
            for one, floor in zip(demands, least, strict=True)
        ]
    ):
        pairs = list(zip(demands, plan, strict=True))
        if sum(plan) > problem.num_slots or sum(x for w, x in pairs if w.team == "red") > quota:
            continue
        values[plan] = [
            math.fsum(
                waf_of(w, x) * problem.running_s
                - waf_of(w, w.now)
                * (
                    transition_cost_s(w, x)
                    + held_s * (not w.faulted and x != w.now <= problem.num_slots)
                )
                for w, x in pairs
                if w.priority == one
            )
            for one in priorities
        ]
    size = math.fsum(waf_of(w, x) for w in demands for x in w.sizes) * problem.running_s + 1.0
    check_best(problem, values, CLOSE_RATIO * size)


def test_the_cheapest_task_changes() -> None:
    """Each of three tasks could give the slots for the floor of a new task."""
    for cheap in (1, 2, 3):
        demands = [wish(task, 4, {2: 9.0 if task == cheap else 8.0, 4: 10.0}) for task in (1, 2, 3)]
        found = slots(asking([*demands, wish(4, 0, {2: 1.0}, floor=2)], 12, gain_min=9.0))
        assert found == (*(2 if task == cheap else 4 for task in (1, 2, 3)), 2)


@pytest.mark.parametrize(("num_tasks", "num_gpus"), [(12, 256), (100, 4096)])
def test_large_clusters_with_a_new_task_that_has_a_floor(num_tasks: int, num_gpus: int) -> None:
    problem = case(num_tasks, num_gpus, 3, gain_min=0.005)
    now = slots(replace(problem, gain_min=0.0))
    settled = [
        replace(one, now=x, faulted=False) for one, x in zip(problem.demands, now, strict=True)
    ]
    new = replace(
        settled[0],
        task=9999,
        name="new",
        now=0,
        floor=16,
        weight=1e-6,
        wafs=tuple(1e-6 * waf for waf in settled[0].wafs),
    )
    full = replace(problem, num_slots=sum(now), demands=(*settled, new))
    choice = planner.choose_plan(full)
    assert choice.plan.slots[-1] >= 16
    changed = [i for i, (x, y) in enumerate(zip(choice.plan.slots, now, strict=False)) if x != y]
    assert 1 <= len(changed) <= 2, "one or two tasks give all the slots"
    gains = planner.allowed_candidates(full)
    free = planner.choose_plan(replace(full, gain_min=0.0)).plan.objective
    assert choice.plan.objective <= free
    assert choice.plan.objective == gains.sums(gains.vector(choice.plan.slots))[0]


# --- decisions of the control plane -------------------------------------------------------------
def test_a_task_with_a_floor_is_not_starved_by_a_heavier_one(d: Driver) -> None:
    first = d.running(
        spec(slots={"min": 1, "max": 6, "floor": 2}, throughput={x: 1e12 * x for x in range(1, 7)})
    )
    assert len(task_of(d, first).target) == 6
    heavy = spec(
        name="heavy", weight=100.0, slots={"max": 6}, throughput={x: 1e12 * x for x in range(1, 7)}
    )
    d.submit(heavy)
    plan = d.state.plan
    assert plan is not None
    assert [x.slots for x in plan.allocations] == [2, 4]
    assert (plan.binding, plan.bound_tasks, plan.below_floor) == ("floor", (first,), ())


def test_a_waiting_task_reports_that_its_floor_does_not_fit(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(floor=True, quotas={"red": 1})))
    d.running(spec(slots={"min": 4, "max": 6}))
    beta = d.submit(spec(name="beta", weight=0.5, slots={"min": 3, "max": 3}))
    plan = d.state.plan
    assert plan is not None
    assert plan.below_floor == (beta,)
    assert plan.why.endswith("; no room for the floor of beta")
    assert waits_of(d, beta).why == "there is no room for its floor beside those before it"
    assert waits_of(d, beta).needs == "more slots, or a higher priority (a higher weight may do)"
    gamma = waits_of(d, d.submit(spec(name="gamma", team="red", slots={"min": 2, "max": 2})))
    assert (gamma.why, gamma.needs) == (
        "the quota of team red is 1 slot",
        "a quota of 2 slots, its floor",
    )
    d.tell("operator/x", r.TaskWeightSet(task=beta, weight=2.0))
    assert len(task_of(d, beta).target) == 3, "the heavier floor comes first"


def test_a_floor_blocked_by_a_quota_needs_a_larger_quota(d: Driver) -> None:
    """One of four slots is idle, so the missing floor needs a larger quota, not more slots."""
    d.tell("leader/abc", r.PolicySet(policy=Policy(floor=True, quotas={"audio": 2})))
    first = d.running(spec(team="audio", slots={"min": 2, "max": 2}))
    beta = d.submit(spec(name="beta", team="audio", weight=0.5, slots={"min": 1, "max": 1}))
    assert waits_of(d, beta).why == (
        "its floor does not fit the quota of team audio, 2 slots, beside those before it"
    )
    assert waits_of(d, beta).needs == (
        "a larger quota, or a higher priority (a higher weight may do)"
    )
    d.tell("leader/abc", r.PolicySet(policy=Policy(floor=True, quotas={"audio": 3})))
    assert len(task_of(d, beta).target) == 1
    assert len(task_of(d, first).target) == 2
