"""The fold of operator requests."""

from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.spec.job import WEIGHT_RATIO_MAX
from ..state.cluster import NUM_REQUESTS_MAX, ClusterState
from ..state.members import inject_fault
from ..state.node import Node
from ..state.task import Task
from ..throughput.flops import iteration_flops
from ..throughput.transition_cost import void_transitions
from .edits import PLAN, set_deadline

PLAN_ALONE_NUM = 8
PLAN_WAIT_S_PER_TASK = 0.01
PLAN_WAIT_S_MAX = 1.0
"""Many submissions at once share plans, whose cost grows with the live tasks. A submission soon
after a plan waits for the next one, for this time per live task beyond PLAN_ALONE_NUM."""


def forget_requests(state: ClusterState) -> None:
    """Drop all but the newest requests. A repetition of a dropped request is not recognised."""
    requests = [source for source in state.sources if source.startswith("operator/")]
    for source in requests[: max(len(requests) - NUM_REQUESTS_MAX, 0)]:
        del state.sources[source]


def task_submitted(state: ClusterState, record: Record, body: r.TaskSubmitted) -> None:
    model = body.spec.model  # None: the ranks report the FLOP of an iteration (RankReady)
    state.tasks[record.seq] = Task(
        id=record.seq,
        spec=body.spec,
        weight=body.spec.weight,
        submitted_s=record.at_s,
        since_s=record.at_s,
        modelled=body.modelled,
        iteration_flops=iteration_flops(model) if model is not None else 0.0,
    )
    num_more = len([0 for one in state.tasks.values() if one.phase != "ended"]) - PLAN_ALONE_NUM
    wait_s = min(PLAN_WAIT_S_MAX, PLAN_WAIT_S_PER_TASK * num_more)
    if state.at_s >= state.plan_s + wait_s:
        state.replan = f"task {body.spec.name} submitted"
    elif PLAN not in state.deadlines:
        set_deadline(state, PLAN, wait_s)


def cancel_requested(
    state: ClusterState, record: Record, task: Task, body: r.TaskCancelRequested
) -> None:
    # While healing is paused, a failed task is not ended, so it can still be cancelled.
    if not task.ending or (state.held and task.ending == "failed"):
        before = f"; it had failed: {task.why}" if task.ending else ""
        task.ending, task.withheld = "cancelled", ""
        task.why = (f"cancelled: {body.reason}" if body.reason else "cancelled") + before
        task.since_s = record.at_s


def weight_set(state: ClusterState, record: Record, task: Task, body: r.TaskWeightSet) -> None:
    usable = 1 / WEIGHT_RATIO_MAX <= body.weight <= WEIGHT_RATIO_MAX
    if usable and task.weight != body.weight:
        task.weight = body.weight
        state.replan = f"task {task.spec.name} has weight {body.weight:g}"


def healing_frozen(state: ClusterState, record: Record, body: r.HealingFrozen) -> None:
    state.frozen = body.reason or "no reason given"
    void_transitions(state)


def healing_resumed(state: ClusterState, record: Record, body: r.HealingResumed) -> None:
    if state.frozen:
        state.frozen = ""
        healing_active_again(state)


def healing_active_again(state: ClusterState) -> None:
    """Healing is active again: replan, and clear suppressed orders."""
    for task in state.tasks.values():
        task.withheld = ""
    state.replan = "healing resumed"


def fault_requested(state: ClusterState, record: Record, body: r.FaultRequested) -> None:
    """Mark the target, so that the fault does not count for the MTBF."""
    order = inject_fault(state, body)
    if order is not None:
        node, task = state.nodes[order.nodes[0]], state.tasks.get(order.task)
        if order.what == "node":
            node.fault_injected_s = record.at_s
        elif task is not None:
            task.ranks[order.rank].fault_injected_s = record.at_s


def incident_acknowledged(
    state: ClusterState, record: Record, body: r.IncidentAcknowledged
) -> None:
    one = state.incidents.get(body.of)
    if one is not None:
        one.acknowledged_by, one.acknowledged_why = body.who or "operator", body.reason


def person_notified(state: ClusterState, record: Record, body: r.PersonNotified) -> None:
    state.notified = [*(key for key in state.notified if key not in body.over), *body.opened]


def node_drained(state: ClusterState, record: Record, node: Node, body: r.NodeDrained) -> None:
    if not node.drained:
        state.replan = f"node {node.name} drained"
        node.drained, node.drain_reason = True, body.reason
    if body.down and node.unreachable:
        node.down_seq = record.seq


def node_undrained(state: ClusterState, record: Record, node: Node, body: r.NodeUndrained) -> None:
    if node.drained:
        node.drained, node.drain_reason = False, ""
        state.replan = f"node {node.name} undrained"
