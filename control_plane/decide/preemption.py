"""Preemption: a task that loses its slots writes a checkpoint before its processes end."""

from __future__ import annotations

from ...events.records.types import Seat
from ..state.cluster import ClusterState
from ..state.members import has_layouts
from ..state.task import Rank, Task
from .processes import slot_free


def is_preempted(state: ClusterState, task: Task) -> bool:
    """True if the task has members but no seats, or must leave its slots first (_blocks_others)."""
    return bool(task.members) and (not task.target or _blocks_others(state, task))


def checkpoint_writer(task: Task) -> Rank | None:
    """The member that writes the checkpoint; None if no member can, or if it is too late. This is
    the member that already has the order, unless all have reported and another has a newer step. If
    each member has a part of the state, see `_first_writer`."""
    if has_layouts(task):
        return _first_writer(task)
    able = [rank for rank in task.living_members() if rank.has_state and rank.is_healthy]
    if not able or task.save_late == task.generation:
        return None
    most = max(rank.step_version for rank in able)
    ordered = next((rank for rank in able if rank.rank == task.saver), None)
    if ordered is not None and (ordered.step_version == most or not all_quiesced(task)):
        return ordered
    return next(rank for rank in able if rank.step_version == most)


def _first_writer(task: Task) -> Rank | None:
    """The first member, which gathers all parts at the iteration's end. None during a fault."""
    living = task.living_members()
    first = living[0] if living else None
    if (first is None or len(living) < len(task.members) or task.save_late == task.generation
            or task.failed_s >= 0 or not first.has_state
            or not all(rank.is_healthy for rank in living)):
        return None
    if first.rank != task.saver:
        return first if all(rank.quiesced != task.generation for rank in living) else None
    could = task.saved is not None or bool(task.publishing) or num_unsaved(task) == 0
    return first if could or first.quiesced != task.generation else None  # it saves first


def all_quiesced(task: Task) -> bool:
    """True if every living member has left the generation and waits."""
    return all(rank.quiesced == task.generation for rank in task.living_members())


def save_not_ordered(state: ClusterState, task: Task) -> bool:
    """True if the task is preempted and its checkpoint writer has no order to write yet."""
    leaving = is_preempted(state, task) and not may_end(state, task)
    first = checkpoint_writer(task) if leaving else None
    return first is not None and first.rank != task.saver


def may_end(state: ClusterState, task: Task) -> bool:
    """True if the members may end: their state is published, or no member can write it."""
    return task.phase == "quiescing" and is_preempted(state, task) and (
        checkpoint_writer(task) is None or (all_quiesced(task) and num_unsaved(task) == 0))


def num_unsaved(task: Task) -> int:
    """Iterations done since the published checkpoint, as far as living members have reported."""
    versions = [rank.step_version for rank in task.living_members()]
    return max([0, *(version - task.saved_iteration for version in versions)])


def is_starting(state: ClusterState, task: Task, seat: Seat) -> bool:
    """True if the seat's process is starting, or can be started because its slot is free."""
    rank = task.ranks.get(seat.rank)
    if rank is None:
        return slot_free(state, seat)
    return rank.slot == seat.slot and rank.state in ("ordered", "started") and rank.is_healthy


def _blocks_others(state: ClusterState, task: Task) -> bool:
    """True if no rank keeps its seat, no newcomer can start, and other tasks wait for its slots.
    Such tasks can wait for each other in a cycle, so one task must leave its slots first."""
    if any(seat.rank in task.ranks or is_starting(state, task, seat) for seat in task.target):
        return False
    own = [rank.slot for rank in task.living_members()]
    return any(seat.slot in own for other in state.tasks.values() if other is not task
               for seat in other.target)
