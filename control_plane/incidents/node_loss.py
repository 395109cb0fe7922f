"""Suspicion: nodes that a task's other members point at, before their own silence is long."""

from __future__ import annotations

from ..state.cluster import ClusterState
from ..state.task import Rank, Task


def suspects(state: ClusterState) -> set[str]:
    """Nodes with members of a task of which a collective has failed under members elsewhere, or
    keeps them waiting for too long.

    Not those whose own members have told of it: they are heard. Only what a short silence is then
    enough for; by itself this says nothing.
    """
    found: set[str] = set()
    for task in state.tasks.values():
        if _has_failed(task):
            found.update(_mute(task, [rank for rank in task.living_members()
                                      if rank.failed == task.generation]))
        elif any(stall.where == "collective" for stall in task.stalls.values()):
            found.update(_mute(task, [rank for rank in task.living_members()
                                      if rank.rank in task.stalls]))
    return found


def _has_failed(task: Task) -> bool:
    """Whether a collective of this generation failed, or it did not come up, under somebody."""
    return task.phase != "ended" and (task.failed_s >= 0 or task.phase == "reconfiguring")


def _mute(task: Task, told: list[Rank]) -> list[str]:
    """Nodes none of whose members has told of it, where some other node's has."""
    heard = {rank.slot.node for rank in told}
    return [rank.slot.node for rank in task.living_members()
            if heard and rank.slot.node not in heard]
