"""The explanation of a plan: its figures, its binding constraint and its reason."""

from __future__ import annotations

import itertools
import math

import pytest
from decider import Driver
from explained import explained
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_problems import TRANSITION_S, asking, wishes
from two_tasks import gives, train, two_tasks
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.planner import alternative_names, explain, planner
from unicron.control_plane.planner.objective import (
    cost_flop,
    hysteresis_flop,
    objective_flop,
    transition_flop,
)
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand, waf_of
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records import reports as r
from unicron.events.records.decisions import Binding, PlanChosen


def demand(name: str, now: int, wafs: dict[int, float], *, faulted: bool = False) -> TaskDemand:
    return TaskDemand(
        task=int(name[1:]),
        name=name,
        now=now,
        faulted=faulted,
        transition=Transition.uniform(TRANSITION_S),
        sizes=tuple(wafs),
        wafs=tuple(wafs.values()),
    )


def plans(d: Driver) -> list[PlanChosen]:
    return [record.body for record in d.log if isinstance(record.body, PlanChosen)]


@given(wishes(), st.sampled_from([0.0, 0.005, 0.3]))
@settings(max_examples=200, deadline=None)
def test_the_objective_in_flop_is_the_planners(
    case: tuple[list[TaskDemand], int], gain_min: float
) -> None:
    problem = asking(*case, gain_min=gain_min)
    choice = planner.choose_plan(problem)
    objective = objective_flop(problem, choice.plan.slots)
    rows = planner.allowed_candidates(problem)
    whole = [
        math.fsum(
            [
                waf_of(one, x) * problem.running_s,
                -cost_flop(one, x),
                -hysteresis_flop(problem, one, x),
            ]
        )
        for one in problem.demands
        for x in (0, *one.sizes)
        if x <= problem.num_slots
    ]
    gains = rows.gains[rows.sizes <= problem.num_slots].tolist()
    # The planner's integers share one scale. The largest candidates give the size of its unit.
    unit = max(
        (
            abs(flop / number)
            for flop, number in zip(whole, gains, strict=True)
            if abs(number) > 1 << 40
        ),
        default=0.0,
    )
    assert (
        objective
        == pytest.approx(
            choice.plan.objective * unit, rel=1e-9, abs=unit * 2 * len(problem.demands)
        )
        or not unit
    )
    for other in choice.alternatives:
        behind = objective - objective_flop(problem, [x for _, x in other.slots])
        close = 1e-9 * math.fsum(map(abs, whole)) + unit
        if other.objective > choice.plan.objective:
            assert behind <= close
        else:
            assert behind >= -close


@given(wishes(), st.sampled_from([0.0, 0.005, 0.3]))
@settings(max_examples=200, deadline=None)
def test_the_payback_time_agrees_with_brute_force(
    case: tuple[list[TaskDemand], int], gain_min: float
) -> None:
    """The reference is the best of the plans that change no healthy task."""
    problem = asking(*case, gain_min=gain_min)
    choice = planner.choose_plan(problem)
    found = explain.paid_back_s(problem, choice.plan.slots)
    rows = [
        (0, *one.sizes) if one.faulted or one.now not in one.sizes else (one.now,)
        for one in problem.demands
    ]
    unchanged = [slots for slots in itertools.product(*rows) if sum(slots) <= problem.num_slots]
    plan = choice.plan.slots
    if not unchanged or plan in unchanged:
        assert found == 0
        return

    def earned(slots: tuple[int, ...]) -> float:
        return math.fsum(waf_of(one, x) for one, x in zip(problem.demands, slots, strict=True))

    worth = {slots: objective_flop(problem, slots) for slots in unchanged}
    close = 1e-9 * max(map(abs, worth.values()), default=0.0)
    most = max(worth.values())
    expected = [
        cost / gain if cost > 0 < gain else 0.0
        for slots in unchanged
        if worth[slots] >= most - close
        for cost in [transition_flop(problem, plan) - transition_flop(problem, slots)]
        for gain in [earned(plan) - earned(slots)]
    ]
    assert any(found == pytest.approx(one, rel=1e-6, abs=1e-9) for one in expected)
    assert found <= problem.running_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("demands", "num_slots", "back_s"),
    [
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 0, {1: 4.0})], 2, TRANSITION_S * 5 / 2),
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 0, {1: 4.0})], 3, 0.0),
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 1, {1: 4.0})], 2, 0.0),
    ],
)
def test_payback_time_of_a_change(demands: list[TaskDemand], num_slots: int, back_s: float) -> None:
    """t1 has WAF 5. A plan that also runs t2 has WAF 7. If both fit, no change costs anything."""
    problem = asking(demands, num_slots)
    assert explain.paid_back_s(problem, planner.choose_plan(problem).plan.slots) == pytest.approx(
        back_s
    )


def test_a_task_that_waits_only_for_slots_is_bound_by_slots() -> None:
    demands = [demand("t1", 2, {2: 3.0}), demand("t2", 0, {2: 3.0})]
    for alpha in (0.0, 1.0, 2.0):
        problem = replace(asking(demands, 2), alpha=alpha)
        assert explain.binding_constraint(problem, planner.choose_plan(problem), {}) == (
            "slots",
            (),
        )


def test_a_share_of_nearly_100_percent() -> None:
    problem = asking([demand("t1", 0, {1: 1000.0}), demand("t2", 0, {1: 1.0})], 1)
    assert explained(problem)[2] == "t1 begins on 1: the runner-up is worth 100 % less"


@pytest.mark.parametrize(
    ("demands", "num_slots", "gain_min", "bound", "tasks"),
    [
        (
            [demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 1, {1: 2.0, 2: 3.0})],
            3,
            0.0,
            "slots",
            (),
        ),
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 0, {2: 1.0})], 3, 0.0, "min", (2,)),
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 2, {2: 3.0})], 6, 0.0, "max", (1, 2)),
        ([demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t3", 1, {1: 2.0})], 6, 0.0, "max", (1,)),
        ([demand("t3", 1, {1: 2.0})], 6, 0.0, "nothing", ()),
        ([], 6, 0.0, "nothing", ()),
        (
            [demand("t1", 2, {2: 100.0, 3: 100.4}), demand("t2", 2, {1: 50.0, 2: 50.1})],
            4,
            0.005,
            "slots",
            (),
        ),
    ],
)
def test_what_binds(
    demands: list[TaskDemand],
    num_slots: int,
    gain_min: float,
    bound: Binding,
    tasks: tuple[int, ...],
) -> None:
    """t1 and t2 allow no more than their largest size. t3 allows more, but gains nothing."""
    problem = asking(demands, num_slots, gain_min=gain_min)
    most = {one.task: one.sizes[-1] + 4 * (one.name == "t3") for one in demands}
    assert explain.binding_constraint(problem, planner.choose_plan(problem), most) == (bound, tasks)


@pytest.mark.parametrize(
    ("demands", "num_slots", "why"),
    [
        (
            [
                demand("t1", 4, {2: 3.2, 3: 4.7, 4: 6.16}, faulted=True),
                demand("t2", 2, {1: 1.5, 2: 2.5}),
            ],
            4,
            "t1 4 -> 3, t2 2 -> 1: the runner-up is worth 0.65 % less",
        ),
        (
            [demand("t1", 2, {1: 3.0, 2: 5.0}), demand("t2", 1, {1: 2.0, 2: 3.0})],
            3,
            "no task moves: the runner-up is worth 15 % less",
        ),
        (
            [demand("t1", 2, {1: 3.0, 2: 5.0}, faulted=True)],
            2,
            "t1 goes on with as many: the runner-up is worth 40 % less",
        ),
        (
            [demand("t1", 0, {2: 5.0}), demand("t2", 0, {2: 5.0})],
            2,
            "t1 begins on 2: the runner-up is worth as much, and a tie goes to the first task",
        ),
        (
            [demand("t1", 2, {2: 100.0, 3: 100.4}), demand("t2", 2, {1: 50.0, 2: 50.1})],
            4,
            "no task moves: the runner-up is worth 0.23 % less",
        ),
        (
            [demand(f"t{i}", 1, {1: 1.0, 2: 9.0}) for i in range(1, 6)],
            10,
            "t1 1 -> 2, t2 1 -> 2, t3 1 -> 2 and 2 more: the runner-up is worth 18 % less",
        ),
        (
            [demand("t1", 2, {2: 5.0}), demand("t2", 0, {2: 5.00001})],
            2,
            "no task moves: the runner-up is worth 0.5 % less: "
            "its changes cost more than they earn",
        ),
        (
            [demand("t1", 2, {2: 5.0}), demand("t2", 0, {2: 5.01})],
            2,
            "no task moves: the runner-up is worth 0.3 % less: its changes earn less than "
            "gain_min asks "
            "for",
        ),
        (
            [demand("t1", 2, {2: 5.0}), demand("t2", 0, {2: 50.0})],
            2,
            "t1 gives up its 2, t2 begins on 2: the runner-up (keep as it is) is worth 90 % less",
        ),
        ([], 4, "no task moves: there is nothing that could earn anything"),
    ],
)
def test_the_reason_in_one_sentence(demands: list[TaskDemand], num_slots: int, why: str) -> None:
    assert explained(asking(demands, num_slots))[2] == why


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "under 0.001 %"),
        (0.00021, "0.021 %"),
        (0.214, "21 %"),
        (0.994, "99 %"),
        (0.995, "100 %"),
        (0.9999, "100 %"),
        (1.0, "100 %"),
        (3999.0, "399,900 %"),
    ],
)
def test_a_share_in_words(share: float, words: str) -> None:
    assert alternative_names.percent(share) == words


def test_the_reason_and_the_screen_show_the_same_share() -> None:
    """Both show a share of the objective. With a short MTBF it differs from a share of the WAF."""
    problem = PlanProblem(
        demands=(
            demand("t1", 4, {2: 4.0, 4: 9.0}, faulted=True),
            demand("t2", 2, {1: 3.0, 2: 4.0}),
        ),
        num_slots=6,
        mtbf_gpu_s=6 * 1.5 * TRANSITION_S,
    )
    choice, others, why = explained(problem)
    objective = objective_flop(problem, choice.plan.slots)
    nearest = max(others, key=lambda other: other.objective)
    share = alternative_names.percent(nearest.behind_flop / objective)
    assert share != alternative_names.percent(
        nearest.behind_flop / (choice.plan.waf * problem.running_s)
    )
    assert f"is worth {share} less" in why
    rows = plan_screen._alternatives(
        {
            "waf": choice.plan.waf,
            "objective_flop": objective,
            "alternatives": [
                {"what": x.what, "waf": x.waf, "behind_flop": x.behind_flop} for x in others
            ],
        }
    )
    assert f"({share})" in rows[2]


def test_every_plan_in_the_log_is_explained() -> None:
    d, alpha, beta = gives()
    for plan in plans(d):
        assert plan.why
        assert plan.binding
        assert plan.running_s == d.state.policy.mtbf_gpu_s / plan.num_slots
        paid = math.fsum(x.waf_before * x.transition_s for x in plan.allocations)
        assert plan.transition_flop == pytest.approx(paid)
        held = (
            math.fsum(
                x.waf_before
                for x in plan.allocations
                if x.slots != x.slots_before and (x.task == beta)
            )
            * d.state.policy.gain_min
            * plan.running_s
        )  # alpha is faulted
        assert plan.objective_flop == pytest.approx(plan.waf * plan.running_s - paid - held)
        assert all(other.behind_flop >= 0 for other in plan.alternatives)
    inputs = [plan.input for plan in plans(d)]
    assert len(inputs) == len(set(inputs))
    last = plans(d)[-1]
    assert [(x.task, x.transition_s > 0) for x in last.allocations] == [(alpha, True), (beta, True)]
    assert (last.binding, last.bound_tasks) == ("slots", ())


def test_the_max_of_a_task_binds() -> None:
    d, alpha, beta = two_tasks({1: 1.5e12, 2: 2.4e12})
    d.tell("operator/w", r.TaskCancelRequested(task=beta))
    d.obey(d.log[-6:])
    assert (plans(d)[-1].binding, plans(d)[-1].bound_tasks) == ("max", (alpha,))


def test_a_min_that_does_not_fit_binds(d: Driver) -> None:
    d.submit(train("alpha", 2.0, {3: 3e12}, slots={"min": 3, "max": 3}))
    beta = d.submit(train("beta", 1.0, {2: 1e12}, slots={"min": 2, "max": 4}))
    assert (plans(d)[-1].binding, plans(d)[-1].bound_tasks) == ("min", (beta,))
