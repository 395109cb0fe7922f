"""Healing paused (frozen or observing): decisions are made and logged, but no order is sent."""

from __future__ import annotations

from decider import Driver, failed, kinds, only, spec, task_of, the, waits_of
from unicron.control_plane.planner import pending
from unicron.control_plane.planner.pending import WaitExplanation
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec import policy


def freeze(d: Driver) -> list[Record]:
    return d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))


def resume(d: Driver) -> list[Record]:
    return d.tell("operator/thaw", r.HealingResumed())


def orders(records: list[Record]) -> list[str]:
    return [record.kind for record in records if isinstance(record.body, o.ORDERS)]


def test_while_paused_a_killed_rank_is_only_reported(d: Driver, task: int) -> None:
    assert kinds(freeze(d)) == []
    records = d.exit(task, 2)
    assert the(decisions.IncidentOpened, records).severity == "SEV2"
    suppressed = the(decisions.OrderSuppressed, records)
    assert suppressed.why == "frozen: a change of switches"
    assert "ranks 0 1 3 leave generation 1 at once" in suppressed.what
    assert "start rank 2 on n2/0" in suppressed.what
    assert orders(records) == []
    for rank in (0, 1, 3):
        assert kinds(failed(d, task, rank)) == [], "the order is suppressed once"


def test_resuming_carries_out_the_suppressed_orders(d: Driver, task: int) -> None:
    freeze(d)
    d.exit(task, 2)
    for rank in (0, 1, 3):
        failed(d, task, rank)
    records = resume(d)
    assert "Quiesce" in orders(records)
    assert "StartRank" in orders(records)
    assert task_of(d, task).withheld == ""
    d.obey(records)
    d.heal(task)
    assert (task_of(d, task).healed, task_of(d, task).iterations_lost) == (1, 0)


def test_a_transition_that_has_begun_is_completed(d: Driver, task: int) -> None:
    begun = [x for x in d.exit(task, 2) if isinstance(x.body, o.Quiesce)]
    freeze(d)
    records = d.obey(begun)
    assert task_of(d, task).phase == "training", "a transition that began is completed"
    assert [m.rank for m in the(o.Reconfigure, records).members] == [0, 1, 3]


def test_a_new_task_is_planned_and_waits(d: Driver) -> None:
    freeze(d)
    name = "operator/submit"
    records = d.tell(name, r.TaskSubmitted(spec=spec()))
    assert the(decisions.PlanChosen, records).allocations[0].slots == 4
    assert the(decisions.OrderSuppressed, records).what == "from 0 to 4 slots, by the plan"
    assert orders(records) == []
    assert "TaskPlaced" not in kinds(records)
    assert the(decisions.TaskWaiting, records).why == "frozen: a change of switches"
    assert orders(resume(d)) == ["StartRank"] * 4
    assert task_of(d, records[0].seq).why == ""


def test_a_cancel_request_is_carried_out_while_paused(d: Driver, task: int) -> None:
    freeze(d)
    records = d.tell("operator/cancel", r.TaskCancelRequested(task=task))
    assert orders(records) == ["StopRank"] * 4
    d.obey(records)
    assert task_of(d, task).outcome == "cancelled"


def test_while_paused_a_lost_node_is_only_planned_for(d: Driver, task: int) -> None:
    freeze(d)
    node = d.state.nodes["n2"]
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=node.incarnation, silence_s=6.0))
    records = failed(d, task, 0)
    assert the(decisions.IncidentOpened, records).severity == "SEV1"
    assert the(decisions.PlanChosen, records).num_slots == 2
    assert "from 4 to 2 slots, by the plan" in task_of(d, task).withheld
    assert orders(records) == []
    d.join("n2", incarnation=2)
    records = resume(d)
    assert orders(records).count("StartRank") == 2
    d.obey(records)
    d.progress(task)
    assert task_of(d, task).iterations_lost == 0


def test_a_task_wholly_on_a_silent_node_is_not_given_up(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    node = d.state.nodes[task_of(d, task).target[0].slot.node]
    freeze(d)
    unreachable = r.NodeUnreachable(node=node.name, incarnation=node.incarnation, silence_s=6.0)
    assert kinds(d.tell("leader/abc", unreachable)) == [], "with healing on it would also stay"
    assert kinds(d.due(f"replace/{node.name}")) == []
    d.tell("leader/abc", r.NodeReachable(node=node.name, incarnation=node.incarnation))
    assert orders(resume(d)) == []
    assert not task_of(d, task).orphans
    freeze(d)
    d.tell("leader/abc", unreachable)
    d.due(f"replace/{node.name}")
    assert "StartRank" in orders(resume(d)), "still unreachable: replaced now"


def test_observing_orders_nothing_until_the_policy_changes(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(observe=True)))
    task = d.submit(spec())
    assert task_of(d, task).withheld
    assert orders(d.log) == []
    assert [x.body.why for x in only(decisions.OrderSuppressed, d.log)] == ["observing"]
    records = d.tell("leader/abc", r.PolicySet(policy=policy.Policy()))
    assert orders(records) == ["StartRank"] * 4


def test_the_wait_reason_follows_the_plan(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(observe=True)))
    for node in ("n1", "n2"):
        d.tell(f"operator/{node}", r.NodeDrained(node=node))
    task = d.submit(spec())
    assert task_of(d, task).why == "not enough slots"
    assert "n1 n2 drained" in waits_of(d, task).needs
    d.tell("operator/back", r.NodeUndrained(node="n1"))
    assert (task_of(d, task).why, task_of(d, task).withheld) == (
        "observing",
        "from 0 to 2 slots, by the plan",
    )
    assert waits_of(d, task) == WaitExplanation(why="observing", needs="healing to be on")
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy()))
    assert task_of(d, task).why == ""


def test_a_command_task_is_not_started_again(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["sleep", "9"], slots={"min": 2, "max": 2}))
    d.obey(d.log[-9:])
    freeze(d)
    assert orders(d.exit(task, 0, code=3, signal=None)) == []
    assert "stop rank 1" in task_of(d, task).withheld
    assert "StopRank" in orders(resume(d))


def test_fault_injection_must_be_allowed(d: Driver, task: int) -> None:
    request = r.FaultRequested(what="rank", task=task, rank=2)
    assert kinds(d.tell("operator/a", request)) == []
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(allow_inject=True)))
    order = the(o.InjectFault, d.tell("operator/b", request))
    assert (order.nodes, order.rank, order.attempt, order.incarnation) == (("n2",), 2, 1, 1)
    node = the(o.InjectFault, d.tell("operator/c", r.FaultRequested(what="node", node="n1")))
    assert (node.nodes, node.what) == (("n1",), "node")
    assert kinds(d.tell("operator/d", r.FaultRequested(what="node", node="n9"))) == []
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=6.0))
    assert kinds(d.tell("operator/e", request)) == [], "no injection on an unreachable node"


def test_a_drained_node_stays_so_when_its_agent_joins_again(d: Driver) -> None:
    d.tell("operator/drain", r.NodeDrained(node="n1", reason="fans"))
    d.join("n1", incarnation=2)
    assert d.state.nodes["n1"].drained
    assert d.state.nodes["n1"].drain_reason == "fans"
    task = d.submit(spec())
    assert {seat.slot.node for seat in task_of(d, task).target} == {"n2"}
    records = d.tell("operator/undrain", r.NodeUndrained(node="n1"))
    assert the(decisions.PlanChosen, records).trigger == "node n1 undrained"


def test_operators_set_weights(d: Driver, task: int) -> None:
    other = d.submit(spec(name="beta", weight=0.5))
    before = len(task_of(d, other).target)
    records = d.tell("operator/w", r.TaskWeightSet(task=other, weight=50.0))
    assert the(decisions.PlanChosen, records).trigger == "task beta has weight 50"
    assert len(task_of(d, other).target) > before
    assert task_of(d, other).spec.weight == 0.5
    assert kinds(d.tell("operator/x", r.TaskWeightSet(task=task, weight=float(10**9)))) == []


def test_a_task_that_still_trains_does_not_wait(d: Driver, task: int) -> None:
    freeze(d)
    for node in ("n1", "n2"):
        records = d.tell(f"operator/{node}", r.NodeDrained(node=node, reason=""))
    assert "TaskWaiting" not in kinds(records)
    assert task_of(d, task).withheld == "from 4 to 0 slots, by the plan; move off n1 n2"
    for node in ("n1", "n2"):
        d.tell(f"operator/un{node}", r.NodeUndrained(node=node))
    assert orders(resume(d)) == []
    assert task_of(d, task).why == ""
    assert pending.explain_waiting(d.state) == {}


def test_a_failed_task_can_be_cancelled_while_paused(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["sleep", "9"], slots={"min": 2, "max": 2}))
    d.obey(d.log[-9:])
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(restarts_max=0)))
    d.obey(d.exit(task, 0))
    freeze(d)
    assert orders(d.exit(task, 0)) == []
    assert task_of(d, task).ending == "failed"
    assert task_of(d, task).withheld.startswith("stop rank 1: failed, and restarts_max is 0")
    records = d.tell("operator/cancel", r.TaskCancelRequested(task=task))
    assert orders(records) == ["StopRank"]
    assert task_of(d, task).withheld == ""
    d.obey(records)
    assert (task_of(d, task).outcome, task_of(d, task).withheld) == ("cancelled", "")
    assert task_of(d, task).why.startswith("cancelled; it had failed: failed, and restarts_max")


def test_a_replaced_rank_is_in_the_suppressed_orders(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 4}))
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=6.0))
    d.obey(failed(d, task, 0))
    freeze(d)
    records = d.tell("leader/abc", r.NodeReachable(node="n2", incarnation=1))
    assert orders(records) == []
    assert "stop rank 2: it was replaced while its node was silent" in task_of(d, task).withheld


def test_a_member_that_does_not_quiesce_is_left_while_paused(d: Driver, task: int) -> None:
    d.exit(task, 2)
    freeze(d)
    for rank in (0, 1):
        d.quiesced(task, rank)
    late = d.due(f"quiesce/{task}/1")
    assert orders(late) == []
    assert "stop rank 3: it did not quiesce in time" in task_of(d, task).withheld
    resumed = resume(d)
    assert "StopRank" in orders(resumed)
    d.obey(only(o.StartRank, d.log)[-1:])
    d.obey(resumed)
    d.progress(task)
    assert len(task_of(d, task).members) == 4
    assert task_of(d, task).iterations_lost == 0


def test_no_new_transition_begins_while_paused(d: Driver, task: int) -> None:
    new = d.exit(task, 2)
    freeze(d)
    records = d.obey(new)
    assert [x for x in orders(records) if x != "PublishCheckpoint"] == ["Reconfigure", "Resume"]
    assert (task_of(d, task).phase, task_of(d, task).generation) == ("training", 2)
    d.obey(only(o.StartRank, new))
    assert task_of(d, task).generation == 2, "the new rank is ready, and waits"
    assert "leave generation 2 at the iteration's end" in task_of(d, task).withheld
    d.obey(resume(d))
    assert task_of(d, task).generation == 3
    assert len(task_of(d, task).members) == 4
