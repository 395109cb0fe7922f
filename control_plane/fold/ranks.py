"""The fold of one process: start, ready, stop, error, exit."""

from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.statuses import EXITED_ABNORMALLY, OTHER_SOFTWARE
from ..incidents.severity import (
    CAN_PASS,
    KILLS,
    classified_status,
    exit_in_words,
    last_line,
    status_of,
)
from ..state.cluster import ClusterState
from ..state.members import awaited, count_outstanding, is_starting
from ..state.task import Rank, Task
from . import edits
from .pauses import pause_restart


def rank_started(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankStarted
) -> None:
    if rank.state != "ordered":
        return
    if not task.heals_in_memory and awaited(task) == "processes":
        task.num_outstanding -= is_starting(task, rank)
    rank.state = "started"
    rank.pid, rank.log_path = body.pid, body.log_path
    task.refused_starts.pop(rank.rank, None)
    state.orders.pop(rank.start_order, None)
    if not task.heals_in_memory:
        edits.clear_deadline(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")
        _round_started(state, record, task)


def _round_started(state: ClusterState, record: Record, task: Task) -> None:
    """Of a command: the task trains when every seat has a process."""
    if all(
        (rank := task.ranks.get(seat.rank)) is not None
        and rank.state == "started"
        and rank.slot == seat.slot
        for seat in reversed(task.target)
    ):  # they start in order
        edits.set_phase(state, task, "training")
        edits.end_pause(state, task)


def rank_adopted(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankAdopted
) -> None:
    """The script adopts Unicron. If the task became a plain command because none of its processes
    had, it heals in memory after all."""
    if task.may_adopt and not (task.finished or task.ending):
        task.declined, task.logged = "", None
        task.stalls.clear()
        for one in task.ranks.values():
            edits.clear_deadline(state, f"printed/{task.id}/{one.rank}/{one.attempt}")
        edits.set_phase(state, task, "starting")
        count_outstanding(task)
    task.adopted = True


def rank_ready(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankReady
) -> None:
    if rank.state not in ("ordered", "started"):
        return
    if task.spec.command:
        rank_adopted(
            state,
            record,
            task,
            rank,
            r.RankAdopted(task=task.id, rank=rank.rank, attempt=rank.attempt),
        )  # an older agent does not say it
    if not task.heals_in_memory:
        rank.timeout_reason = "adopted Unicron, but another process of the task did not"
        count_outstanding(task)
        return
    if awaited(task) == "processes":
        task.num_outstanding -= is_starting(task, rank)
    rank.state, rank.endpoint, rank.work = "ready", body.endpoint, None
    task.iteration_flops, task.rounding_why = body.iteration_flops, body.rounding_why
    rank.protocol = body.protocol
    state.orders.pop(rank.start_order, None)
    edits.clear_deadline(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")
    _end_former_versions(task, rank)


def _end_former_versions(task: Task, new: Rank) -> None:
    """Processes that started before an upgrade cannot meet those that started after it, and would
    wait for them in vain: they start again, and the task goes on from its last copy."""
    # The others are of one version, so any of them tells whether `new` is of another: a task that
    # starts is not searched once for each of its ranks.
    other = next((rank for rank in task.ranks.values() if rank is not new and _meets(rank)), new)
    if other.protocol == new.protocol:
        return
    ready = [rank for rank in task.ranks.values() if _meets(rank)]
    newest = max(ready, key=lambda rank: rank.protocol)
    for rank in ready:
        if rank.protocol < newest.protocol:
            rank.timeout_reason = (
                f"runs a former version, which cannot train with that of rank {newest.rank}"
            )


def _meets(rank: Rank) -> bool:
    """Whether the process can be a member of the next generation."""
    return rank.state in ("ready", "member") and rank.is_healthy


def is_recovery_unproven(task: Task) -> bool:
    """Whether a command is to recover in memory, but no process has reported that it can."""
    return (
        bool(task.spec.command)
        and task.heals_in_memory
        and task.generation == 0
        and not any(rank.state == "ready" for rank in task.ranks.values())
    )


def decline_recovery(state: ClusterState, record: Record, task: Task, why: str) -> None:
    """Disable in-memory recovery. The processes continue; from now on they restart together."""
    task.declined, task.rounds = why, 1
    count_outstanding(task)
    for rank in task.ranks.values():
        if rank.state != "ordered":
            edits.clear_deadline(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")
    _round_started(state, record, task)


def recovery_declined(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.InMemoryRecoveryDeclined
) -> None:
    """Each process reports at its start that it declines; the first report counts."""
    rank_adopted(
        state, record, task, rank, r.RankAdopted(task=task.id, rank=rank.rank, attempt=rank.attempt)
    )
    if is_recovery_unproven(task):
        task.restarts_from_memory = body.from_memory
        decline_recovery(state, record, task, body.why)


def rank_errored(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankErrored
) -> None:
    if rank.error_seq or rank.state == "finished":
        return
    rank.error = classified_status(body.status, status_of(body.error))
    rank.error_text = body.text
    rank.error_seq = record.seq
    rank.second_hand = body.second_hand
    count_outstanding(task)
    if not rank.stopping and not task.ending:
        edits.set_deadline(
            state, f"error/{task.id}/{rank.rank}/{rank.attempt}", state.policy.stop_s_max
        )
        what = last_line(body.text) or body.error
        edits.record_fault(
            task,
            record,
            [rank],
            rank.error,
            f"rank {rank.rank}: {what}",
            ended=True,
            second_hand=body.second_hand,
            words=what,
            can_pass=body.can_pass or rank.error in CAN_PASS,
        )


def rank_exited(state: ClusterState, record: Record, task: Task, body: r.RankExited) -> None:
    orphan = edits.find_orphan(task, body.rank, body.attempt)
    if orphan is not None:
        edits.remove_process(state, task, orphan)
        return
    rank = edits.find_rank(task, body.rank, body.attempt)
    if rank is None:
        return
    member = any(m.rank == rank.rank and m.attempt == rank.attempt for m in task.members)
    edits.remove_process(state, task, rank)
    if is_recovery_unproven(task) and body.exit_code == 0 and not rank.stopping:
        decline_recovery(
            state,
            record,
            task,
            f"rank {rank.rank} ended "
            + ("before it was ready" if task.adopted else "without having adopted Unicron"),
        )
    if not task.heals_in_memory and body.exit_code == 0 and not rank.stopping:
        task.finished.append(rank.rank)
        return
    if rank.state == "finished" and task.phase == "starting" and not task.ending:
        edits.record_fault(
            task, record, [rank], OTHER_SOFTWARE, "all are done, but nobody saved the model"
        )
    if rank.state == "finished" or task.ending or rank.timeout_reason:
        return
    by_itself = body.exit_code is not None or body.signal not in KILLS or bool(body.status)
    if rank.stopping and not (by_itself and _fails_alike(task, body)):
        return
    if rank.error_seq and not (rank.second_hand and body.status and not body.second_hand):
        edits.add_evidence(state.incidents.get(task.incident), record)
    else:  # the exit has the cause
        edits.record_fault(
            task,
            record,
            [rank],
            classified_status(body.status, EXITED_ABNORMALLY),
            f"rank {rank.rank} on {rank.slot.node}: {exit_in_words(body)}",
            hurts=member or None,
            ended=True,
            second_hand=body.second_hand,
            own=by_itself,
            words=body.cause,
            can_pass=body.can_pass or body.status in CAN_PASS,
        )
    if by_itself and not body.second_hand:
        pause_restart(state, task, rank)


def _fails_alike(task: Task, body: r.RankExited) -> bool:
    """Whether a process that was to end with another one failed by itself in the same way: then the
    task fails on its slot, too."""
    series = task.failures
    return (
        bool(body.exit_code)
        and series is not None
        and series.status == classified_status(body.status, EXITED_ABNORMALLY)
        and not body.second_hand
    )


def rank_suspended(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankSuspended
) -> None:
    """Set a deadline, as peers wait for the process. A command gets none: a person stopped it."""
    if rank.is_stopped:
        return
    rank.suspended_s, rank.suspended_seq = record.at_s, record.seq
    if task.logged is not None:
        task.logged.disturbed = True
    edits.set_resume_deadline(state, task, rank)
    edits.update_hang_deadline(state, task, restart=True)


def rank_continued(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankContinued
) -> None:
    """The process runs again. If its timeout was not acted upon (healing was paused), cancel it."""
    if not rank.is_stopped:
        return
    rank.suspended_s, rank.suspended_seq = -1.0, 0
    edits.clear_deadline(state, f"stopped/{task.id}/{rank.rank}/{rank.attempt}")
    if rank.timeout_reason == edits.STOPPED and not rank.stopping:
        rank.timeout_reason = ""
        count_outstanding(task)
    edits.update_hang_deadline(state, task, restart=True)
