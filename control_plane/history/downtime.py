"""Number of slots of a task that step, by the state."""

from __future__ import annotations

from ..state.cluster import ClusterState
from ..state.task import Task


def num_stepping(state: ClusterState, task: Task) -> int:
    """Slots of the task that step now: none from a fault, or from the first member that leaves the
    generation, until the first iteration of the next one."""
    incident = state.incidents.get(task.incident)
    if incident is not None and incident.down_since_s >= 0:
        return 0
    if not task.heals_in_memory:
        return len(task.ranks) if task.phase == "training" else 0
    at_boundary = task.phase == "quiescing" and task.mode == "boundary"
    if task.stepped != task.generation or not (task.phase == "training" or at_boundary):
        return 0
    living = task.living_members()
    if (
        len(living) != len(task.members)
        or task.failed_s >= 0
        or any(
            rank.error_seq
            or rank.timeout_reason
            or (at_boundary and rank.quiesced == task.generation)
            for rank in living
        )
    ):
        return 0
    return len(living)
