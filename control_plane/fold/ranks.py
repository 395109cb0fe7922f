"""The fold of one process: start, ready, stop, error, exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.envelope import Record
from ...events.records.reports import InMemoryRecoveryDeclined
from ...events.records.statuses import EXITED_ABNORMALLY, OTHER_SOFTWARE
from ...events.records.types import Seat
from ..incidents.severity import exit_in_words, last_line, status_of, told_status
from ..state.cluster import ClusterState
from ..state.members import awaited, count_outstanding, is_coming
from ..state.task import Rank, Task
from .edits import (
    STOPPED,
    add_evidence,
    arm,
    await_continued,
    await_hang,
    disarm,
    drop_rank,
    fault,
    find,
    find_ghost,
    set_phase,
    stepped,
)


def _rank_started(state: ClusterState, record: Record, body: r.RankStarted) -> None:
    task = state.tasks.get(body.task)
    rank = find(task, body.rank, body.attempt)
    if task is None or rank is None or rank.state != "ordered":
        return
    if not task.heals_in_memory and awaited(task) == "processes":
        task.num_outstanding -= is_coming(task, rank)
    rank.state = "started"
    rank.pid, rank.log_path = body.pid, body.log_path
    state.orders.pop(rank.start_order, None)
    if not task.heals_in_memory:
        disarm(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")
        _round_started(state, record, task)


def _round_started(state: ClusterState, record: Record, task: Task) -> None:
    """Command tier: the task trains when every seat has a process."""
    if all(_runs(task, seat) for seat in reversed(task.target)):  # they start in order
        set_phase(state, task, "training")
        stepped(state, task)


def _runs(task: Task, seat: Seat) -> bool:
    """Whether the seat's process runs."""
    rank = task.ranks.get(seat.rank)
    return rank is not None and rank.state == "started" and rank.slot == seat.slot


def _rank_ready(state: ClusterState, record: Record, body: r.RankReady) -> None:
    task = state.tasks.get(body.task)
    rank = find(task, body.rank, body.attempt)
    if task is None or rank is None or rank.state not in ("ordered", "started"):
        return
    if not task.heals_in_memory:
        rank.overdue = "adopted Unicron too late"
        count_outstanding(task)
        return
    if awaited(task) == "processes":
        task.num_outstanding -= is_coming(task, rank)
    rank.state, rank.endpoint = "ready", body.endpoint
    task.iteration_flops = body.iteration_flops
    state.orders.pop(rank.start_order, None)
    disarm(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")


def unproved(task: Task) -> bool:
    """Whether a command is to recover in memory, but no process has reported that it can."""
    return bool(task.spec.command) and task.heals_in_memory and task.generation == 0 and not any(
        rank.state == "ready" for rank in task.ranks.values())


def declined(state: ClusterState, record: Record, task: Task, why: str) -> None:
    """Disable in-memory recovery: the processes continue, and restart together from now on."""
    task.declined, task.rounds = why, 1
    count_outstanding(task)
    for rank in task.ranks.values():
        if rank.state != "ordered":
            disarm(state, f"start/{task.id}/{rank.rank}/{rank.attempt}")
    _round_started(state, record, task)


def _recovery_declined(state: ClusterState, record: Record, body: InMemoryRecoveryDeclined) -> None:
    """Each process reports it at its start; the first report counts."""
    task = state.tasks.get(body.task)
    if find(task, body.rank, body.attempt) is not None and task is not None and unproved(task):
        declined(state, record, task, body.why)


def _rank_errored(state: ClusterState, record: Record, body: r.RankErrored) -> None:
    task = state.tasks.get(body.task)
    rank = find(task, body.rank, body.attempt)
    if task is None or rank is None or rank.error_seq or rank.state == "finished":
        return
    rank.error, rank.error_text, rank.error_seq = (
        told_status(body.status, status_of(body.error)), body.text, record.seq)
    rank.second_hand = body.second_hand
    count_outstanding(task)
    if not rank.stopping and not task.ending:
        arm(state, f"error/{task.id}/{rank.rank}/{rank.attempt}", state.policy.stop_s_max)
        what = last_line(body.text) or body.error
        fault(task, record, [rank], rank.error, f"rank {rank.rank}: {what}", ended=True,
              second_hand=body.second_hand)


def _rank_exited(state: ClusterState, record: Record, body: r.RankExited) -> None:
    task = state.tasks.get(body.task)
    if task is None:
        return
    ghost = find_ghost(task, body.rank, body.attempt)
    if ghost is not None:
        drop_rank(state, task, ghost)
        return
    rank = find(task, body.rank, body.attempt)
    if rank is None:
        return
    member = any(m.rank == rank.rank and m.attempt == rank.attempt for m in task.members)
    drop_rank(state, task, rank)
    if unproved(task) and body.exit_code == 0 and not rank.stopping:
        declined(state, record, task, f"rank {rank.rank} ended without having adopted Unicron")
    if not task.heals_in_memory and body.exit_code == 0 and not rank.stopping:
        task.finished.append(rank.rank)
        return
    if rank.state == "finished" and task.phase == "starting" and not task.ending:
        fault(task, record, [rank], OTHER_SOFTWARE, "all are done, but nobody saved the model")
    if rank.state == "finished" or task.ending or rank.stopping or rank.overdue:
        return
    if rank.error_seq:
        if rank.second_hand and body.status and not body.second_hand:  # this is the cause
            _ended(task, record, rank, body, hurts=member or None)
        else:
            add_evidence(state.incidents.get(task.incident), record)
        return
    _ended(task, record, rank, body, hurts=member or None)


def _ended(task: Task, record: Record, rank: Rank, body: r.RankExited, *,
           hurts: bool | None) -> None:
    fault(task, record, [rank], told_status(body.status, EXITED_ABNORMALLY),
          f"rank {rank.rank} on {rank.slot.node}: {exit_in_words(body)}", hurts=hurts,
          ended=True, second_hand=body.second_hand)


def _rank_suspended(state: ClusterState, record: Record, body: r.RankSuspended) -> None:
    """Set a deadline: the peers wait for the process. Command tier: none, a person stopped it."""
    task = state.tasks.get(body.task)
    rank = find(task, body.rank, body.attempt)
    if task is None or rank is None or rank.suspended:
        return
    rank.suspended_s, rank.suspended_seq = record.at_s, record.seq
    if task.logged is not None:
        task.logged.disturbed = True
    await_continued(state, task, rank)
    await_hang(state, task, restart=True)


def _rank_continued(state: ClusterState, record: Record, body: r.RankContinued) -> None:
    """Cancel a pending timeout if healing was paused: the process need not be ended any more."""
    task = state.tasks.get(body.task)
    rank = find(task, body.rank, body.attempt)
    if task is None or rank is None or not rank.suspended:
        return
    rank.suspended_s, rank.suspended_seq = -1.0, 0
    disarm(state, f"stopped/{task.id}/{rank.rank}/{rank.attempt}")
    if rank.overdue == STOPPED and not rank.stopping:
        rank.overdue = ""
        count_outstanding(task)
    await_hang(state, task, restart=True)


PROCESSES: dict[type[t.Body], Callable[[ClusterState, Record, Any], None]] = {
    r.RankStarted: _rank_started, r.RankReady: _rank_ready, r.RankErrored: _rank_errored,
    r.RankExited: _rank_exited, r.RankSuspended: _rank_suspended,
    r.RankContinued: _rank_continued, InMemoryRecoveryDeclined: _recovery_declined,
}
