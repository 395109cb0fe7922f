"""What blocks a waiting task under limits, and the weight from which the task runs."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, spec, waits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.control_plane.planner import pending, planner
from unicron.control_plane.planner.pending import Blocker
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.events.records import reports as r
from unicron.events.spec.policy import Policy
from wished import asking, wish

pytestmark = pytest.mark.nodes(1)

WEIGHT = 1e-6
"""Relative distance of the tested weights from the reported price."""


@st.composite
def limited(draw: st.DrawFn) -> PlanProblem:
    demands: list[TaskDemand] = []
    num = draw(st.integers(2, 4))
    for task in range(1, num + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
        wafs = {size: float(draw(st.integers(1, 40))) for size in sizes}
        now = draw(st.sampled_from([0, *sizes]))
        demands.append(
            wish(
                task,
                now,
                wafs,
                faulted=now > 0 and draw(st.booleans()),
                team=draw(st.sampled_from(["", "a", "b"])),
                priority=draw(st.sampled_from([0, 0, 0, 1])),
                floor=draw(st.sampled_from([0, 0, 0, 1])),
            )
        )
    quotas = {team: draw(st.integers(0, 6)) for team in ("a", "b") if draw(st.booleans())}
    return asking(
        demands,
        draw(st.integers(1, 8)),
        gain_min=draw(st.sampled_from([0.0, 0.1])),
        moves_max=draw(st.sampled_from([None, 0, 1])),
        quotas=tuple(sorted(quotas.items())),
    )


@given(limited())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_task_runs_from_its_price_on_under_limits(problem: PlanProblem) -> None:
    """If no weight is reported, even a million times the weight does not run the task."""
    problem = replace(
        problem, demands=tuple(replace(one, priority=0, floor=0) for one in problem.demands)
    )
    plan = planner.choose_plan(problem).plan
    after = replace(
        problem,
        demands=tuple(
            replace(one, now=x, faulted=False)
            for one, x in zip(problem.demands, plan.slots, strict=True)
        ),
    )

    def runs(task: int, times: float) -> bool:
        demands = tuple(
            replace(one, wafs=tuple(waf * times for waf in one.wafs)) if one.task == task else one
            for one in after.demands
        )
        return planner.choose_plan(replace(after, demands=demands)).plan.slots[task - 1] > 0

    prices = pending.prices(problem, plan)
    for one, x in zip(problem.demands, plan.slots, strict=True):
        price = prices.get(one.task)
        if price is not None and price.times < float("inf"):
            assert runs(one.task, price.times * (1 + WEIGHT))
            # No weight is below a price of 0: after this plan, the next plan runs the task.
            assert not (price.times and runs(one.task, price.times * (1 - WEIGHT)))
            assert price.plan.slots[one.task - 1] > 0
        elif x == 0:
            assert not runs(one.task, 1e6)


@given(limited())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_task_runs_without_its_blocking_limits(problem: PlanProblem) -> None:
    slots = planner.choose_plan(problem).plan.slots
    blockers = pending.blocking_constraints(problem, slots)
    free = replace(
        problem,
        moves_max=None,
        quotas=(),
        floor=False,
        demands=tuple(replace(one, priority=0, floor=0) for one in problem.demands),
    )
    lifted = {
        "moves_max": replace(problem, moves_max=None),
        "quota": replace(problem, quotas=()),
        "priority": replace(
            problem, demands=tuple(replace(one, priority=0) for one in problem.demands)
        ),
        "floors": replace(
            problem, floor=False, demands=tuple(replace(one, floor=0) for one in problem.demands)
        ),
    }
    without = planner.choose_plan(free).plan.slots
    for one, x, run in zip(problem.demands, slots, without, strict=True):
        blocker = blockers.get(one.task, Blocker())
        quota = dict(problem.quotas).get(one.team, one.sizes[0])
        if x:
            assert one.task not in blockers
        elif quota < one.sizes[0]:
            least = "1 slot" if one.sizes[0] == 1 else f"{one.sizes[0]} slots"
            assert blocker.needs == f"a quota of {least} or more"
        else:
            assert bool(blocker.why) == (run > 0)
        if not blocker.why or quota < one.sizes[0]:
            continue
        named = [kind for kind in lifted if kind in blocker.why.replace("floors of", "floors")]
        if blocker.why.startswith("blocked by the limits of the plan: "):
            continue
        for kind in named:
            case = lifted[kind]
            if kind == "quota" and one.team in dict(problem.quotas):  # else drop all quotas
                case = replace(case, quotas=tuple(x for x in problem.quotas if x[0] != one.team))
            other = planner.choose_plan(case).plan.slots[one.task - 1]
            assert other > 0, f"without {kind}"


@pytest.mark.parametrize(
    ("first", "second", "limits", "blocker"),
    [
        (
            {},
            {},
            {"moves_max": 0},
            Blocker(why="blocked by moves_max 0", needs="a larger moves_max"),
        ),
        (
            {"priority": 1},
            {},
            {},
            Blocker(why="blocked by priority 0, where others have more", needs="a higher priority"),
        ),
        (
            {"floor": 1},
            {},
            {},
            Blocker(why="blocked by the floors of others", needs="smaller floors"),
        ),
        (
            {},
            {"team": "a"},
            {"quotas": (("a", 1),)},
            Blocker(why="the quota of team a, 1 slot", needs="a quota of 2 slots or more"),
        ),
        (
            {"priority": 1},
            {},
            {"moves_max": 0},
            Blocker(
                why="blocked by the limits of the plan: moves_max 0, priority 0, where others "
                "have more",
                needs="fewer limits: a larger moves_max, a higher priority",
            ),
        ),
    ],
    ids=["moves_max", "priority", "floor", "quota", "several"],
)
def test_the_blocking_limits_are_named(
    first: dict[str, Any], second: dict[str, Any], limits: dict[str, Any], blocker: Blocker
) -> None:
    """Task 2 has the higher WAF."""
    problem = asking(
        [wish(1, 2, {1: 1.0, 2: 2.0}, **first), wish(2, 0, {2: 30.0}, **second)], 2, **limits
    )
    plan = planner.choose_plan(problem).plan
    assert plan.slots[1] == 0
    assert pending.blocking_constraints(problem, plan.slots) == {2: blocker}
    assert 2 not in pending.prices(problem, plan), "no weight lifts the limit"


def test_a_higher_weight_may_help_within_a_priority() -> None:
    """Task 3 runs if its WAF exceeds that of task 2, which has the same priority 0."""
    demands = [wish(1, 1, {1: 1.0}, priority=1), wish(2, 1, {1: 5.0}), wish(3, 0, {1: 4.0})]
    problem = asking(demands, 2, gain_min=0.0)
    plan = planner.choose_plan(problem).plan
    assert plan.slots == (1, 1, 0)
    assert pending.blocking_constraints(problem, plan.slots)[3].needs == (
        "a higher priority (a higher weight may do)"
    )
    heavier = replace(problem, demands=(*demands[:2], wish(3, 0, {1: 400.0})))
    assert planner.choose_plan(heavier).plan.slots == (1, 0, 1)


def test_no_limit_is_named_if_none_blocks() -> None:
    """Task 2 has a lower WAF than task 1. Task 1 fills the quota of their team."""
    demands = [wish(1, 2, {1: 10.0, 2: 20.0}, team="a"), wish(2, 0, {1: 1.0}, team="a")]
    problem = asking(demands, 2, quotas=(("a", 2),), gain_min=0.0)
    plan = planner.choose_plan(problem).plan
    assert pending.blocking_constraints(problem, plan.slots) == {
        2: Blocker(within="the quota of team a, 2 slots")
    }
    assert pending.prices(problem, plan)[2].times == pytest.approx(10.0, rel=1e-4)


def test_a_waiting_task_names_the_limit(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(moves_max=0)))
    d.running(spec())
    beta = d.submit(spec(name="beta", weight=3.0))
    assert waits_of(d, beta).why == "blocked by moves_max 0"
    assert waits_of(d, beta).needs == "a larger moves_max"
    d.tell("leader/abc", r.PolicySet(policy=Policy(quotas={"red": 1})))
    red = d.submit(spec(name="red", team="red", slots={"min": 2, "max": 2}))
    assert waits_of(d, red).why == "the quota of team red, 1 slot"
    assert waits_of(d, red).needs == "a quota of 2 slots or more"


def test_above_the_work_limit_all_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    demands = [wish(1, 2, {1: 1.0, 2: 2.0}), wish(2, 0, {2: 30.0}, team="a")]
    problem = asking(demands, 2, moves_max=0, quotas=(("a", 2),))
    plan = planner.choose_plan(problem).plan
    assert pending.blocking_constraints(problem, plan.slots)[2].why == "blocked by moves_max 0"
    monkeypatch.setattr(pending, "LIMITED_WORK_NUM_MAX", 0)
    assert pending.blocking_constraints(problem, plan.slots)[2] == Blocker(
        why="blocked by the limits of the plan: moves_max 0, the quota of team a, 2 slots",
        needs="fewer limits: a larger moves_max, a larger quota",
    )
    assert not pending.prices(problem, plan)


def test_slots_kept_idle_are_not_a_limit() -> None:
    problem = asking([wish(1, 2, {1: 10.0, 2: 20.0}), wish(2, 0, {1: 1.0})], 3, moves_max=0)
    assert pending.blocking_constraints(problem, (2, 0), 1) == {2: Blocker()}
    assert pending.blocking_constraints(problem, (2, 0))[2].why
