"""Queries on a task's members: who has answered, who is unreachable, which state they hold."""

from collections.abc import Sequence
from typing import Literal

from ...events.records.orders import InjectFault
from ...events.records.reports import FaultRequested
from ...events.spec import parallelism
from ...events.spec.parallelism import has_every_part, num_positions
from .cluster import ClusterState
from .task import HeldState, Rank, Task


def awaited(task: Task) -> Literal["", "processes", "members"]:
    """Which processes the task waits for: its members while it quiesces or reconfigures, else
    starting processes. Once a rank of a task that heals in memory has finished, the task waits for
    none: each rank ends on its own."""
    if task.heals_in_memory and task.finished:
        return ""
    return "members" if task.phase in ("quiescing", "reconfiguring") else "processes"


def outstanding(task: Task) -> int:
    """Count the outstanding answers; linear in the task's ranks."""
    whose = awaited(task)
    if whose == "processes":
        return sum(is_starting(task, rank) for rank in task.ranks.values())
    if whose == "members" and task.phase == "quiescing":
        return sum(rank.quiesced != task.generation for rank in task.living_members())
    if whose == "members":
        return sum(rank.reconfigured != task.generation for rank in task.living_members())
    return 0


def has_progressed(state: ClusterState, task: Task, rank: Rank) -> bool:
    """Whether the process has made enough progress that earlier failures of its rank do not count:
    `restart_iterations` new iterations of the task since it came up; of a command, in its round."""
    if task.heals_in_memory:
        since = rank.joined_iteration if rank.joined_iteration >= 0 else None
    else:
        since = task.logged_now.max_iteration if task.logged_now is not None else None
    return since is not None and task.iteration - since >= state.policy.restart_iterations


def is_starting(task: Task, rank: Rank) -> bool:
    """Whether the process still has to report ready (of a command: started)."""
    waits = ("ordered", "started") if task.heals_in_memory else ("ordered",)
    return rank.state in waits and rank.is_healthy


def count_outstanding(task: Task) -> None:
    """Fold: count the outstanding answers again, after a change other than an answer."""
    task.num_outstanding = outstanding(task)


def unanswered(task: Task) -> list[Rank]:
    """Living members that have not reported leaving the generation."""
    return [
        rank
        for rank in task.living_members()
        if rank.quiesced < task.generation and rank.state != "finished"
    ]


def has_settled(task: Task, rank: Rank) -> bool:
    """Whether the member has reported that it is up in the current generation."""
    return rank.reconfigured >= task.generation


def is_unreachable(state: ClusterState, rank: Rank) -> bool:
    node = state.nodes.get(rank.slot.node)
    return node is None or node.unreachable


# --- coverage: whether a set of processes holds the task's complete state ---
def has_layouts(task: Task) -> bool:
    """Whether each rank may hold only a part of the model or of the optimizer."""
    return task.spec.training is not None and not task.spec.training.parallel.is_plain


def is_complete(task: Task, ranks: Sequence[Rank], step_version: int = -1) -> bool:
    """Whether these ranks hold the complete state, at least one of them at `step_version` or later.
    Some ranks of a generation may be one step ahead. The others reached the end of the same
    iteration and can take this step too, so both versions count as the same state."""
    train = task.spec.training
    if train is None or train.parallel.is_plain:
        return any(rank.has_state and rank.step_version >= step_version for rank in ranks)
    found: dict[int, list[HeldState]] = {}
    most: dict[int, int] = {}
    for rank in ranks:
        if rank.has_state and rank.held is not None:
            found.setdefault(rank.held.generation, []).append(rank.held)
            most[rank.held.generation] = max(most.get(rank.held.generation, -1), rank.step_version)
    return any(
        has_every_part(held[0].axes, train.parallel.optimizer, [one.place for one in held])
        for number, held in found.items()
        if most[number] >= step_version
    )


def take_position(task: Task, rank: Rank, step_version: int) -> None:
    """Fold: the rank came up and holds the state of its position. A standby keeps its old state."""
    if task.axes is None:
        rank.held, rank.step_version = None, step_version
    elif (place := position_of(task, rank)) < num_positions(task.axes):
        rank.held = HeldState(generation=task.generation, axes=task.axes, place=place)
        rank.step_version = step_version


def position_of(task: Task, rank: Rank) -> int:
    return task.positions[rank.rank]


def is_standby(task: Task, rank: Rank) -> bool:
    """Whether the member is a standby: the layout has no position for it."""
    return task.axes is not None and position_of(task, rank) >= num_positions(task.axes)


def is_representative(task: Task, rank: Rank) -> bool:
    """Whether the member reports micro-batches: the representative rank of its replica."""
    return task.axes is None or parallelism.is_representative(task.axes, position_of(task, rank))


def only_publication_left(task: Task) -> bool:
    """Whether its processes have ended with all saved, and the publication was refused."""
    return bool(task.finished) and not task.ranks and "publication" in task.failed_saves


def is_pinned(state: ClusterState, task: Task) -> bool:
    """Whether the plan must not change the task: it has ranks on an unreachable node, it needs no
    slots any more, or it is a command on unusable slots. To move a running command would lose its
    unsaved work."""
    if only_publication_left(task):
        return True
    if (
        not task.heals_in_memory
        and not task.incident
        and any(
            not (node := state.nodes[rank.slot.node]).drained
            and (node.quarantine is not None or node.is_disabled(rank.slot.index))
            for rank in task.ranks.values()
        )
    ):
        return True
    return bool(state.unreachable) and any(
        rank.slot.node in state.unreachable for rank in task.ranks.values()
    )


def is_whole(task: Task) -> bool:
    """Whether all seats of the target have a member (of a command: whether any process runs)."""
    if task.heals_in_memory:
        return len(task.living_members()) == len(task.target)
    return bool(task.ranks)


def inject_fault(state: ClusterState, request: FaultRequested) -> InjectFault | None:
    """The InjectFault order for a request. None if injection is not allowed, the target does not
    exist, or its node is unreachable: the order would arrive later, but the fault is wanted now."""
    task = state.tasks.get(request.task)
    rank = task.ranks.get(request.rank) if task is not None else None
    name = request.node if request.what == "node" else rank.slot.node if rank else ""
    node = state.nodes.get(name)
    if not state.policy.allow_inject or node is None or node.health != "healthy":
        return None
    return InjectFault(
        nodes=(node.name,),
        what=request.what,
        task=task.id if task else 0,
        rank=rank.rank if rank else -1,
        attempt=rank.attempt if rank else 0,
        incarnation=node.incarnation,
        stop_s=max(request.stop_s, 0.0),
    )


def current_member(task: Task | None, number: int, attempt: int, generation: int) -> Rank | None:
    """The running member of the current generation; None if the report is stale."""
    if task is None or generation != task.generation or task.phase == "ended":
        return None
    rank = task.member(number)
    return rank if rank is not None and rank.attempt == attempt else None
