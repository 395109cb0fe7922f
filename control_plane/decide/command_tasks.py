"""The command tier: all processes start together, and the failure of one restarts all."""

from __future__ import annotations

from collections.abc import Iterator

from ...events.records.decisions import TaskEnded
from ...events.records.types import Body
from ..incidents.lifecycle import end_incident
from ..state.cluster import ClusterState
from ..state.task import Task
from .memory_checkpoints import replace_stores
from .processes import rendezvous_port, slot_free, start_rank, stop_pending, stop_rank


def next_decisions(state: ClusterState, task: Task) -> Iterator[Body]:
    """The next decisions for a command task; none if it is in its target state."""
    seats = task.seats_at
    if task.target and not task.ranks and all(number in task.finished for number in seats):
        yield from end_incident(state, task, "the task is finished")
        yield TaskEnded(task=task.id, outcome="finished", why="all processes exited with 0")
        return
    if not task.ranks:
        if all(slot_free(state, seat) for seat in task.target):
            port = rendezvous_port(task)  # once for all seats: the fold of StartRank counts a round
            for seat in task.target:
                yield start_rank(state, task, seat, port)
        return
    whole = all(number in task.ranks or number in task.finished for number in seats)
    moved = any(seats.get(rank.rank) != rank.slot for rank in task.ranks.values())
    restarts = moved or not whole or any(
        rank.stopping or rank.timeout_reason for rank in task.ranks.values())
    for key in sorted(task.ranks):
        rank = task.ranks[key]
        if rank.timeout_reason:
            if not stop_pending(state, task, rank):
                yield stop_rank(task, rank, 0.0, f"it {rank.timeout_reason}")
        elif not rank.stopping and restarts:
            why = ("another process of the task failed" if task.incident and not moved
                   else "the plan has other seats")
            yield stop_rank(task, rank, state.policy.stop_s_max, why)
    if task.restarts_from_memory and not restarts:
        yield from replace_stores(state, task)
