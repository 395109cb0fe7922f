"""The fold of deadlines: mark what timed out."""

from collections.abc import Callable

from ...events.records.envelope import Record
from ...events.records.reports import DeadlineReached
from ...events.records.statuses import TASK_HANG
from ..incidents.recovery import RECOVERING
from ..incidents.severity import network_status
from ..state import limits
from ..state.cluster import ClusterState
from ..state.limits import Limit
from ..state.members import count_outstanding, has_settled, is_unreachable, unanswered
from ..state.task import Rank, Task
from .edits import (
    EXPIRED,
    LOSSES,
    PLAN,
    STOPPED,
    find_rank,
    forget_tasks,
    record_fault,
    record_generation_failure,
    running_deadlines,
    schedule_estimate,
    set_deadline,
)
from .hangs import command_hang_timed_out, hang_timed_out
from .node_health import node_deadline_reached
from .pauses import RESTART
from .probes import probe_due
from .ranks import decline_recovery, is_recovery_unproven
from .work import IDLE, acted, why_late

UNREACHABLE = "its node was unreachable"
"""Why a limit has acted on members that nobody hears."""


def _late_rank(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """A start takes longer than `start_s_max`. A script prepares for as long as it likes: its
    process is only told about, and the task counts as a plain command until one adopts."""
    rank = find_rank(task, rest[0], rest[1])
    if (
        rank is not None
        and task.heals_in_memory
        and task.spec.command
        and (rank.state == "started" or is_unreachable(state, rank))
    ):
        if rank.state == "ordered":  # whether it runs is not known
            set_deadline(
                state, f"start/{task.id}/{rank.rank}/{rank.attempt}", state.policy.start_s_max
            )
        elif is_recovery_unproven(task) and not task.adopted:
            decline_recovery(
                state,
                record,
                task,
                "no process has adopted Unicron within "
                f"{state.policy.start_s_max:g} s (start_s_max)",
            )
    elif rank is not None and not rank.timeout_reason:
        rank.timeout_reason = "did not get ready in time"
        why = f"rank {rank.rank} {rank.timeout_reason}"
        why += why_late(state, limits.of(state.policy, "start_s_max"), [rank])
        record_fault(task, record, [rank], TASK_HANG, why)


def _late_exit(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    rank = find_rank(task, rest[0], rest[1])
    if rank is not None:
        limit = limits.of(state.policy, "stop_s_max")
        rank.timeout_reason = rank.timeout_reason or f"did not end in time{acted(state, limit)}"


def _late_stopped(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """A rank is stopped for too long. If its node is unreachable, wait until the node returns."""
    rank = find_rank(task, rest[0], rest[1])
    node = state.nodes.get(rank.slot.node) if rank is not None else None
    if rank is None or rank.timeout_reason or task.ending or node is None or node.unreachable:
        return
    rank.timeout_reason = STOPPED
    if rank.state != "finished" and not rank.error_seq:  # otherwise only its exit is awaited
        record_fault(
            task,
            record,
            [rank],
            TASK_HANG,
            f"rank {rank.rank} on {node.name} {STOPPED}"
            + acted(state, limits.of(state.policy, "stopped_s_max")),
            evidence=(rank.suspended_seq,),
            since_s=rank.suspended_s,
            own=False,
        )


def _late_quiesce(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    late = _time_out_unanswered(state, record, task, limits.to_leave(state.policy, task.mode))
    waited = task.mode == "now" or not late  # at a boundary: not while others are late
    if (
        task.saver >= 0
        and waited
        and not task.is_save_repeated
        and all(rank.rank != task.saver for rank in late)
    ):
        task.save_late = task.generation


def _late_silent(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    limit = limits.of(state.policy, "evidence_s_max")
    if task.phase == "reconfiguring":
        _fail_generation(state, record, task, limit, UNREACHABLE)
    else:
        _time_out_unanswered(state, record, task, limit, UNREACHABLE)


def _time_out_unanswered(
    state: ClusterState, record: Record, task: Task, limit: Limit, what: str = IDLE
) -> list[Rank]:
    """Mark members that have not reported leaving the generation, and return them. `what`: as in
    `why_late`."""
    late = [rank for rank in unanswered(task) if not rank.stopping]
    for rank in late:
        rank.timeout_reason = "did not quiesce in time"
    if late:
        why = f"{_names(late)} did not quiesce in time{why_late(state, limit, late, what)}"
        record_fault(task, record, late, TASK_HANG, why)
    return late


def _late_reconfigure(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    _fail_generation(state, record, task, limits.of(state.policy, "reconfigure_s_max"))


def _fail_generation(
    state: ClusterState, record: Record, task: Task, limit: Limit, what: str = IDLE
) -> None:
    late = [rank for rank in task.living_members() if not has_settled(task, rank)]
    record_generation_failure(
        task,
        record,
        late,
        network_status("timeout"),
        f"{_names(late)} did not come up in generation {task.generation} in time"
        + why_late(state, limit, late, what),
    )


def _late_evidence(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    failed = [rank for rank in task.living_members() if rank.failed == task.generation]
    if failed and not task.faults and len(task.living_members()) == len(task.members):
        task.uncaused_generation = task.generation
        record_fault(
            task,
            record,
            failed,
            failed[0].failed_status,
            f"a collective failed under {_names(failed)}, no root cause in "
            f"{state.policy.evidence_s_max:g} s",
            evidence=tuple(x.failed_seq for x in failed),
            second_hand=True,
        )


def _late_finish(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    limit = limits.of(state.policy, "boundary_s_max")
    for rank in task.living_members():
        if not rank.stopping:
            why = why_late(state, limit, [rank])
            rank.timeout_reason = f"did not end after the task was done{why}"


def _pause_over(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The rank may start again, which decide orders."""


def _save_again(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The save before the task leaves its slots failed: decide orders it again."""
    if task.is_save_repeated:
        task.savers = []


def _publish_again(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The pause after a refused publication is over: without its deadline, decide orders it."""


def _stayed_away(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The fault has not come back for long enough: without the deadline, decide closes it."""


def _names(ranks: list[Rank]) -> str:
    numbers = " ".join(str(rank.rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


_LATE: dict[str, Callable[[ClusterState, Record, Task, list[int]], None]] = {
    "start": _late_rank,
    "error": _late_exit,
    "stop": _late_exit,
    "stopped": _late_stopped,
    "quiesce": _late_quiesce,
    "hang": hang_timed_out,
    "printed": command_hang_timed_out,
    "silent": _late_silent,
    "reconfigure": _late_reconfigure,
    "evidence": _late_evidence,
    "finish": _late_finish,
    RESTART: _pause_over,
    "save": _save_again,
    "publish": _publish_again,
    RECOVERING: _stayed_away,
}


def deadline_reached(state: ClusterState, record: Record, body: DeadlineReached) -> None:
    """Handle the report of a passed deadline. A stale or early report has no effect."""
    if body.deadline == EXPIRED:
        forget_tasks(state)
    deadline = running_deadlines(state).get(body.deadline)
    if deadline is None or record.at_s < deadline.due_s:
        return
    del state.deadlines[body.deadline]
    what, _, of = body.deadline.partition("/")
    if what in (PLAN, LOSSES):
        state.replan = state.replan or "tasks were submitted"
    elif what == "price":
        schedule_estimate(state, of)
    elif what == "probe":
        if (node := state.nodes.get(of)) is not None:
            probe_due(state, record, node)
    elif what not in _LATE:
        node_deadline_reached(state, what, of)
    else:
        number, *rest = map(int, of.split("/"))
        if (task := state.tasks.get(number)) is not None:
            _LATE[what](state, record, task, rest)
            count_outstanding(task)
