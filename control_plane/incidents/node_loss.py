"""Suspects: nodes whose loss is likely, by reports of a task's other members."""

from __future__ import annotations

from ..state.cluster import ClusterState
from ..state.task import Rank, Task


def suspects(state: ClusterState) -> set[str]:
    """Nodes whose members are suspected of having failed a collective or of stalling it.

    Members elsewhere report it, and no member of the suspect node does. A suspect has a shorter
    suspect timeout; suspicion alone has no other effect.
    """
    found: set[str] = set()
    for task in state.tasks.values():
        if _has_failed(task):
            found.update(_without_report(task, [rank for rank in task.living_members()
                                      if rank.failed == task.generation]))
        elif any(stall.where == "collective" for stall in task.stalls.values()):
            found.update(_without_report(task, [rank for rank in task.living_members()
                                      if rank.rank in task.stalls]))
    return found


def _has_failed(task: Task) -> bool:
    """Whether a collective of this generation failed, or the generation did not come up."""
    return task.phase != "ended" and (task.failed_s >= 0 or task.phase == "reconfiguring")


def _without_report(task: Task, reporting: list[Rank]) -> list[str]:
    """Nodes without a report of any member, if another node has one."""
    reported = {rank.slot.node for rank in reporting}
    return [rank.slot.node for rank in task.living_members()
            if reported and rank.slot.node not in reported]
