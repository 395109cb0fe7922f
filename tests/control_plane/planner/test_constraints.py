"""Limits of a plan: sizes, max changed tasks, quotas and priorities. Each limit holds, and no plan
within the limits is better."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from brute_force import check_best
from decider import Driver, only, spec, task_of, waits_of
from explained import explained
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace
from planner_cases import candidates_of
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.decide.advance import report_record
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.planner import alternative_names, constraints, explain, planner
from unicron.control_plane.planner.problem import PlanLimits, PlanProblem, TaskDemand
from unicron.control_plane.planner.problem_of_state import planning_snapshot
from unicron.control_plane.planner.solver import knapsack
from unicron.control_plane.state.cluster import ClusterState, decode_state, encode_state
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.envelope import Report
from unicron.events.spec.policy import Policy
from wished import asking, wish

pytestmark = pytest.mark.nodes(3)


# --- allowed sizes ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("slots", "begins", "shrinks"),
    [({"sizes": [1, 6]}, 6, 1), ({"multiple_of": 2, "max": 6}, 6, 4), ({"max": 6}, 6, 5)],
)
def test_a_plan_gives_what_the_spec_allows(
    d: Driver, slots: object, begins: int, shrinks: int
) -> None:
    table = {x: 1e12 * x for x in range(1, 7)}
    task = d.running(spec(slots=slots, throughput=table))
    assert len(task_of(d, task).target) == begins
    lost = d.tell(
        "n3/1",
        r.RankErrored(
            task=task,
            rank=task_of(d, task).target[-1].rank,
            attempt=1,
            generation=1,
            iteration=0,
            error="ECC errors",
            text="uncorrectable",
        ),
    )
    d.obey(lost)
    assert len(task_of(d, task).target) == shrinks
    d.progress(task)


# --- max changed tasks, quotas, priorities: compared with brute force ---------------------------
Case = tuple[list[list[tuple[int, int]]], int, PlanLimits]


@st.composite
def limited(draw: st.DrawFn) -> Case:
    """(size, gain) by row; a capacity; limits that often bind."""
    num = draw(st.integers(1, 4))
    unit = draw(st.sampled_from([1, 1, 2]))
    rows: list[list[tuple[int, int]]] = []
    for _ in range(num):
        sizes = sorted(draw(st.sets(st.integers(1, 5), max_size=3)))
        rows.append([(size * unit, draw(st.integers(-4, 9))) for size in (0, *sizes)])
    now = tuple(draw(st.sampled_from([size for size, _ in row])) for row in rows)
    order = draw(st.permutations(range(num)))
    cut = draw(st.integers(0, num))
    teams = [
        (tuple(sorted(part)), draw(st.integers(0, 8)))
        for part in (order[:cut], order[cut:])
        if part and draw(st.booleans())
    ]
    several = st.lists(st.integers(0, 2), min_size=num, max_size=num).map(tuple)
    priorities = draw(st.just(()) | several)
    return (
        rows,
        draw(st.integers(0, 12)),
        PlanLimits(
            now=now,
            healthy=tuple(draw(st.booleans()) and x > 0 for x in now),
            moves_max=draw(st.none() | st.integers(0, num)),
            teams=tuple(teams),
            priorities=priorities,
        ),
    )


def best_by_force(case: Case) -> tuple[int, ...]:
    """By brute force: the gains by priority of the best plan within the limits."""
    rows, capacity, limits = case
    fits = [
        plan
        for plan in itertools.product(*rows)
        if sum(size for size, _ in plan) <= capacity
        and all(sum(plan[row][0] for row in team) <= quota for team, quota in limits.teams)
    ]
    moves = [
        sum(plan[row][0] != limits.now[row] for row in range(len(rows)) if limits.healthy[row])
        for plan in fits
    ]
    if limits.moves_max is not None:
        most = max(limits.moves_max, min(moves))
        fits = [plan for plan, num in zip(fits, moves, strict=True) if num <= most]
    return max(by_priority(limits, [gain for _, gain in plan]) for plan in fits)


def by_priority(limits: PlanLimits, gains: list[int]) -> tuple[int, ...]:
    """The sum of the gains by priority, the highest priority first."""
    priorities = limits.priorities or (0,) * len(gains)
    return tuple(
        sum(gain for gain, own in zip(gains, priorities, strict=True) if own == one)
        for one in sorted(set(priorities), reverse=True)
    )


@given(limited())
@settings(max_examples=600, deadline=None)
def test_the_best_plan_within_the_limits(case: Case) -> None:
    rows, capacity, limits = case
    made = candidates_of(rows)
    found = constraints.best(made, capacity, limits)
    assert found is not None
    slots, total = found
    gains = [dict(row)[x] for row, x in zip(rows, slots, strict=True)]
    assert sum(slots) <= capacity
    assert total == sum(gains)
    assert all(sum(slots[row] for row in team) <= quota for team, quota in limits.teams)
    assert by_priority(limits, gains) == best_by_force(case)
    assert constraints.best(made, capacity, limits) == found


@given(limited())
@settings(max_examples=100, deadline=None)
def test_limits_that_do_not_bind_change_no_value(case: Case) -> None:
    rows, capacity, limits = case
    none = PlanLimits(
        now=limits.now,
        healthy=limits.healthy,
        moves_max=len(rows),
        teams=((tuple(range(len(rows))), 99),),
        priorities=(),
    )
    found, free = (
        constraints.best(candidates_of(rows), capacity, none),
        knapsack.best(candidates_of(rows), capacity),
    )
    assert found is not None
    assert free is not None
    assert found[1] == free[1]


# --- choices of the planner ----------------------------------------------------------------------
def choose(demands: list[TaskDemand], num_slots: int, **limits: Any) -> planner.Choice:
    return planner.choose_plan(asking(demands, num_slots, **limits))


def test_at_most_moves_max_healthy_tasks_change() -> None:
    """Without a limit, tasks 1 to 3 each give a slot to task 4. `moves_max` limits their number."""
    demands = [wish(task, 2, {1: 9.0, 2: 10.0}) for task in (1, 2, 3)]
    demands.append(wish(4, 0, {1: 6.0, 2: 12.0, 3: 18.0}))
    assert choose(demands, 6).plan.slots == (1, 1, 1, 3)
    for most, slots in ((3, (1, 1, 1, 3)), (1, (2, 2, 1, 1)), (0, (2, 2, 2, 0))):
        choice = choose(demands, 6, moves_max=most)
        assert sorted(choice.plan.slots[:3]) == sorted(slots[:3])
        assert choice.plan.slots[3] == slots[3]
        by_name = {other.what: other for other in choice.alternatives}
        assert ("without moves_max" in by_name) == (most < 3)


def test_faulted_and_new_tasks_do_not_count_as_moves() -> None:
    demands = [
        wish(1, 4, {2: 5.0, 4: 9.0}, faulted=True),
        wish(2, 0, {1: 3.0}),
        wish(3, 2, {2: 9.0}),
    ]
    assert choose(demands, 5, moves_max=0).plan.slots == (2, 1, 2)


def test_moves_max_is_exceeded_by_as_little_as_possible() -> None:
    demands = [wish(task, 2, {1: 9.0, 2: 10.0}, team="blue") for task in (1, 2, 3)]
    choice = choose(demands, 6, moves_max=0, quotas=(("blue", 4),))
    assert sorted(choice.plan.slots) == [0, 2, 2], "one task gives two slots"


def test_a_team_has_at_most_its_quota() -> None:
    demands = [
        wish(1, 0, {1: 5.0, 2: 9.0}, team="red"),
        wish(2, 0, {1: 4.0, 2: 8.0}, team="red"),
        wish(3, 0, {1: 1.0, 2: 1.5, 3: 1.75}),
    ]
    assert choose(demands, 4).plan.slots == (2, 2, 0)
    assert choose(demands, 4, quotas=(("red", 3),)).plan.slots == (2, 1, 1)
    assert choose(demands, 4, quotas=(("red", 0), ("none", 2))).plan.slots == (0, 0, 3)


def test_a_higher_priority_comes_first_at_any_throughput() -> None:
    demands = [wish(1, 0, {2: 1e6, 4: 2e6}), wish(2, 0, {1: 1.0, 3: 1.5})]
    assert choose(demands, 4).plan.slots == (4, 0)
    limited = [replace(one, priority=p) for one, p in zip(demands, (0, 1), strict=True)]
    assert choose(limited, 4).plan.slots == (0, 3)
    assert choose(limited, 5).plan.slots == (2, 3)


def test_gain_min_applies_within_one_priority() -> None:
    """Task 2 has the higher priority and gains 10 %. What task 1 loses does not count."""
    demands = [wish(1, 3, {2: 900.0, 3: 1000.0}), wish(2, 1, {1: 10.0, 2: 11.0}, priority=1)]
    assert choose(demands, 4, gain_min=0.05).plan.slots == (2, 2)
    assert choose(demands, 4, gain_min=0.2).plan.slots == (3, 1)


def test_limits_that_do_not_bind_skip_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no limit can bind, the planner skips the search, which takes seconds on 100,000 slots."""
    tasks = [wish(1, 2, {1: 5.0, 2: 9.0, 3: 10.0}, team="red"), wish(2, 1, {1: 4.0}, faulted=True)]
    free = PlanProblem(demands=tuple(tasks), num_slots=3, mtbf_gpu_s=7.2e6)
    bound = replace(free, quotas=(("red", 3),), moves_max=1)
    monkeypatch.delattr(constraints, "best")
    assert planner.choose_plan(bound) == planner.choose_plan(free)


def test_the_unchanged_plan_can_be_chosen() -> None:
    now = [wish(1, 2, {2: 10.0, 3: 10.2}), wish(2, 2, {1: 5.0, 2: 5.1})]
    short = planner.choose_plan(PlanProblem(demands=tuple(now), num_slots=4, mtbf_gpu_s=4 * 20.0))
    assert short.plan.slots == (2, 2), "a gain of 0.1 for 20 s is less than 15.1 for 10 s"
    long = planner.choose_plan(PlanProblem(demands=tuple(now), num_slots=4, mtbf_gpu_s=4 * 1e4))
    assert long.plan.slots == (3, 1)
    assert "keep as it is" in {other.what for other in long.alternatives}


def test_the_plan_record_names_a_binding_limit(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(quotas={"red": 2})))
    task = d.running(spec(team="red"))
    plan = d.state.plan
    assert plan is not None
    assert (plan.binding, [x.slots for x in plan.allocations]) == ("limits", [2])
    assert "without quotas it would be worth" in plan.why
    beta = waits_of(d, d.submit(spec(name="beta", team="red")))
    assert beta.why == "blocked by the quota of team red, 2 slots"
    assert beta.needs == "a larger quota, or weight 1.01"
    assert len(task_of(d, task).target) == 2


def test_a_priority_that_lowers_the_objective_is_named(d: Driver) -> None:
    for alpha in (0.0, 1.0):
        demands = [
            wish(1, 4, {1: 8e12, 2: 14e12, 3: 18e12, 4: 22e12}),
            wish(2, 2, {1: 2e12, 2: 5e12, 4: 9e12}),
            wish(3, 0, {1: 1e9, 2: 1.01e9}, priority=1),
        ]
        problem = PlanProblem(
            demands=tuple(demands), num_slots=6, mtbf_gpu_s=7.2e6, gain_min=0.005, alpha=alpha
        )
        choice, _, why = explained(problem)
        assert choice.plan.slots[2] == 2
        assert explain.binding_constraint(problem, choice, {}) == ("limits", ())
        assert "priority: t3 (1) comes before t" in why
        assert "without priorities it would be worth" in why
        assert "gain_min" not in why


def test_the_reason_names_gain_min_if_a_change_gains_less() -> None:
    demands = [wish(1, 3, {2: 90e12, 3: 100e12}), wish(2, 1, {1: 10e12, 2: 11e12, 3: 12e12})]
    problem = PlanProblem(demands=tuple(demands), num_slots=5, mtbf_gpu_s=7.2e6, gain_min=0.2)
    choice, _, why = explained(problem)
    assert choice.plan.slots == (3, 1)
    assert why.endswith("less: its changes earn less than gain_min asks for")


def test_only_the_limits_that_bind_are_named() -> None:
    demands = [wish(task, 2, {1: 9.0, 2: 10.0}, team="blue") for task in (1, 2, 3)]
    demands.append(wish(4, 0, {1: 6.0, 2: 12.0, 3: 18.0}, priority=1))
    for more, what in (
        ({"moves_max": 1}, "without moves_max and priorities"),
        ({"quotas": (("blue", 2),)}, "without quotas and priorities"),
        ({}, ""),
    ):
        names = [other.what for other in choose(demands, 6, **more).alternatives]
        assert [x for x in names if x in alternative_names.LIMITS_BY_NAME] == [what] * bool(what)
        assert (
            plan_screen.bound_by(
                {"bound": "limits", "num_slots": 5, "alternatives": [{"what": x} for x in names]},
                {},
            )
            == {
                "without moves_max and priorities": "moves_max or priorities",
                "without quotas and priorities": "quotas or priorities",
                "": "moves_max, quotas or priorities",
            }[what]
        )


@st.composite
def inputs(draw: st.DrawFn) -> PlanProblem:
    demands: list[TaskDemand] = []
    for task in range(1, draw(st.integers(1, 4)) + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)))
        wafs = {x: draw(st.floats(0.5, 50.0, allow_nan=False)) for x in sizes}
        demands.append(
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
        demands=tuple(demands),
        num_slots=draw(st.integers(0, 10)),
        mtbf_gpu_s=7.2e6,
        gain_min=draw(st.sampled_from([0.0, 0.1])),
        moves_max=draw(st.none() | st.integers(0, 2)),
        quotas=draw(st.just(()) | st.just((("red", 4), ("blue", 3)))),
    )


SPANS_S = (0.0, 1.0, 10.0, 1e4)
LEVELS = ((0.0, 1.0, 1.5, 2.0, 3.0), (0.0, 1.0, 1e12, 3e12, 1e-9), (1.0, 2.0, 3.0, 4.0, 5.0))


def mixed(seed: int) -> PlanProblem:
    """Random problems with limits, floors and alpha. Ties are frequent; some sizes have WAF 0."""
    random = Random(seed)
    levels = random.choice(LEVELS)
    return PlanProblem(
        demands=tuple(
            mixed_demand(random, task, levels) for task in range(1, random.randint(1, 4) + 1)
        ),
        num_slots=random.randint(0, 12),
        mtbf_gpu_s=random.choice([10.0, 1e5, 7.2e6]),
        gain_min=random.choice([0.0, 0.0, 0.005, 0.3]),
        moves_max=random.choice([None, None, 0, 1]),
        quotas=random.choice([(), (("red", 4),), (("blue", 0), ("red", 3))]),
        floor=random.random() < 0.3,
        alpha=random.choice([0.0, 0.5, 1.0, 2.0]),
    )


def mixed_demand(random: Random, task: int, levels: tuple[float, ...]) -> TaskDemand:
    sizes = sorted(random.sample(range(1, 8), random.randint(0, 4)))
    weight = random.choice([1.0, 4.0])
    spans = [random.choice(SPANS_S) for _ in range(4)]
    return TaskDemand(
        task=10 * task,
        name=f"t{task}",
        now=random.choice([0, 0, 3, *sizes]),
        faulted=random.random() < 0.3,
        weight=weight,
        sizes=tuple(sizes),
        wafs=tuple(weight * random.choice(levels) for _ in sizes),
        transition=Transition(same_s=spans[0], shrink_s=spans[1], grow_s=spans[2], stop_s=spans[3]),
        team=random.choice(["", "red", "blue"]),
        priority=random.choice([0, 0, 1]),
        floor=random.choice([0, 0, 2, 4]),
    )


@given(inputs() | st.integers(0, 2**32 - 1).map(mixed))
@settings(max_examples=600, deadline=None)
def test_no_plan_within_the_limits_is_worth_more(problem: PlanProblem) -> None:
    """The chosen plan is compared with all plans."""
    tasks, rows, quotas = problem.demands, planner.allowed_candidates(problem), dict(problem.quotas)
    flat = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    by_row = [flat[begin:end] for begin, end in itertools.pairwise(rows.starts.tolist())]
    priorities = sorted({one.priority for one in tasks}, reverse=True)
    values: dict[tuple[int, ...], list[float]] = {}
    for plan in itertools.product(*by_row):
        slots = tuple(x for x, _ in plan)
        if sum(slots) <= problem.num_slots and all(
            sum(x for x, one in zip(slots, tasks, strict=True) if one.team == team) <= quota
            for team, quota in quotas.items()
        ):
            values[slots] = [
                sum(
                    gain
                    for (_, gain), one in zip(plan, tasks, strict=True)
                    if one.priority == priority
                )
                for priority in priorities
            ]
    check_best(problem, values)


OTHER_POLICY = Policy(
    **{
        name: value + 1 if type(value) in (int, float) else not value
        for name, value in structs.asdict(Policy()).items()
        if type(value) in (int, float, bool)
    },
    moves_max=1,
    quotas={"red": 2},
    redact=("*",),
    shared_folders=("/mnt",),
    durability="none",
)
"""Each field is another than by default."""


@pytest.mark.parametrize("name", Policy.__struct_fields__)
def test_a_policy_outdates_the_plan_if_the_problem_depends_on_it(d: Driver, name: str) -> None:
    """With and without a hot spare: `repair_s` is only its price."""
    d.running(spec(slots={"min": 1, "max": 4}, team="red"))

    def after(policy: Policy) -> ClusterState:
        state, source = decode_state(encode_state(d.state)), "leader/abc"
        report = Report(
            source=source,
            source_seq=d.seqs[source] + 1,
            occurred_s=d.now_s,
            body=r.PolicySet(policy=policy),
        )
        fold(state, report_record(state, report, epoch=d.epoch, at_s=d.now_s))
        return state

    asks_for_plan, problem_differs = False, False
    for usual in (Policy(), Policy(hot_spare=True)):
        before = after(usual)
        d.state.policy = usual
        now = after(replace(usual, **{name: getattr(OTHER_POLICY, name)}))
        asks_for_plan |= bool(now.replan)
        problem_differs |= planning_snapshot(now).problem != planning_snapshot(before).problem
    d.state.policy = Policy()
    assert asks_for_plan == problem_differs


def test_a_policy_that_changes_plans_triggers_a_plan(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}, team="red"))
    seats = task_of(d, task).target
    records = d.tell("leader/abc", r.PolicySet(policy=Policy(stop_s_max=7.0)))
    assert not only(decisions.PlanChosen, records), "stop_s_max affects no plan"
    records = d.tell("leader/abc", r.PolicySet(policy=Policy(stop_s_max=7.0, quotas={"red": 2})))
    assert [plan.body.trigger for plan in only(decisions.PlanChosen, records)] == [
        "the policy was set"
    ]
    assert len(seats) == 4
    assert len(task_of(d, task).target) == 2
