"""The fold of deadlines: mark what timed out."""

from __future__ import annotations

from collections.abc import Callable

from ...events.records.envelope import Record
from ...events.records.reports import DeadlineReached
from ...events.records.statuses import TASK_HANG
from ..incidents.severity import network_status
from ..state.cluster import ClusterState
from ..state.members import count_outstanding, has_settled, mute
from ..state.task import Rank, Task
from .edits import STOPPED, broken, fault, find, price_anew
from .hangs import late_hang, late_printed
from .node_health import late_of_node
from .ranks import declined, unproved


def _late_rank(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """A rank did not start or get ready in time."""
    rank = find(task, rest[0], rest[1])
    if rank is not None and unproved(task):
        declined(state, record, task, f"no process has adopted Unicron within "
                                      f"{state.policy.start_s_max:g} s")
    elif rank is not None and not rank.overdue:
        rank.overdue = "did not get ready in time"
        fault(task, record, [rank], TASK_HANG, f"rank {rank.rank} {rank.overdue}")


def _late_exit(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    rank = find(task, rest[0], rest[1])
    if rank is not None:
        rank.overdue = rank.overdue or "did not end in time"


def _late_stopped(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """A rank is stopped for too long. On an unreachable node, wait until the node is reachable."""
    rank = find(task, rest[0], rest[1])
    node = state.nodes.get(rank.slot.node) if rank is not None else None
    if rank is None or rank.overdue or task.ending or node is None or node.silent:
        return
    rank.overdue = STOPPED
    if rank.state != "finished" and not rank.error_seq:  # else only its exit is missing
        fault(task, record, [rank], TASK_HANG, f"rank {rank.rank} on {node.name} {STOPPED}",
              evidence=(rank.suspended_seq,), since_s=rank.suspended_s)


def _late_quiesce(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    late = _time_out_unanswered(record, task)
    waited = task.mode == "now" or not late  # at a boundary, only those that never reached it count
    if task.saver >= 0 and waited and all(rank.rank != task.saver for rank in late):
        task.save_late = task.generation


def _late_silent(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    if task.phase == "reconfiguring":
        _late_reconfigure(state, record, task, rest)
    else:
        _time_out_unanswered(record, task)


def _time_out_unanswered(record: Record, task: Task) -> list[Rank]:
    """Mark members that have not reported leaving the generation, and return them."""
    late = [rank for rank in mute(task) if not rank.stopping]
    for rank in late:
        rank.overdue = "did not quiesce in time"
    if late:
        fault(task, record, late, TASK_HANG, f"{_names(late)} did not quiesce in time")
    return late


def _late_reconfigure(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    late = [rank for rank in task.living_members() if not has_settled(task, rank)]
    broken(task, record, late, network_status("timeout"),
            f"{_names(late)} did not come up in generation {task.generation} in time")


def _late_evidence(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    failed = [rank for rank in task.living_members() if rank.failed == task.generation]
    if failed and not task.faults and len(task.living_members()) == len(task.members):
        task.evidence_over = task.generation
        fault(task, record, failed, failed[0].failed_status,
              f"a collective failed under {_names(failed)}, no root cause in "
              f"{state.policy.evidence_s_max:g} s", evidence=tuple(x.failed_seq for x in failed),
              second_hand=True)


def _late_finish(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    for rank in task.living_members():
        if not rank.stopping:
            rank.overdue = "did not end after the task was done"


def _names(ranks: list[Rank]) -> str:
    numbers = " ".join(str(rank.rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


_LATE: dict[str, Callable[[ClusterState, Record, Task, list[int]], None]] = {
    "start": _late_rank, "error": _late_exit, "stop": _late_exit, "stopped": _late_stopped,
    "quiesce": _late_quiesce, "hang": late_hang, "printed": late_printed,
    "silent": _late_silent,
    "reconfigure": _late_reconfigure, "evidence": _late_evidence, "finish": _late_finish,
}


def deadline_reached(state: ClusterState, record: Record, body: DeadlineReached) -> None:
    """Handle a deadline of the state. A stale or early report has no effect."""
    deadline = state.deadlines.get(body.deadline)
    if deadline is None or record.at_s < deadline.due_s:
        return
    del state.deadlines[body.deadline]
    what, *of = body.deadline.split("/")
    if what == "replace":
        node = state.nodes.get("/".join(of))
        if node is not None:
            node.replace = True
        return
    if what == "price":
        price_anew(state, "/".join(of))
        return
    if what in ("device", "recovered", "quarantine"):
        late_of_node(state, what, "/".join(of))
        return
    number, *rest = (int(part) for part in of)
    task = state.tasks.get(number)
    if task is not None:
        _LATE[what](state, record, task, rest)
        count_outstanding(task)
