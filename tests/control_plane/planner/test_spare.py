"""Hot spares: when the slots of one node stay idle, and what the plan record reports."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, spec, task_of, waits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from next_event_inputs import inputs
from planner_cases import case
from spare_by_force import both, may_idle, spare_by_force
from two_tasks import lose
from unicron.control_plane.planner import alternative_names, hot_spare, pending, planner
from unicron.control_plane.planner.pending import WaitExplanation
from unicron.control_plane.planner.problem import PlanProblem
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records import reports as r
from unicron.events.records.decisions import HotSpare
from unicron.events.records.types import Slot
from unicron.events.spec.policy import Policy
from wished import wish

pytestmark = pytest.mark.nodes(4)

TRAIN = {"iterations": 50, "batch": {"global": 24, "micro": 2}}


@st.composite
def with_spares(draw: st.DrawFn) -> PlanProblem:
    """Random problems. In about half, the cluster is full and faults are frequent."""
    problem, node = draw(inputs())
    problem = replace(
        problem,
        demands=problem.demands[:4],
        spare_slots=node,
        floor=draw(st.sampled_from([False, False, True])),
        repair_s=draw(st.sampled_from([1.0, 60.0, 21_300.0])),
    )
    if draw(st.booleans()):
        return problem
    demands = tuple(
        replace(
            one,
            faulted=False,
            now=draw(st.sampled_from([0, one.sizes[-1]])),
            sizes=one.sizes[-2:],
            wafs=one.wafs[-2:],
        )
        for one in problem.demands
        if one.sizes
    )
    return replace(
        problem,
        demands=demands,
        num_slots=sum(one.sizes[-1] for one in demands),
        mtbf_gpu_s=draw(st.sampled_from([1e1, 1e2, 1e3])),
    )


@given(with_spares())
@settings(max_examples=300, deadline=None)
def test_a_spare_is_kept_only_if_it_saves_more_than_it_costs(problem: PlanProblem) -> None:
    choice = hot_spare.with_hot_spare(problem)
    free, spare = planner.choose_plan(problem), choice.spare
    if not problem.demands:
        assert spare is None
        return
    assert spare is not None
    if problem.num_slots - sum(free.plan.slots) >= problem.spare_slots:
        assert (spare.verdict, choice.plan) == ("idle anyway", free.plan)
        return
    cost, saves, close = spare_by_force(problem)
    assert abs(spare.cost_flop - cost) <= close
    assert abs(spare.saves_flop - saves) <= close
    if abs(saves - cost) > close:
        assert spare.verdict == ("kept" if saves > cost and may_idle(problem) else "not kept")
    assert choice.plan.slots == both(problem)[spare.verdict == "kept"]


# --- examples ------------------------------------------------------------------------------------
def fixed(mtbf_gpu_s: float, **more: Any) -> PlanProblem:
    """Three tasks, each on four slots of one node or none: two of high WAF and one of low WAF. If a
    fault hits one of the first two, the last must stop, and the cost of stopping is high."""
    wafs = (100.0, 100.0, 5.0)
    dear = Transition(same_s=10.0, shrink_s=10.0, grow_s=10.0, stop_s=600.0)
    return PlanProblem(
        demands=tuple(
            replace(wish(i, 4, {4: waf}), transition=dear) for i, waf in enumerate(wafs, 1)
        ),
        num_slots=12,
        mtbf_gpu_s=mtbf_gpu_s,
        **{"spare_slots": 4, "repair_s": 21_300.0, **more},
    )


def planned(problem: PlanProblem) -> tuple[planner.Choice, HotSpare]:
    """The choice and its hot-spare record."""
    choice = hot_spare.with_hot_spare(problem)
    assert choice.spare is not None
    return choice, choice.spare


def running(problem: PlanProblem, *nows: int) -> PlanProblem:
    return replace(
        problem,
        demands=tuple(
            replace(one, now=now) for one, now in zip(problem.demands, nows, strict=True)
        ),
    )


def test_a_spare_pays_if_faults_are_frequent() -> None:
    often = running(fixed(12 * 60.0), 4, 4, 0)
    choice, spare = planned(often)
    assert choice.plan.slots == (4, 4, 0)
    assert spare.verdict == "kept"
    assert spare.cost_flop == pytest.approx(5.0 * 60.0)
    # Any fault would stop the last task. Two of three faults hit one of the first two.
    after_s = 12 * 60.0 / 8
    kept = 200.0 * after_s - 2 / 3 * 100.0 * 10.0
    free = 200.0 * after_s - 2 / 3 * 100.0 * 10.0 - 5.0 * 600.0
    assert spare.saves_flop == pytest.approx(kept - free)
    others = {other.what: other for other in choice.alternatives}
    beaten = others[alternative_names.SPARELESS]
    assert beaten.slots == ((1, 4), (2, 4), (3, 4))
    # Idle slots fail as often as used slots, so both plans have the same D_running.
    assert choice.plan.objective / beaten.objective == pytest.approx(200.0 / 205.0)


def test_a_spare_does_not_pay_if_faults_are_rare() -> None:
    rare = running(fixed(7.2e6), 4, 4, 0)
    choice, spare = planned(rare)
    assert choice.plan == planner.choose_plan(rare).plan
    assert choice.plan.slots == (4, 4, 4)
    assert spare.verdict == "not kept"
    assert spare.cost_flop > spare.saves_flop > 0


def test_no_running_task_stops_for_a_spare() -> None:
    """A spare would save more than it costs, but a running task would have to stop for it."""
    dear = Transition.uniform(600.0)
    often = replace(
        fixed(8 * 60.0),
        num_slots=8,
        demands=tuple(
            replace(wish(i, 4, {4: 100.0}, faulted=i == 1), transition=dear) for i in (1, 2)
        ),
    )
    choice, spare = planned(often)
    assert spare.saves_flop > spare.cost_flop > 0
    assert (spare.verdict, choice.plan.slots) == ("not kept", (4, 4))


def test_no_task_falls_below_its_floor_for_a_spare() -> None:
    often = running(fixed(12 * 60.0), 4, 4, 0)
    floored = replace(often, floor=True)
    assert [hot_spare.with_hot_spare(one).plan.slots for one in (often, floored)] == [
        (4, 4, 0),
        (4, 4, 4),
    ]
    _, spare = planned(floored)
    assert spare.verdict == "not kept"
    assert spare.saves_flop > spare.cost_flop


def test_slots_idle_anyway_are_a_spare_at_no_cost() -> None:
    choice, spare = planned(replace(fixed(7.2e6), num_slots=16))
    assert choice.plan.slots == (4, 4, 4)
    assert (spare.verdict, spare.cost_flop) == ("idle anyway", 0.0)


def test_a_tie_keeps_nothing_idle() -> None:
    """Four slots have the WAF of two. With transition costs two stay idle; without, plans tie."""
    same = wish(1, 0, {2: 5.0, 4: 5.0})
    dear = PlanProblem(demands=(same,), num_slots=4, mtbf_gpu_s=400.0, spare_slots=2, repair_s=60.0)
    assert hot_spare.with_hot_spare(dear).plan.slots == (2,)
    choice, spare = planned(
        replace(dear, demands=(replace(same, transition=Transition.uniform(0.0)),))
    )
    assert choice.plan.slots == (4,)
    assert (spare.verdict, spare.cost_flop, spare.saves_flop) == ("not kept", 0.0, 0.0)


def test_the_only_node_is_not_kept_as_a_spare() -> None:
    choice, spare = planned(replace(fixed(12.0), num_slots=4))
    assert (spare.verdict, sum(choice.plan.slots)) == ("not kept", 4)


def test_after_a_fault_the_spare_is_used_and_the_healthy_go_on(d: Driver) -> None:
    """beta would gain 1 % on twice as many slots. The MTBF of the cluster is two minutes."""
    policy = Policy(hot_spare=True, mtbf_gpu_s=8 * 120.0, mtbf_faults=1e6)
    d.tell("leader/abc", r.PolicySet(policy=policy))
    alpha = d.running(spec(slots={"sizes": [4]}, throughput={4: 1e12}))
    beta = d.running(
        spec(
            name="beta",
            slots={"sizes": [2, 4]},
            throughput={2: 1e12, 4: 1.01e12},
            train={**TRAIN, "output": "/tmp/beta"},
        )
    )
    plan = d.state.plan
    assert plan is not None
    assert plan.hot_spare is not None
    assert (plan.hot_spare.verdict, plan.hot_spare.num_slots, plan.binding) == ("kept", 2, "spare")
    assert [x.slots for x in plan.allocations] == [4, 2]
    assert plan.why.startswith("beta begins on 2: 2 slots idle as a hot spare, which costs ")
    before = {task: task_of(d, task).target for task in (alpha, beta)}
    node = before[alpha][0].slot.node
    assert node not in {seat.slot.node for seat in before[beta]}
    generation = task_of(d, beta).generation
    lose(d, node, alpha)
    plan = d.state.plan
    assert plan.num_slots == 6
    assert [x.slots for x in plan.allocations] == [4, 2]
    assert plan.hot_spare is not None
    assert plan.hot_spare.verdict == "not kept"
    stayed = {seat for seat in before[alpha] if seat.slot.node != node}
    idle = {Slot(name, index) for name in d.state.nodes for index in range(2)} - {
        seat.slot for seats in before.values() for seat in seats
    }
    assert {seat.slot for seat in set(task_of(d, alpha).target) - stayed} == idle
    assert stayed < set(task_of(d, alpha).target)
    assert task_of(d, beta).target == before[beta]
    assert task_of(d, beta).generation == generation
    d.join(node, incarnation=2)
    assert d.state.plan is not None
    assert [x.slots for x in d.state.plan.allocations] == [4, 2]
    assert d.state.plan.hot_spare is not None
    assert d.state.plan.hot_spare.verdict == "idle anyway", "growing costs beta more than it gains"


def test_one_slot_is_singular_in_the_reason() -> None:
    made = Driver(nodes=8, slots=1)
    made.tell(
        "leader/abc",
        r.PolicySet(policy=Policy(hot_spare=True, mtbf_gpu_s=8 * 120.0, mtbf_faults=1e6)),
    )
    made.submit(spec(slots={"sizes": [4]}, throughput={4: 1e12}))
    made.submit(spec(name="beta", slots={"sizes": [3, 4]}, throughput={3: 1e12, 4: 1.01e12}))
    assert made.state.plan is not None
    assert ": 1 slot idle as a hot spare, which costs " in made.state.plan.why


def test_a_task_that_waits_for_a_spare_names_the_spare(d: Driver) -> None:
    """A transition takes longer than the time to the next fault, so a new task does not start."""
    policy = Policy(hot_spare=True, mtbf_gpu_s=8 * 60.0, mtbf_faults=1e6, transition_s=600.0)
    d.tell("leader/abc", r.PolicySet(policy=policy))
    d.running(spec(slots={"sizes": [6]}, throughput={6: 1e12}))
    beta = d.submit(spec(name="beta", slots={"sizes": [2]}, throughput={2: 1e10}))
    assert waits_of(d, beta) == WaitExplanation(
        why="its slots are kept idle as a hot spare",
        needs="more slots, or a policy without hot_spare",
    )
    d.tell("leader/abc", r.PolicySet(policy=replace(policy, hot_spare=False)))
    assert task_of(d, beta).target, "without a spare the task runs at once"
    assert d.state.plan is not None
    assert d.state.plan.hot_spare is None


def test_no_spare_is_reported_unless_requested() -> None:
    problem = replace(fixed(12 * 60.0), spare_slots=0)
    assert hot_spare.with_hot_spare(problem) == planner.choose_plan(problem)
    assert hot_spare.with_hot_spare(problem).spare is None


def test_spares_are_priced_up_to_a_work_limit() -> None:
    problem = replace(case(100, 4096, 1, gain_min=0.005), spare_slots=8, repair_s=21_300.0)
    choice, spare = planned(problem)
    assert spare.verdict in ("kept", "not kept")
    assert spare.cost_flop > 0
    large = replace(case(400, 8192, 1), spare_slots=8, repair_s=21_300.0)
    choice, spare = planned(large)
    assert spare.verdict == "not priced"
    assert choice.plan == planner.choose_plan(large).plan
    limited = replace(problem, moves_max=3)
    assert hot_spare.exceeds_work_limit(limited)
    assert not hot_spare.exceeds_work_limit(problem)


def test_a_possible_spare_leaves_no_prices() -> None:
    problem = running(fixed(12 * 60.0), 4, 4, 0)
    choice = hot_spare.with_hot_spare(problem)
    assert pending.prices(replace(problem, spare_slots=0), choice.plan)
    assert not pending.prices(problem, choice.plan)
