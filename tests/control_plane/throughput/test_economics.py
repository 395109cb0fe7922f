"""The plan uses measured values: the MTBF, and the downtime of each kind of change."""

from __future__ import annotations

import math

import pytest
from decider import Driver, only, spec, task_of, the
from msgspec.structs import replace
from unicron.control_plane.api.view import view
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand, transition_cost_s, waf_of
from unicron.control_plane.planner.problem_of_state import input_digest
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.throughput import transition_cost
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.spec.policy import Policy

pytestmark = pytest.mark.nodes(3)

YEAR_S = 365 * 86400.0


def set_policy(d: Driver, policy: Policy) -> None:
    d.tell(f"leader/{d.state.nonce}", r.PolicySet(policy=policy))


def planned_s(d: Driver) -> float:
    """The MTBF of one slot that a new plan uses."""
    task = d.state.tasks[min(d.state.tasks)]
    d.tell("operator/weight", r.TaskWeightSet(task=task.id, weight=15.0 - task.weight))
    assert d.state.plan is not None
    return d.state.plan.running_s * d.state.plan.num_slots


# --- faults -------------------------------------------------------------------------------------
def test_a_young_cluster_keeps_the_prior(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    assert d.state.num_faults == 1
    assert planned_s(d) == Policy().mtbf_gpu_s, "the prior counts as 10 faults"


def test_the_mtbf_follows_time_and_faults(d: Driver) -> None:
    """The MTBF has a Gamma prior: (10 times the prior + observed time) / (10 + faults)."""
    set_policy(d, Policy(calibrate_min=0.0, calibrate_iterations=0))
    task, prior_s = d.running(), Policy().mtbf_gpu_s
    observed_s = d.state.observed_slot_s
    d.now_s += YEAR_S
    d.tell("n1/1", r.NodeReachable(node="n1", incarnation=1))
    assert math.isclose(d.state.observed_slot_s - observed_s, 4 * (YEAR_S + 0.01))
    found_s = planned_s(d)
    assert math.isclose(found_s, (10 * prior_s + d.state.observed_slot_s) / 10, rel_tol=1e-6)
    for _ in range(3):
        d.obey(d.exit(task, 2))
        d.progress(task, 12)
    now_s = planned_s(d)
    assert math.isclose(now_s, (10 * prior_s + d.state.observed_slot_s) / 13, rel_tol=1e-6)
    shown = view(d.state)["cluster"]
    assert (shown["num_faults"], shown["mtbf_gpu_s"]) == (3, now_s)


def test_an_infinite_mtbf_is_replaced_by_the_prior() -> None:
    state = ClusterState()
    state.mtbf_gpu_s = math.inf  # from `mtbf_faults: 1e308` in an old policy
    transition_cost.update_mtbf(state)
    assert state.mtbf_gpu_s == Policy().mtbf_gpu_s


def test_the_mtbf_changes_only_if_it_is_off_by_a_tenth(d: Driver) -> None:
    """Smaller differences are ignored, so that the input of the plan rarely changes."""
    d.running()
    num = input_digest(d.state)
    d.now_s += 1e6
    d.tell("n1/1", r.NodeReachable(node="n1", incarnation=1))
    assert (d.state.mtbf_gpu_s, input_digest(d.state)) == (Policy().mtbf_gpu_s, num)
    d.now_s += 2e6
    d.tell("n1/1", r.NodeReachable(node="n1", incarnation=1))
    assert input_digest(d.state) != num
    assert planned_s(d) > 1.1 * Policy().mtbf_gpu_s


def test_a_prior_without_weight_ends_with_the_first_fault(d: Driver) -> None:
    set_policy(d, Policy(mtbf_faults=0.0))
    task = d.running()
    assert planned_s(d) == Policy().mtbf_gpu_s
    d.now_s += 1000.0
    d.obey(d.exit(task, 2))
    assert math.isclose(planned_s(d), 4000.0, rel_tol=1e-2)


def test_time_without_a_leader_does_not_count(d: Driver) -> None:
    d.running()
    before_s = d.state.observed_slot_s
    d.now_s += YEAR_S
    d.epoch = 2
    d.tell("leader/next", r.EpochStarted(nonce="next", code="1", heart=d.state.heart))
    assert d.state.observed_slot_s == before_s


def test_time_without_a_task_does_not_count(d: Driver) -> None:
    d.now_s += YEAR_S
    d.running()
    assert d.state.observed_slot_s < 60.0


def inject(d: Driver, fault: r.FaultRequested) -> None:
    set_policy(d, Policy(allow_inject=True))
    assert only(o.InjectFault, d.tell("operator/inject", fault))


def test_an_injected_fault_is_not_counted(d: Driver, task: int) -> None:
    inject(d, r.FaultRequested(what="rank", task=task, rank=2))
    assert only(decisions.IncidentOpened, d.exit(task, 2))
    d.obey(d.log[-6:])
    d.progress(task, 12)
    assert d.state.num_faults == 0
    d.obey(d.exit(task, 2))
    assert d.state.num_faults == 1, "this fault was not injected"


def test_an_injected_node_loss_is_not_counted(d: Driver, task: int) -> None:
    inject(d, r.FaultRequested(what="node", node="n1"))
    records = d.join("n1", incarnation=2)
    assert only(decisions.IncidentOpened, records)
    d.obey(records)
    d.progress(task)
    assert d.state.num_faults == 0


def test_an_injection_without_effect_expires(d: Driver, task: int) -> None:
    inject(d, r.FaultRequested(what="rank", task=task, rank=2))
    d.now_s += transition_cost.INJECTED_S_MAX + 1
    d.obey(d.exit(task, 2))
    assert d.state.num_faults == 1


def test_a_refused_injection_excuses_no_fault(d: Driver, task: int) -> None:
    d.tell("operator/inject", r.FaultRequested(what="rank", task=task, rank=2))
    d.obey(d.exit(task, 2))
    assert d.state.num_faults == 1


def test_a_node_loss_under_two_tasks_is_one_fault() -> None:
    d = Driver(nodes=1, slots=4)
    small = {"min": 1, "max": 2}
    for name in ("alpha", "beta"):
        d.running(spec(name=name, slots=small))
    records = d.join("n1", incarnation=2, slots=4)
    assert len(only(decisions.IncidentOpened, records)) == 2
    assert d.state.num_faults == 1


def test_wrong_input_is_not_counted_as_a_fault(d: Driver) -> None:
    task = d.submit(spec())
    d.tell(
        "n1/1",
        r.RankErrored(
            task=task,
            rank=0,
            attempt=1,
            generation=0,
            error="UsageError",
            text="no data",
            iteration=-1,
        ),
    )
    assert [x.status for x in d.state.incidents.values()] == ["wrong input"]
    assert d.state.num_faults == 0
    d.obey(d.log[-12:])


# --- transitions --------------------------------------------------------------------------------
def exit_and_restart(d: Driver, task: int, num: int, *, pause_s: float = 5.0) -> None:
    """A rank exits and restarts, `num` times. The survivors continue after `pause_s`."""
    for _ in range(num):
        lost = d.exit(task, 2)
        d.obey(lost, start=False)
        d.now_s += pause_s
        d.progress(task)
        d.obey([x for x in lost if isinstance(x.body, o.StartRank)])
        d.progress(task, 12)


def test_enough_measured_transitions_replace_the_prior(d: Driver, task: int) -> None:
    d.progress(task, 12)
    exit_and_restart(d, task, 2)
    assert transition_cost.transition(d.state, task_of(d, task)) == replace(
        Transition.uniform(10.0), reshape_s=Policy().reshape_s
    )
    num = input_digest(d.state)
    exit_and_restart(d, task, 1, pause_s=500.0)
    assert input_digest(d.state) != num
    found = task_of(d, task).downtime_s
    assert set(found) == {"start", "same"}
    assert [round(x) for x in found["same"]] == [5, 5, 500]
    charged = transition_cost.transition(d.state, task_of(d, task))
    assert 4.5 < charged.same_s < 5.5, "the median ignores one outlier"
    assert charged.shrink_s == charged.grow_s == charged.stop_s == 10.0
    assert view(d.state)["tasks"][0]["transition"]["same_s"] == charged.same_s


def test_iterations_during_a_transition_reduce_its_downtime(d: Driver, task: int) -> None:
    d.progress(task, times_s=[0.2] * 30)
    d.now_s += 0.8
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    d.now_s += 1.0
    d.progress(task, times_s=[0.2] * 4 + [0.3])
    transition = task_of(d, task).transition
    assert transition is not None
    at_four = 5 * 0.2 * 4 / 3  # three ranks do the work of four
    assert math.isclose(transition.downtime_s, 1.8 - at_four, abs_tol=0.2)
    d.obey([x for x in lost if isinstance(x.body, o.StartRank)])
    d.progress(task)


def test_a_change_of_size_is_a_kind_of_its_own(d: Driver, task: int) -> None:
    d.progress(task, 30)
    for _ in range(3):
        for node in ("n2", "n3"):
            d.obey(d.tell(f"operator/{len(d.log)}", r.NodeDrained(node=node)))
        d.now_s += 3.0
        d.progress(task, 2)
        assert len(task_of(d, task).members) == 2
        for node in ("n2", "n3"):
            d.obey(d.tell(f"operator/{len(d.log)}", r.NodeUndrained(node=node)))
        d.now_s += 8.0
        d.progress(task, 2)
        assert len(task_of(d, task).members) == 4
    charged = transition_cost.transition(d.state, task_of(d, task))
    assert 2.0 < charged.shrink_s < 3.5
    assert 7.0 < charged.grow_s < 8.5
    assert charged.stop_s == 10.0


def test_the_cost_of_stopping_includes_the_restart(d: Driver) -> None:
    alpha = d.running(spec(slots={"min": 4, "max": 4}))
    for _ in range(3):
        for node in ("n2", "n3"):
            d.obey(d.tell(f"operator/{len(d.log)}", r.NodeDrained(node=node)))
        assert task_of(d, alpha).phase == "idle"
        d.now_s += 1e4  # waiting for slots is no cost of the change
        new = d.tell(f"operator/{len(d.log)}", r.NodeUndrained(node="n2"))
        new += d.tell(f"operator/{len(d.log)}", r.NodeUndrained(node="n3"))
        d.now_s += 40.0
        d.obey(new)
        d.progress(alpha)
    downtime_s = task_of(d, alpha).downtime_s
    assert {kind: len(x) for kind, x in downtime_s.items()} == {"start": 4, "stop": 3}
    assert 39 < downtime_s["start"][-1] < 41
    charged = transition_cost.transition(d.state, task_of(d, alpha))
    assert math.isclose(
        charged.stop_s,
        sorted(downtime_s["stop"])[1] + math.fsum(sorted(downtime_s["start"])[1:3]) / 2,
    )


def test_a_transition_while_paused_is_not_measured(d: Driver, task: int) -> None:
    d.progress(task, 12)
    lost = d.exit(task, 2)
    d.tell("operator/freeze", r.HealingFrozen(reason="look"))
    d.obey(lost)
    d.now_s += 5000.0
    d.obey(d.tell("operator/unfreeze", r.HealingResumed()))
    d.progress(task, 2)
    assert task_of(d, task).transition is None
    assert set(task_of(d, task).downtime_s) == {"start"}


def test_the_history_is_bounded(d: Driver, task: int) -> None:
    exit_and_restart(d, task, transition_cost.NUM_DOWNTIMES_MAX + 3)
    assert len(task_of(d, task).downtime_s["same"]) == transition_cost.NUM_DOWNTIMES_MAX


# --- use in the planner -------------------------------------------------------------------------
def test_each_kind_of_change_has_its_own_cost() -> None:
    kinds = Transition(same_s=1.0, shrink_s=2.0, grow_s=4.0, stop_s=8.0)
    demand = TaskDemand(
        task=1,
        name="t1",
        now=2,
        faulted=True,
        transition=kinds,
        sizes=(1, 2, 3),
        wafs=(64.0, 128.0, 192.0),
    )
    problem = PlanProblem(demands=(demand,), num_slots=3, mtbf_gpu_s=3 * 32.0)
    rows = planner.allowed_candidates(problem)
    unit = int(rows.gains[1]) // (64 * 32 - 2 * 128)
    assert unit > 0
    assert (rows.gains // unit).tolist() == [
        -8 * 128,
        64 * 32 - 2 * 128,
        128 * 32 - 128,
        192 * 32 - 4 * 128,
    ]
    healthy = planner.allowed_candidates(
        replace(problem, demands=(replace(demand, faulted=False),))
    )
    assert healthy.gains[2] == 128 * 32 * (healthy.gains[1] // (64 * 32 - 2 * 128))


def test_the_task_that_is_cheaper_to_grow_grows() -> None:
    def demand(task: int, grow_s: float) -> TaskDemand:
        kinds = Transition(same_s=1.0, shrink_s=1.0, grow_s=grow_s, stop_s=1.0)
        return TaskDemand(
            task=task,
            name=f"t{task}",
            now=1,
            faulted=False,
            transition=kinds,
            sizes=(1, 2),
            wafs=(10.0, 16.0),
        )

    problem = PlanProblem(
        demands=(demand(1, 500.0), demand(2, 2.0)), num_slots=3, mtbf_gpu_s=3 * 1e3
    )
    assert planner.choose_plan(problem).plan.slots == (1, 2)


def test_the_plan_record_has_its_running_time(d: Driver) -> None:
    d.submit(spec())
    assert the(decisions.PlanChosen, d.log).running_s == Policy().mtbf_gpu_s / 6
    d.obey(d.log[-6:])
    d.progress(min(d.state.tasks))


def test_a_new_replica_shape_costs_a_reshape() -> None:
    """One and two slots have the same replica shape. On three slots all of the state moves."""
    kinds = Transition(same_s=1.0, shrink_s=2.0, grow_s=4.0, stop_s=8.0, reshape_s=16.0)
    demand = TaskDemand(
        task=1,
        name="t1",
        now=2,
        faulted=True,
        transition=kinds,
        sizes=(1, 2, 3),
        wafs=(1.0, 2.0, 3.0),
        shapes=(0, 0, 1),
    )
    assert [transition_cost_s(demand, x) for x in (0, 1, 2, 3)] == [8.0, 2.0, 1.0, 16.0]
    assert [transition_cost_s(replace(demand, now=3), x) for x in (0, 1, 2, 3)] == [
        8.0,
        16.0,
        16.0,
        1.0,
    ]


def test_the_reported_cost_is_the_cost_in_the_objective() -> None:
    kinds = Transition(same_s=1.0, shrink_s=2.0, grow_s=4.0, stop_s=8.0, reshape_s=16.0)
    for faulted, now, shapes in (
        (False, 2, ()),
        (True, 2, ()),
        (True, 0, ()),
        (False, 0, ()),
        (False, 2, (0, 0, 1)),
        (True, 2, (0, 1, 1)),
        (True, 0, (0, 1, 1)),
    ):
        demand = TaskDemand(
            task=1,
            name="t1",
            now=now,
            faulted=faulted,
            transition=kinds,
            sizes=(1, 2, 3),
            wafs=(64.0, 128.0, 192.0),
            shapes=shapes,
        )
        rows = planner.allowed_candidates(
            PlanProblem(demands=(demand,), num_slots=3, mtbf_gpu_s=3 * 32.0)
        )
        expected = [
            waf_of(demand, x) * 32 - waf_of(demand, now) * transition_cost_s(demand, x)
            for x in (0, 1, 2, 3)
        ]
        unit = int(rows.gains[3]) // int(expected[3])
        assert (rows.gains // unit).tolist() == expected
