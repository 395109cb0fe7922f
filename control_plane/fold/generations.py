"""The fold of a generation's members: collectives, leaving it, coming up in it, finishing."""

from ...events.records import reports as r
from ...events.records.envelope import Record
from ..incidents.severity import OF_DEVICES, TABLE, last_line, network_status
from ..state.cluster import ClusterState
from ..state.members import (
    awaited,
    count_outstanding,
    is_complete,
    is_representative,
    take_position,
)
from ..state.task import Rank, Task
from . import edits


def collective_failed(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.CollectiveFailed
) -> None:
    if rank.failed == task.generation:
        return
    if task.phase == "reconfiguring":
        edits.record_generation_failure(
            task,
            record,
            [rank],
            network_status(body.error),
            f"rank {rank.rank} could not settle in generation {task.generation}: {body.error}",
        )
        return
    rank.failed, rank.failed_seq, rank.failed_peer = task.generation, record.seq, body.peer
    own = body.status in OF_DEVICES
    rank.failed_status = (
        body.status if own or TABLE.get(body.status) == "SEV3" else network_status(body.error)
    )
    edits.add_evidence(state.incidents.get(task.incident), record)
    if own:
        _device_failed(task, record, rank, body.error)
    if task.failed_s < 0:
        task.failed_s = record.at_s
        edits.update_hang_deadline(state, task)  # the failed collective is decided on instead
        if len(task.living_members()) == len(task.members):
            edits.set_deadline(
                state, f"evidence/{task.id}/{task.generation}", state.policy.evidence_s_max
            )


def _device_failed(task: Task, record: Record, rank: Rank, error: str) -> None:
    """A device error in a collective is the rank's own fault: mark its process for a restart. If
    the other members do not hold the complete state, decide first reattempts in place."""
    edits.record_fault(
        task, record, [rank], rank.failed_status, f"rank {rank.rank}: {last_line(error)}"
    )
    if is_complete(
        task,
        [
            other
            for other in task.living_members()
            if other.is_healthy
            and (
                other is not rank
                and not (other.failed == task.generation and other.failed_status in OF_DEVICES)
            )
        ],
    ):
        rank.timeout_reason = f"has {rank.failed_status}"


def quiesced(state: ClusterState, record: Record, task: Task, rank: Rank, body: r.Quiesced) -> None:
    if task.phase == "quiescing" and awaited(task):
        task.num_outstanding -= rank.quiesced != task.generation
    rank.quiesced, rank.step_version, rank.work = body.generation, body.step_version, None
    edits.update_unreachable_deadline(state, task)


def reconfigured(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.Reconfigured
) -> None:
    if rank.reconfigured == task.generation or task.phase != "reconfiguring":
        return
    task.num_outstanding -= bool(awaited(task))
    rank.reconfigured, rank.has_state, rank.work = task.generation, True, None
    take_position(task, rank, body.step_version)
    if rank.joined_iteration < 0:
        rank.joined_iteration = max(body.step_version, task.max_iteration)
        rank.joined = task.generation
    task.settled = body.step_version
    if rank.rank == task.members[0].rank:
        task.mirrored_params, task.mirrored_bytes = body.mirrored_params, body.mirrored_bytes
    if body.damaged:
        task.damaged = body.damaged
    edits.update_unreachable_deadline(state, task)
    incident = state.incidents.get(task.incident)
    if incident is None:
        return
    checkpoint = task.reconfigure_checkpoint if body.origin in ("", "checkpoint") else ""
    edits.record_origin(incident, body, checkpoint, rank.slot.node)
    if incident.down_since_s >= 0 and is_representative(task, rank):
        incident.kept += len(body.kept_micro_batches)
        incident.dealt += len(body.reassigned_micro_batches)


def reconfigure_failed(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.ReconfigureFailed
) -> None:
    if task.phase == "reconfiguring":
        edits.record_generation_failure(
            task,
            record,
            [rank],
            network_status(body.error),
            f"rank {rank.rank} did not come up in generation {task.generation}: {body.error}",
        )


def rank_finished(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankFinished
) -> None:
    if rank.state == "finished":
        return
    rank.state = "finished"
    if not task.finished:
        edits.set_deadline(
            state, f"finish/{task.id}/{task.generation}", state.policy.boundary_s_max
        )
    task.finished.append(rank.rank)
    count_outstanding(task)
    task.forward_calls += body.forward_calls
    task.iteration = max(task.iteration, body.step_version)
