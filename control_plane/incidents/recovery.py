"""Recovering incidents: the task trains again, and whether the fault stays away is not known."""

from ..state.cluster import ClusterState
from ..state.incident import Incident
from ..state.task import Task
from .severity import TABLE

RECOVERING = "recovering"
"""The kind of the deadline after which the fault of a recovering incident counts as passed."""


def deadline_name(incident: Incident) -> str:
    return f"{RECOVERING}/{incident.task}/{incident.id}"


def until_iteration(state: ClusterState, incident: Incident) -> int:
    """The fault has stayed away when the task has finished so many iterations."""
    return incident.begun_iteration + state.policy.restart_iterations


def has_stayed_away(state: ClusterState, task: Task, incident: Incident) -> bool:
    """Whether the fault has not come back for long enough: in iterations; else in time, while the
    task is whole (a command need not print any)."""
    if task.max_iteration >= until_iteration(state, incident):
        return True
    is_due = incident.recovering_s > 0 and deadline_name(incident) not in state.deadlines
    return is_due and not task.incident


def returned(
    state: ClusterState, task: Task, status: str, node: str, ranks: tuple[int, ...]
) -> Incident | None:
    """The recovering incident whose fault this is again; None: it is another fault. A fault of a
    machine is the same on the same node, one of processes in the same ranks, or at the same point
    of the task in whichever rank. A fault that was injected does not come back."""
    if any(fault.on_purpose for fault in task.faults):
        return None
    series = task.failures
    in_any_rank = series is not None and series.status == status and series.num > 1
    of_node = TABLE.get(status) == "SEV1"
    for number in reversed(task.recovering):
        incident = state.incidents[number]
        if (incident.status, incident.on_purpose) == (status, False) and (
            incident.node == node
            if of_node
            else in_any_rank or not set(ranks).isdisjoint(incident.ranks)
        ):
            return incident
    return None
