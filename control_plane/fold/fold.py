"""The fold: apply one record to the state.

Total: a report about an unknown task or rank, or of an old attempt or generation, changes nothing.
The fold never plans or orders. It leaves conditions (a fault, a timed-out rank, an outdated plan)
that `decide` acts upon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.codec import UnknownBody, decode_record
from ...events.records.envelope import Record
from ...events.records.orders import InjectFault, Reconfigure
from ...events.records.statuses import EXITED_ABNORMALLY
from ...events.records.types import first_store_number
from ..incidents.node_incidents import update_undecided
from ..incidents.severity import OF_DEVICES, TABLE, last_line, network_status
from ..state.cluster import ClusterState, live_tasks
from ..state.members import (
    awaited,
    count_outstanding,
    current_member,
    is_complete,
    is_representative,
    take_position,
)
from ..state.node import NUM_SLOTS_MAX, Node
from ..state.task import Rank, Task
from ..throughput.calibration import keep_times
from ..throughput.transition_cost import (
    observe_time,
    transition_stepped,
    update_mtbf,
    void_transitions,
)
from .checkpoints import COPIES
from .deadlines import deadline_reached
from .decisions import DECISIONS
from .edits import (
    add_evidence,
    add_work,
    clear_deadline,
    end_pause,
    record_fault,
    record_generation_failure,
    record_origin,
    remove_node,
    remove_process,
    schedule_estimate,
    set_deadline,
    set_health,
    set_resume_deadline,
    update_unreachable,
    update_unreachable_deadline,
)
from .hangs import STALLS, iterations_passed
from .node_health import HEALTH, count_slot_fault, inherit, update_unhealthy_slots
from .operator_requests import REQUESTS, forget_requests, healing_active_again
from .progress import LOGGED
from .ranks import PROCESSES
from .stragglers import PACES, restart_stragglers

_PLANNED_BY = ("mtbf_gpu_s", "mtbf_faults", "transition_s", "reshape_s", "gain_min", "moves_max",
               "quotas", "floor", "alpha", "hot_spare", "repair_s")
"""Policy fields that a plan depends on."""


def fold(state: ClusterState, record: Record) -> None:
    """Apply one record to `state` in place. Never raises."""
    _observe_time(state, record)
    _remember_source(state, record)
    HANDLERS[type(record.body)](state, record, record.body)


def _observe_time(state: ClusterState, record: Record) -> None:
    observe_time(state, record)
    state.seq, state.epoch, state.at_s = record.seq, record.epoch, record.at_s


def _remember_source(state: ClusterState, record: Record) -> None:
    """Remember the last report of the source, to recognise repetitions."""
    last = state.sources.get(record.source, 0)
    if record.source_seq > last:
        state.sources[record.source] = record.source_seq
        if not last and record.source.startswith("operator/"):
            forget_requests(state)


def _recorded(state: ClusterState, record: Record, body: t.Body) -> None:
    """No effect on the state."""


# --- reports of the leader ---
def _epoch_started(state: ClusterState, record: Record, body: r.EpochStarted) -> None:
    state.nonce, state.heart = body.nonce, body.heart
    for name, deadline in state.deadlines.items():
        if not name.startswith("quarantine/"):  # it also runs while no leader is active
            deadline.due_s = record.at_s + deadline.length_s
    for source in list(state.sources):
        if source.startswith("leader/") and source != record.source:
            del state.sources[source]


def _policy_set(state: ClusterState, record: Record, body: r.PolicySet) -> None:
    old, held, state.policy = state.policy, state.held, body.policy
    update_unhealthy_slots(state)
    update_undecided(state)
    if live_tasks(state) and any(getattr(old, name) != getattr(body.policy, name)
                                 for name in _PLANNED_BY):
        state.replan = "the policy was set"
    state.mtbf_gpu_s = 0.0  # the prior may have changed
    update_mtbf(state)
    if held and not state.held:
        healing_active_again(state)
    void_transitions(state)


def _node_unreachable(state: ClusterState, record: Record, body: r.NodeUnreachable) -> None:
    node = state.nodes.get(body.node)
    if node is None or node.incarnation != body.incarnation or node.health != "healthy":
        return
    set_health(state, node, "unreachable")
    node.unreachable_seq = record.seq
    set_deadline(state, f"replace/{node.name}", state.policy.replace_after_s)
    for task in state.tasks.values():
        update_unreachable_deadline(state, task)


def _node_reachable(state: ClusterState, record: Record, body: r.NodeReachable) -> None:
    node = state.nodes.get(body.node)
    if node is None or node.incarnation != body.incarnation:
        return
    if node.unreachable:
        set_health(state, node, "healthy")
        node.replace = False
        clear_deadline(state, f"replace/{node.name}")
        for task in state.tasks.values():
            update_unreachable_deadline(state, task)
            for rank in task.ranks.values():
                if rank.is_stopped and rank.slot.node == node.name:
                    set_resume_deadline(state, task, rank)
        state.replan = f"node {node.name} is back"


# --- reports of an agent about its node ---
def _node_joined(state: ClusterState, record: Record, body: r.NodeJoined) -> None:
    old = state.nodes.get(body.node)
    if old is not None and body.incarnation <= old.incarnation:
        return
    why = f"the agent of {body.node} started again"
    if old is not None:
        remove_node(state, record, old, why)
    state.nodes[body.node] = node = Node(
        name=body.node, incarnation=body.incarnation, host=body.host, pid=body.pid,
        num_slots=min(max(body.num_slots, 0), NUM_SLOTS_MAX), accelerator=body.accelerator,
        since_s=record.at_s, keeper=body.keeper, keeper_start=first_store_number(body.incarnation),
        labels=body.labels,
        drained=old is not None and old.drained,
        drain_reason=old.drain_reason if old is not None else "",
    )
    if old is not None:
        inherit(state, old, node)
    update_unhealthy_slots(state)
    clear_deadline(state, f"replace/{body.node}")
    schedule_estimate(state, body.node)
    _forget_incarnations(state, body.node, old.incarnation if old is not None else 0)
    update_unreachable(state, node)
    update_undecided(state)
    state.num_slots_max = max(state.num_slots_max, sum(
        one.num_slots for one in state.nodes.values() if one.health == "healthy"))
    state.replan = f"node {body.node} joined"


def _forget_incarnations(state: ClusterState, name: str, oldest: int) -> None:
    """Drop sources older than `oldest`: only the previous agent may still have spooled reports."""
    own = f"{name}/"
    for source in [source for source in state.sources if source.startswith(own)] if oldest else ():
        node, _, incarnation = source.rpartition("/")
        if node == name and incarnation.isdecimal() and int(incarnation) < oldest:
            del state.sources[source]


def _node_left(state: ClusterState, record: Record, body: r.NodeLeft) -> None:
    node = state.nodes.get(body.node)
    if node is None or node.incarnation != body.incarnation:
        return
    remove_node(state, record, node, "")
    set_health(state, node, "left")
    update_unhealthy_slots(state)
    clear_deadline(state, f"replace/{node.name}")
    state.replan = f"node {node.name} left"


def _reports_lost(state: ClusterState, record: Record, body: r.ReportsLost) -> None:
    state.reports_lost += max(body.num_lost, 0)


def _order_refused(state: ClusterState, record: Record, body: r.OrderRefused) -> None:
    for task in state.tasks.values():
        for rank in list(task.ranks.values()):
            if rank.start_order == body.order and rank.state == "ordered":
                remove_process(state, task, rank)
                record_fault(task, record, [rank], EXITED_ABNORMALLY,
                      f"{body.node} refused to start rank {rank.rank}: {body.why}")
                return
        for rank in [*task.ranks.values(), *task.orphans]:
            if body.order in rank.stop_orders:
                # No such process: its StartRank never reached the node.
                remove_process(state, task, rank)
                return
        refused = task.publishing.pop(body.order, None)
        if refused is not None:
            state.orders.pop(body.order, None)
            if refused.final and not task.final_known:
                task.ending = task.ending or "failed"
                task.why = f"the final checkpoint could not be published: {body.why}"
            return


# --- reports of a rank about its generation ---
def _collective_failed(state: ClusterState, record: Record, body: r.CollectiveFailed) -> None:
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if task is None or rank is None or rank.failed == task.generation:
        return
    if task.phase == "reconfiguring":
        record_generation_failure(task, record, [rank], network_status(body.error),
                f"rank {rank.rank} could not settle in generation {task.generation}: {body.error}")
        return
    rank.failed, rank.failed_seq = task.generation, record.seq
    own = body.status in OF_DEVICES
    rank.failed_status = (body.status if own or TABLE.get(body.status) == "SEV3"
                          else network_status(body.error))
    add_evidence(state.incidents.get(task.incident), record)
    if own:
        _device_failed(task, record, rank, body.error)
    if task.failed_s < 0:
        task.failed_s = record.at_s
        if len(task.living_members()) == len(task.members):
            set_deadline(
                state, f"evidence/{task.id}/{task.generation}", state.policy.evidence_s_max
            )


def _device_failed(task: Task, record: Record, rank: Rank, error: str) -> None:
    """A device error inside a collective is the rank's own fault: its process is to be restarted.

    If the others do not hold the complete state, decide first reattempts in place.
    """
    record_fault(task, record, [rank], rank.failed_status, f"rank {rank.rank}: {last_line(error)}")
    if is_complete(task, [other for other in task.living_members() if other.is_healthy and (
            other is not rank and not (
                other.failed == task.generation and other.failed_status in OF_DEVICES))]):
        rank.timeout_reason = f"has {rank.failed_status}"


def _quiesced(state: ClusterState, record: Record, body: r.Quiesced) -> None:
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if task is not None and rank is not None:
        if task.phase == "quiescing" and awaited(task):
            task.num_outstanding -= rank.quiesced != task.generation
        rank.quiesced, rank.step_version = body.generation, body.step_version
        update_unreachable_deadline(state, task)


def _reconfigured(state: ClusterState, record: Record, body: r.Reconfigured) -> None:
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if task is None or rank is None or rank.reconfigured == task.generation:
        return
    if task.phase != "reconfiguring":
        return
    task.num_outstanding -= bool(awaited(task))
    rank.reconfigured, rank.has_state = task.generation, True
    take_position(task, rank, body.step_version)
    if rank.joined_iteration < 0:
        rank.joined_iteration = max(body.step_version, task.max_iteration)
    task.settled = body.step_version
    update_unreachable_deadline(state, task)
    incident = state.incidents.get(task.incident)
    if incident is None:
        return
    may_be_read = body.origin in ("", "checkpoint")
    order = state.orders.get(task.reconfigure_order) if may_be_read else None
    rebuild = decode_record(order).body if order is not None else None
    record_origin(incident, body, rebuild.checkpoint if isinstance(rebuild, Reconfigure) else "",
                rank.slot.node)
    if incident.down_since_s >= 0 and is_representative(task, rank):
        incident.kept += len(body.kept_micro_batches)
        incident.dealt += len(body.reassigned_micro_batches)


def _reconfigure_failed(state: ClusterState, record: Record, body: r.ReconfigureFailed) -> None:
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if task is not None and rank is not None and task.phase == "reconfiguring":
        record_generation_failure(task, record, [rank], network_status(body.error),
                f"rank {rank.rank} did not come up in generation {task.generation}: {body.error}")


def _progressed(state: ClusterState, record: Record, body: r.TaskProgressed) -> None:
    task = state.tasks.get(body.task)
    if task is None or task.phase == "ended" or body.generation != task.generation:
        return
    if not body.losses or task.phase == "reconfiguring":
        return
    task.loss, task.rate_flops, task.micro_batches = (
        body.losses[-1], body.rate_flops, body.micro_batches)
    keep_times(state, task, body)
    if body.step_s:
        task.step_s = body.step_s[-1]
    _stepped_to(state, task, body.first_iteration + len(body.losses))
    restart_stragglers(state, record, task)


def _loss_not_finite(state: ClusterState, record: Record, body: r.LossNotFinite) -> None:
    """The iteration counts as finished, although its loss is not finite."""
    task = state.tasks.get(body.task)
    if task is None or task.phase == "ended" or body.generation != task.generation:
        return
    if task.phase != "reconfiguring":
        task.loss = None
        _stepped_to(state, task, body.iteration + 1)


def _stepped_to(state: ClusterState, task: Task, iteration: int) -> None:
    add_work(state, task, iteration)
    iterations_passed(state, task, iteration)
    task.progressed_s = state.at_s
    task.iteration = max(task.iteration, iteration)
    task.max_iteration = max(task.max_iteration, iteration)
    living = task.living_members()
    for rank in living:
        if iteration - rank.joined_iteration >= state.policy.restart_iterations:
            task.restarts.pop(rank.rank, None)
            was = task.disabled_slots.pop(rank.rank, None)
            if was is not None and was != rank.slot:
                count_slot_fault(state, task, was, rank.rank)
            task.reattempts = 0
    # A late report of iterations before the fault does not end the interruption.
    whole = len(living) == len(task.members) and not any(
        rank.error_seq or rank.timeout_reason for rank in living)
    # An iteration counts while the generation quiesces at its boundary for a new member.
    at_boundary = task.phase == "quiescing" and task.mode == "boundary"
    if iteration > task.settled and (task.phase == "training" or at_boundary) and whole:
        task.stepped = task.generation
        end_pause(state, task)
        transition_stepped(state, task, iteration)


def _rank_finished(state: ClusterState, record: Record, body: r.RankFinished) -> None:
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if task is None or rank is None or rank.state == "finished":
        return
    rank.state = "finished"
    if not task.finished:
        set_deadline(state, f"finish/{task.id}/{task.generation}", state.policy.boundary_s_max)
    task.finished.append(rank.rank)
    count_outstanding(task)
    task.forward_calls += body.forward_calls
    task.iteration = max(task.iteration, body.step_version)


HANDLERS: dict[type[t.Body], Callable[[ClusterState, Record, Any], None]] = {
    r.EpochStarted: _epoch_started, r.PolicySet: _policy_set,
    r.DeadlineReached: deadline_reached, r.NodeUnreachable: _node_unreachable,
    r.NodeReachable: _node_reachable, r.NodeJoined: _node_joined,
    r.NodeLeft: _node_left, r.ReportsLost: _reports_lost, r.OrderRefused: _order_refused,
    r.CollectiveFailed: _collective_failed, r.Quiesced: _quiesced,
    r.Reconfigured: _reconfigured, r.ReconfigureFailed: _reconfigure_failed,
    r.TaskProgressed: _progressed, r.LossNotFinite: _loss_not_finite,
    r.RankFinished: _rank_finished, InjectFault: _recorded, UnknownBody: _recorded,
    **LOGGED, **PROCESSES, **STALLS, **PACES, **COPIES,
    **REQUESTS, **DECISIONS, **HEALTH,
}
