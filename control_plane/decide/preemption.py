"""Leaving: a task without slots to go on with saves what it holds before its processes end."""

from __future__ import annotations

from ...events.records.types import Seat
from ..state.cluster import ClusterState
from ..state.members import has_layouts
from ..state.task import Rank, Task
from .processes import slot_free


def leaves(state: ClusterState, task: Task) -> bool:
    """It has members and nowhere to go on: no slots, or only such as wait for its own."""
    return bool(task.members) and (not task.target or _traded(state, task))


def saver(task: Task) -> Rank | None:
    """The member to write the checkpoint, None where nobody can or it is too late.

    Whoever was told, unless all have told their steps and another has taken more. Where each has a
    part, the first of them: they bring it together at the iteration's end, while nothing is wrong.
    """
    if has_layouts(task):
        return _first(task)
    able = [rank for rank in task.living_members() if rank.has_state and rank.sound]
    if not able or task.save_late == task.generation:
        return None
    most = max(rank.step_version for rank in able)
    told = next((rank for rank in able if rank.rank == task.saver), None)
    if told is not None and (told.step_version == most or not all_quiesced(task)):
        return told
    return next(rank for rank in able if rank.step_version == most)


def _first(task: Task) -> Rank | None:
    living = task.living_members()
    first = living[0] if living else None
    if (first is None or len(living) < len(task.members) or task.save_late == task.generation
            or task.failed_s >= 0 or not first.has_state
            or not all(rank.sound for rank in living)):
        return None
    if first.rank != task.saver:
        return first if all(rank.quiesced != task.generation for rank in living) else None
    could = task.saved is not None or bool(task.publishing) or num_unsaved(task) == 0
    return first if could or first.quiesced != task.generation else None  # it saves before it says


def all_quiesced(task: Task) -> bool:
    """Every living member has left the generation and holds."""
    return all(rank.quiesced == task.generation for rank in task.living_members())


def save_unasked(state: ClusterState, task: Task) -> bool:
    """It is to leave, and nobody who lives was told to save what it holds."""
    first = saver(task) if leaves(state, task) and not done(state, task) else None
    return first is not None and first.rank != task.saver


def done(state: ClusterState, task: Task) -> bool:
    """Whether its members may end: what they hold is published, or will never be."""
    return task.phase == "quiescing" and leaves(state, task) and (
        saver(task) is None or (all_quiesced(task) and num_unsaved(task) == 0))


def num_unsaved(task: Task) -> int:
    """Iterations that the members have done since the published checkpoint, as far as told."""
    told = [rank.step_version for rank in task.living_members()]
    return max([0, *(version - task.saved_iteration for version in told)])


def coming(state: ClusterState, task: Task, seat: Seat) -> bool:
    """The seat's process is on its way: it is starting, or will be, since the slot is free."""
    rank = task.ranks.get(seat.rank)
    if rank is None:
        return slot_free(state, seat)
    return rank.slot == seat.slot and rank.state in ("ordered", "started") and rank.sound


def _traded(state: ClusterState, task: Task) -> bool:
    """No member keeps its seat, no newcomer can start, and others wait for these very slots.

    Where such tasks wait for each other in a ring, somebody has to go first.
    """
    if any(seat.rank in task.ranks or coming(state, task, seat) for seat in task.target):
        return False
    own = [rank.slot for rank in task.living_members()]
    return any(seat.slot in own for other in state.tasks.values() if other is not task
               for seat in other.target)
