"""What operators and users bind a plan by: each constraint holds, and the plan is the best of all
that keep it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from decider import Driver, at_rest, only, spec, task_of, waits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_cases import candidates_of
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.planner import alternative_names, constraints, explain, planner
from unicron.control_plane.planner.objective import objective_flop
from unicron.control_plane.planner.problem import PlanLimits, PlanProblem, TaskDemand
from unicron.control_plane.planner.solver import knapsack
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.spec.policy import Policy
from wished import asking, wish


@pytest.fixture
def d() -> Iterator[Driver]:
    made = Driver(nodes=3)
    yield made
    at_rest(made)


# --- which sizes --------------------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "begins", "shrinks"), [
    ({"sizes": [1, 6]}, 6, 1), ({"multiple_of": 2, "max": 6}, 6, 4), ({"max": 6}, 6, 5)])
def test_a_plan_gives_what_the_spec_allows(d: Driver, slots: object, begins: int,
                                           shrinks: int) -> None:
    table = {x: 1e12 * x for x in range(1, 7)}
    task = d.running(spec(slots=slots, throughput=table))
    assert len(task_of(d, task).target) == begins
    lost = d.tell("n3/1", r.RankErrored(
        task=task, rank=task_of(d, task).target[-1].rank, attempt=1, generation=1, iteration=0,
        error="ECC errors", text="uncorrectable"))
    d.obey(lost)
    assert len(task_of(d, task).target) == shrinks
    d.progress(task)


# --- moves, quotas, priorities: held against every plan there is --------------------------------
Case = tuple[list[list[tuple[int, int]]], int, PlanLimits]


@st.composite
def limited(draw: st.DrawFn) -> Case:
    """(size, gain) by row, a capacity, and limits that often bind."""
    num = draw(st.integers(1, 4))
    unit = draw(st.sampled_from([1, 1, 2]))
    rows: list[list[tuple[int, int]]] = []
    for _ in range(num):
        sizes = sorted(draw(st.sets(st.integers(1, 5), max_size=3)))
        rows.append([(size * unit, draw(st.integers(-4, 9))) for size in (0, *sizes)])
    now = tuple(draw(st.sampled_from([size for size, _ in row])) for row in rows)
    order = draw(st.permutations(range(num)))
    cut = draw(st.integers(0, num))
    teams = [(tuple(sorted(part)), draw(st.integers(0, 8)))
             for part in (order[:cut], order[cut:]) if part and draw(st.booleans())]
    several = st.lists(st.integers(0, 2), min_size=num, max_size=num).map(tuple)
    priorities = draw(st.just(()) | several)
    return rows, draw(st.integers(0, 12)), PlanLimits(
        now=now, healthy=tuple(draw(st.booleans()) and x > 0 for x in now),
        moves_max=draw(st.none() | st.integers(0, num)), teams=tuple(teams), priorities=priorities)


def the_best(case: Case) -> tuple[int, ...]:
    """By brute force: the sums by priority of the best plan that keeps the limits."""
    rows, capacity, limits = case
    fits = [plan for plan in itertools.product(*rows)
            if sum(size for size, _ in plan) <= capacity
            and all(sum(plan[row][0] for row in team) <= quota for team, quota in limits.teams)]
    moves = [sum(plan[row][0] != limits.now[row] for row in range(len(rows))
                 if limits.healthy[row]) for plan in fits]
    if limits.moves_max is not None:
        most = max(limits.moves_max, min(moves))
        fits = [plan for plan, num in zip(fits, moves, strict=True) if num <= most]
    return max(by_priority(limits, [gain for _, gain in plan]) for plan in fits)


def by_priority(limits: PlanLimits, gains: list[int]) -> tuple[int, ...]:
    """Sums of what the rows gain, the highest priority first."""
    priorities = limits.priorities or (0,) * len(gains)
    return tuple(sum(gain for gain, own in zip(gains, priorities, strict=True) if own == one)
                 for one in sorted(set(priorities), reverse=True))


@given(limited())
@settings(max_examples=600, deadline=None)
def test_the_best_of_all_that_keep_the_limits(case: Case) -> None:
    rows, capacity, limits = case
    made = candidates_of(rows)
    found = constraints.best(made, capacity, limits)
    assert found is not None
    slots, total = found
    gains = [dict(row)[x] for row, x in zip(rows, slots, strict=True)]
    assert sum(slots) <= capacity
    assert total == sum(gains)
    assert all(sum(slots[row] for row in team) <= quota for team, quota in limits.teams)
    assert by_priority(limits, gains) == the_best(case)
    assert constraints.best(made, capacity, limits) == found


@given(limited())
@settings(max_examples=100, deadline=None)
def test_limits_that_bind_nothing_change_no_value(case: Case) -> None:
    rows, capacity, limits = case
    none = PlanLimits(now=limits.now, healthy=limits.healthy, moves_max=len(rows),
                  teams=((tuple(range(len(rows))), 99),), priorities=())
    found, free = (constraints.best(candidates_of(rows), capacity, none),
                   knapsack.best(candidates_of(rows), capacity))
    assert found is not None
    assert free is not None
    assert found[1] == free[1]


# --- what the planner makes of them --------------------------------------------------------------
def choose(wishes: list[TaskDemand], num_slots: int, **limits: Any) -> planner.Choice:
    return planner.choose_plan(asking(wishes, num_slots, **limits))


def test_no_more_healthy_tasks_move_than_may() -> None:
    """Three would each give one slot for the fourth; one may."""
    wishes = [wish(task, 2, {1: 9.0, 2: 10.0}) for task in (1, 2, 3)]
    wishes.append(wish(4, 0, {1: 6.0, 2: 12.0, 3: 18.0}))
    assert choose(wishes, 6).plan.slots == (1, 1, 1, 3)
    for most, slots in ((3, (1, 1, 1, 3)), (1, (2, 2, 1, 1)), (0, (2, 2, 2, 0))):
        choice = choose(wishes, 6, moves_max=most)
        assert sorted(choice.plan.slots[:3]) == sorted(slots[:3])
        assert choice.plan.slots[3] == slots[3]
        told = {other.what: other for other in choice.alternatives}
        assert ("without moves_max" in told) == (most < 3)


def test_the_hurt_and_the_new_are_no_moves() -> None:
    wishes = [wish(1, 4, {2: 5.0, 4: 9.0}, faulted=True), wish(2, 0, {1: 3.0}),
              wish(3, 2, {2: 9.0})]
    assert choose(wishes, 5, moves_max=0).plan.slots == (2, 1, 2)


def test_where_nothing_fits_without_more_moves_there_are_as_few_as_can_be() -> None:
    wishes = [wish(task, 2, {1: 9.0, 2: 10.0}, team="blue") for task in (1, 2, 3)]
    choice = choose(wishes, 6, moves_max=0, quotas=(("blue", 4),))
    assert sorted(choice.plan.slots) == [0, 2, 2], "one gives all, not two one each"


def test_a_team_has_at_most_its_quota() -> None:
    wishes = [wish(1, 0, {1: 5.0, 2: 9.0}, team="red"), wish(2, 0, {1: 4.0, 2: 8.0}, team="red"),
              wish(3, 0, {1: 1.0, 2: 1.5, 3: 1.75})]
    assert choose(wishes, 4).plan.slots == (2, 2, 0)
    assert choose(wishes, 4, quotas=(("red", 3),)).plan.slots == (2, 1, 1)
    assert choose(wishes, 4, quotas=(("red", 0), ("none", 2))).plan.slots == (0, 0, 3)


def test_a_higher_priority_comes_first_whatever_the_others_earn() -> None:
    wishes = [wish(1, 0, {2: 1e6, 4: 2e6}), wish(2, 0, {1: 1.0, 3: 1.5})]
    assert choose(wishes, 4).plan.slots == (4, 0)
    limited = [replace(one, priority=p) for one, p in zip(wishes, (0, 1), strict=True)]
    assert choose(limited, 4).plan.slots == (0, 3)
    assert choose(limited, 5).plan.slots == (2, 3)


def test_gain_min_is_of_the_priority_that_gains() -> None:
    """1 of 10 that it has is enough for the first, whatever the last would lose."""
    wishes = [wish(1, 3, {2: 900.0, 3: 1000.0}), wish(2, 1, {1: 10.0, 2: 11.0}, priority=1)]
    assert choose(wishes, 4, gain_min=0.05).plan.slots == (2, 2)
    assert choose(wishes, 4, gain_min=0.2).plan.slots == (3, 1)


def test_limits_that_the_best_plans_keep_are_searched_for_by_nobody(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A search over slots and moves takes seconds where slots are 100,000."""
    wishes = [wish(1, 2, {1: 5.0, 2: 9.0, 3: 10.0}, team="red"), wish(2, 1, {1: 4.0}, faulted=True)]
    free = PlanProblem(demands=tuple(wishes), num_slots=3, mtbf_gpu_s=7.2e6)
    bound = replace(free, quotas=(("red", 3),), moves_max=1)
    monkeypatch.delattr(constraints, "best")
    assert planner.choose_plan(bound) == planner.choose_plan(free)


def test_doing_nothing_is_a_plan_and_can_win() -> None:
    """A change that costs more than it earns is not made; where one is, the other was beaten."""
    now = [wish(1, 2, {2: 10.0, 3: 10.2}), wish(2, 2, {1: 5.0, 2: 5.1})]
    short = planner.choose_plan(PlanProblem(demands=tuple(now), num_slots=4, mtbf_gpu_s=4 * 20.0))
    assert short.plan.slots == (2, 2), "20 s of 0.1 more do not pay 10 s of 15.1"
    long = planner.choose_plan(PlanProblem(demands=tuple(now), num_slots=4, mtbf_gpu_s=4 * 1e4))
    assert long.plan.slots == (3, 1)
    assert "keep as it is" in {other.what for other in long.alternatives}


def test_a_plan_says_that_a_limit_binds(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(quotas={"red": 2})))
    task = d.running(spec(team="red"))
    plan = d.state.plan
    assert plan is not None
    assert (plan.binding, [x.slots for x in plan.allocations]) == ("limits", [2])
    assert "without quotas it would be worth" in plan.why
    beta = waits_of(d, d.submit(spec(name="beta", team="red")))
    assert beta.why == "held back by the quota of team red, 2 slots"
    assert beta.needs == "a larger quota, or weight 1.01"
    assert len(task_of(d, task).target) == 2


def test_a_priority_that_costs_something_is_told_as_that(d: Driver) -> None:
    """Not as what gain_min keeps: with alpha too."""
    for alpha in (0.0, 1.0):
        wishes = [wish(1, 4, {1: 8e12, 2: 14e12, 3: 18e12, 4: 22e12}),
                  wish(2, 2, {1: 2e12, 2: 5e12, 4: 9e12}),
                  wish(3, 0, {1: 1e9, 2: 1.01e9}, priority=1)]
        asked, choice, others = told_with(wishes, alpha)
        assert choice.plan.slots[2] == 2
        assert explain.binding_constraint(asked, choice, {}) == ("limits", ())
        why = explain.why(asked, choice, others, "limits")
        assert "priority: t3 (1) comes before t" in why
        assert "without priorities it would be worth" in why
        assert "gain_min" not in why


def told_with(wishes: list[TaskDemand], alpha: float
              ) -> tuple[PlanProblem, planner.Choice, tuple[decisions.Alternative, ...]]:
    asked = PlanProblem(demands=tuple(wishes), num_slots=6, mtbf_gpu_s=7.2e6, gain_min=0.005,
                      alpha=alpha)
    choice = planner.choose_plan(asked)
    return asked, choice, explain.with_distances(
        asked, choice.alternatives, objective_flop(asked, choice.plan.slots))


def test_gain_min_is_named_where_a_change_earns_less_than_it_asks_for() -> None:
    wishes = [wish(1, 3, {2: 90e12, 3: 100e12}), wish(2, 1, {1: 10e12, 2: 11e12, 3: 12e12})]
    asked = PlanProblem(demands=tuple(wishes), num_slots=5, mtbf_gpu_s=7.2e6, gain_min=0.2)
    choice = planner.choose_plan(asked)
    assert choice.plan.slots == (3, 1)
    others = explain.with_distances(
        asked, choice.alternatives, objective_flop(asked, choice.plan.slots)
    )
    assert explain.why(asked, choice, others, "slots").endswith(
        "less: its changes earn less than gain_min asks for")


def test_only_the_limits_that_bind_are_named() -> None:
    wishes = [wish(task, 2, {1: 9.0, 2: 10.0}, team="blue") for task in (1, 2, 3)]
    wishes.append(wish(4, 0, {1: 6.0, 2: 12.0, 3: 18.0}, priority=1))
    for more, what in (({"moves_max": 1}, "without moves_max and priorities"),
                       ({"quotas": (("blue", 2),)}, "without quotas and priorities"), ({}, "")):
        told = [other.what for other in choose(wishes, 6, **more).alternatives]
        assert [x for x in told if x in alternative_names.LIMITS_BY_NAME] == [what] * bool(what)
        assert plan_screen.bound_by({"bound": "limits", "num_slots": 5, "alternatives": [
            {"what": x} for x in told]}, {}) == {
                "without moves_max and priorities": "moves_max or priorities",
                "without quotas and priorities": "quotas or priorities",
                "": "moves_max, quotas or priorities"}[what]


@st.composite
def inputs(draw: st.DrawFn) -> PlanProblem:
    wishes: list[TaskDemand] = []
    for task in range(1, draw(st.integers(1, 4)) + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)))
        wafs = {x: draw(st.floats(0.5, 50.0, allow_nan=False)) for x in sizes}
        wishes.append(
            wish(
                task,
                draw(st.sampled_from([0, *sizes])),
                wafs,
                faulted=draw(st.booleans()),
                team=draw(st.sampled_from(["", "red", "blue"])),
                priority=draw(st.sampled_from([0, 0, 1])),
            )
        )
    return PlanProblem(
        demands=tuple(wishes), num_slots=draw(st.integers(0, 10)), mtbf_gpu_s=7.2e6,
        gain_min=draw(st.sampled_from([0.0, 0.1])), moves_max=draw(st.none() | st.integers(0, 2)),
        quotas=draw(st.just(()) | st.just((("red", 4), ("blue", 3)))))


@given(inputs())
@settings(max_examples=300, deadline=None)
def test_the_choice_is_the_best_within_the_limits(asked: PlanProblem) -> None:
    """Of every plan there is."""
    rows = planner.allowed_candidates(asked)
    flat = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    by_row = [flat[begin:end] for begin, end in itertools.pairwise(rows.starts.tolist())]
    quotas, wishes = dict(asked.quotas), asked.demands
    healthy = [one.now > 0 and not one.faulted for one in wishes]
    found: list[tuple[int, list[int], tuple[int, ...]]] = []
    for plan in itertools.product(*by_row):
        slots = tuple(x for x, _ in plan)
        of_team = {team: sum(x for x, one in zip(slots, wishes, strict=True) if one.team == team)
                   for team in quotas}
        if sum(slots) <= asked.num_slots and all(of_team[t] <= quotas[t] for t in quotas):
            moves = sum(ok and x != one.now for ok, x, one in
                        zip(healthy, slots, wishes, strict=True))
            worth = [sum(gain for (_, gain), one in zip(plan, wishes, strict=True)
                         if one.priority == p)
                     for p in sorted({one.priority for one in wishes}, reverse=True)]
            found.append((moves, worth, slots))
    most = min(moves for moves, _, _ in found)
    if asked.moves_max is not None:
        most = max(most, asked.moves_max)
    else:
        most = len(wishes)
    fits = [one for one in found if one[0] <= most]
    slots = planner.choose_plan(asked).plan.slots
    assert next(worth for _, worth, one in fits if one == slots) == max(
        worth for _, worth, _ in fits)


def test_a_policy_that_plans_follow_from_is_planned_by_at_once(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}, team="red"))
    seats = task_of(d, task).target
    told = d.tell("leader/abc", r.PolicySet(policy=Policy(stop_s_max=7.0)))
    assert not only(decisions.PlanChosen, told), "no plan follows from it"
    told = d.tell("leader/abc", r.PolicySet(policy=Policy(stop_s_max=7.0, quotas={"red": 2})))
    assert [plan.body.trigger for plan in only(decisions.PlanChosen, told)] == [
        "the policy was set"
    ]
    assert len(seats) == 4
    assert len(task_of(d, task).target) == 2
