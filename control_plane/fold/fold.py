"""The fold: apply one record to the state.

A report about an unknown task or rank, or of an old attempt or generation, changes nothing. The
fold never plans or gives orders. It marks in the state (a fault, a timed-out rank, an outdated
plan) what `decide` acts upon.
"""

from collections.abc import Callable
from typing import Any

from ...events.errors import NewerLog
from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.codec import UnknownBody
from ...events.records.envelope import Record
from ...events.words import files_in_words
from ..incidents.node_incidents import update_undecided
from ..state.cluster import DECIDER_VERSION, NUM_OUTAGES_MAX, ClusterState, live_tasks
from ..state.members import current_member
from ..throughput.transition_cost import observe_time, update_mtbf, void_transitions
from . import (
    checkpoints,
    decisions,
    generations,
    hangs,
    losses,
    node_health,
    nodes,
    operator_requests,
    probes,
    progress,
    ranks,
    stragglers,
    work,
)
from .deadlines import deadline_reached
from .edits import find_rank, restart_deadlines, update_hang_deadline

_PLANNED_BY = (
    "mtbf_gpu_s",
    "mtbf_faults",
    "transition_s",
    "reshape_s",
    "gain_min",
    "moves_max",
    "quotas",
    "floor",
    "alpha",
    "hot_spare",
    "repair_s",
)
"""Policy fields that a plan depends on."""


def fold(state: ClusterState, record: Record) -> None:
    """Apply one record to `state` in place. Raises NewerLog for a record without which it would
    be wrong, and that only a later version can apply."""
    observe_time(state, record)
    state.seq, state.epoch, state.at_s = record.seq, record.epoch, record.at_s
    _remember_source(state, record)
    HANDLERS[type(record.body)](state, record, record.body)


def _remember_source(state: ClusterState, record: Record) -> None:
    """Remember the number of the source's last report, to recognise repetitions."""
    last = state.sources.get(record.source, 0)
    if record.source_seq > last:
        state.sources[record.source] = record.source_seq
        if not last and record.source.startswith("operator/"):
            operator_requests.forget_requests(state)


def _recorded(state: ClusterState, record: Record, body: t.Body) -> None:
    """No effect on the state."""


def _unknown(state: ClusterState, record: Record, body: UnknownBody) -> None:
    """An agent may be newer than the leader: of its report the leader has seen nothing either."""
    is_unseen = record.source_seq and state.heart <= DECIDER_VERSION
    if not (body.ignorable or is_unseen):
        raise NewerLog(
            f"seq {record.seq}: {body.kind} (version {body.version}) needs Unicron "
            f"{state.code or 'of a later version'}, decider version {state.heart}; this one has "
            f"{DECIDER_VERSION}",
            "read this log with that version, or a later one",
        )


# --- reports of the leader ---
def _epoch_started(state: ClusterState, record: Record, body: r.EpochStarted) -> None:
    state.nonce, state.heart, state.code = body.nonce, body.heart, body.code
    restart_deadlines(state)
    for source in list(state.sources):
        if source.startswith("leader/") and source != record.source:
            del state.sources[source]


def _policy_set(state: ClusterState, record: Record, body: r.PolicySet) -> None:
    old, held, state.policy = state.policy, state.held, body.policy
    node_health.update_unhealthy_slots(state)
    update_undecided(state)
    if live_tasks(state) and any(
        getattr(old, name) != getattr(body.policy, name) for name in _PLANNED_BY
    ):
        state.replan = "the policy was set"
    state.mtbf_gpu_s = 0.0  # the prior may have changed
    update_mtbf(state)
    if held and not state.held:
        operator_requests.healing_active_again(state)
    for task in live_tasks(state):
        update_hang_deadline(state, task, restart=True)
    void_transitions(state)


def _outage_ended(state: ClusterState, record: Record, body: r.OutageEnded) -> None:
    state.outages = [*state.outages, body][-NUM_OUTAGES_MAX:]


def _room_changed(state: ClusterState, record: Record, body: r.RoomChanged) -> None:
    if not body.is_full:
        state.no_room = ""
        state.replan = "the disk of the log has room again"
    else:
        few = body.free_files
        has = f"{body.free_bytes >> 20} MiB free" if few is None else files_in_words(few)
        state.no_room = f"no room for the log: {body.folder} has {has}"
        void_transitions(state)


# --- the task, process or node that a record is about; empty: there is none, so nothing changes ---
Handler = Callable[[ClusterState, Record, Any], None]


def _task(state: ClusterState, body: Any) -> tuple[Any, ...]:
    task = state.tasks.get(body.task)
    return (task,) if task is not None else ()


def _live_task(state: ClusterState, body: Any) -> tuple[Any, ...]:
    task = state.tasks.get(body.task)
    return (task,) if task is not None and task.phase != "ended" else ()


def _process(state: ClusterState, body: Any) -> tuple[Any, ...]:
    """The task, and its process of this attempt."""
    task = state.tasks.get(body.task)
    rank = find_rank(task, body.rank, body.attempt)
    return (task, rank) if rank is not None else ()


def _member(state: ClusterState, body: Any) -> tuple[Any, ...]:
    """The task, and its member of the current generation."""
    task = state.tasks.get(body.task)
    rank = current_member(task, body.rank, body.attempt, body.generation)
    return (task, rank) if rank is not None else ()


def _node(state: ClusterState, body: Any) -> tuple[Any, ...]:
    """The node; in this incarnation, if the record has one."""
    node = state.nodes.get(body.node)
    if node is None or getattr(body, "incarnation", node.incarnation) != node.incarnation:
        return ()
    return (node,)


def _of(
    find: Callable[[ClusterState, Any], tuple[Any, ...]], handlers: dict[type[t.Body], Any]
) -> dict[type[t.Body], Handler]:
    """The handlers, called with what `find` returns, unless that is empty."""

    def of(handler: Any) -> Handler:
        def handle(state: ClusterState, record: Record, body: Any) -> None:
            if found := find(state, body):
                handler(state, record, *found, body)

        return handle

    return {kind: of(handler) for kind, handler in handlers.items()}


HANDLERS: dict[type[t.Body], Handler] = {
    r.EpochStarted: _epoch_started,
    r.PolicySet: _policy_set,
    r.DeadlineReached: deadline_reached,
    r.OutageEnded: _outage_ended,
    r.RoomChanged: _room_changed,
    r.NodeJoined: nodes.node_joined,
    r.OrderRefused: nodes.order_refused,
    r.ReportsLost: nodes.reports_lost,
    r.NodeProbed: probes.node_probed,
    r.MemoryCheckpointStored: checkpoints.checkpoint_stored,
    r.RankReportsDropped: _recorded,
    r.LossFiniteAgain: _recorded,
    r.TaskSubmitted: operator_requests.task_submitted,
    r.HealingFrozen: operator_requests.healing_frozen,
    r.HealingResumed: operator_requests.healing_resumed,
    r.IncidentAcknowledged: operator_requests.incident_acknowledged,
    r.PersonNotified: operator_requests.person_notified,
    r.FaultRequested: operator_requests.fault_requested,
    r.TokenChanged: _recorded,
    r.DeadLettersHandled: _recorded,
    d.IncidentOpened: decisions.incident_opened,
    d.IncidentEscalated: decisions.incident_escalated,
    d.IncidentRecovering: decisions.incident_recovering,
    d.IncidentClosed: decisions.incident_closed,
    d.PlanChosen: decisions.plan_chosen,
    d.StragglerCostEstimated: stragglers.straggler_cost_estimated,
    o.StartRank: decisions.start_ordered,
    o.InjectFault: _recorded,
    UnknownBody: _unknown,
    **_of(
        _node,
        {
            r.NodeLeft: nodes.node_left,
            r.AgentRestarting: nodes.agent_restarting,
            r.AgentRestarted: nodes.agent_restarted,
            r.NodeUnreachable: nodes.node_unreachable,
            r.NodeReachable: nodes.node_reachable,
            r.DeviceErred: node_health.device_erred,
            r.HealthChanged: node_health.health_changed,
            r.MemoryCheckpointsLost: checkpoints.checkpoints_lost,
            r.NodeDrained: operator_requests.node_drained,
            r.NodeUndrained: operator_requests.node_undrained,
            r.QuarantineLifted: node_health.quarantine_lifted,
            d.NodeQuarantined: node_health.node_quarantined,
            o.ProbeNode: probes.probe_ordered,
        },
    ),
    **_of(
        _process,
        {
            r.RankStarted: ranks.rank_started,
            r.RankAdopted: ranks.rank_adopted,
            r.RankReady: ranks.rank_ready,
            r.RankErrored: ranks.rank_errored,
            r.RankSuspended: ranks.rank_suspended,
            r.RankContinued: ranks.rank_continued,
            r.CheckpointFailed: checkpoints.save_failed,
            r.InMemoryRecoveryDeclined: ranks.recovery_declined,
            r.IterationsLogged: progress.iterations_logged,
            r.StacksKept: hangs.stacks_kept,
            r.RankWorked: work.rank_worked,
        },
    ),
    **_of(
        _member,
        {
            r.StepTimeChanged: stragglers.step_time_changed,
            r.CollectiveFailed: generations.collective_failed,
            r.Quiesced: generations.quiesced,
            r.Reconfigured: generations.reconfigured,
            r.ReconfigureFailed: generations.reconfigure_failed,
            r.RankFinished: generations.rank_finished,
        },
    ),
    **_of(
        _task,
        {
            r.RankExited: ranks.rank_exited,
            r.RankStalled: hangs.rank_stalled,
            r.RankUnstalled: hangs.rank_unstalled,
            r.CheckpointPublished: checkpoints.checkpoint_published,
            d.TaskWaiting: decisions.task_waiting,
            d.OrderSuppressed: decisions.order_suppressed,
            o.StopRank: decisions.stop_ordered,
            o.Quiesce: decisions.quiesce_ordered,
            o.Reconfigure: decisions.reconfigure_ordered,
            o.Resume: decisions.resume_ordered,
            o.PublishCheckpoint: checkpoints.publish_ordered,
            o.DropMemoryCheckpoints: checkpoints.drop_ordered,
        },
    ),
    **_of(
        _live_task,
        {
            r.TaskProgressed: progress.progressed,
            r.LossNotFinite: progress.loss_not_finite,
            r.CheckpointSaved: checkpoints.checkpoint_saved,
            r.TaskCancelRequested: operator_requests.cancel_requested,
            r.TaskWeightSet: operator_requests.weight_set,
            r.TaskOutputSet: checkpoints.output_set,
            d.ThroughputSet: decisions.throughput_set,
            d.LossSpiked: losses.loss_spiked,
            d.TaskPlaced: decisions.task_placed,
            d.ExperimentBegun: decisions.experiment_begun,
            d.SlotsJudged: decisions.slots_judged,
            d.TaskEnded: decisions.task_ended,
            o.SetCheckpointStores: checkpoints.stores_ordered,
        },
    ),
}
