"""Queries on a task's members: who has answered, who is silent, what state they hold together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...events.records.orders import InjectFault
from ...events.records.reports import FaultRequested
from ...events.spec import parallelism
from ...events.spec.parallelism import covers, num_places
from .cluster import ClusterState
from .task import Held, Rank, Task


def awaited(task: Task) -> Literal["", "processes", "members"]:
    """Whose answers the task waits for.

    While it quiesces or reconfigures those of the generation's members, else those of processes
    that start. Where some are finished, each member that leaves ends by itself: none is awaited.
    """
    if task.heals_in_memory and task.finished:
        return ""
    return "members" if task.phase in ("quiescing", "reconfiguring") else "processes"


def outstanding(task: Task) -> int:
    """Answers that the task waits for, counted: linear in its ranks."""
    whose = awaited(task)
    if whose == "processes":
        return sum(is_coming(task, rank) for rank in task.ranks.values())
    if whose == "members" and task.phase == "quiescing":
        return sum(rank.quiesced != task.generation for rank in task.living_members())
    if whose == "members":
        return sum(rank.reconfigured != task.generation for rank in task.living_members())
    return 0


def is_coming(task: Task, rank: Rank) -> bool:
    """Whether the process is to say that it is ready, of a command that it is started."""
    waits = ("ordered", "started") if task.heals_in_memory else ("ordered",)
    return rank.state in waits and rank.sound


def count_outstanding(task: Task) -> None:
    """Fold: who is to answer has changed by something else than an answer."""
    task.num_outstanding = outstanding(task)


def mute(task: Task) -> list[Rank]:
    """Living members that have not said that they left the generation."""
    return [rank for rank in task.living_members() if is_mute(task, rank)]


def is_mute(task: Task, rank: Rank) -> bool:
    """Whether the member has not said that it left the generation."""
    return rank.quiesced < task.generation and rank.state != "finished"


def has_settled(task: Task, rank: Rank) -> bool:
    """Whether the member has said that it is up in the current generation."""
    return rank.reconfigured >= task.generation


def is_silent(state: ClusterState, rank: Rank) -> bool:
    """Whether nothing is heard of its node."""
    node = state.nodes.get(rank.slot.node)
    return node is None or node.silent


# --- Coverage: whether some processes of a task have its whole state between them. ---


def has_layouts(task: Task) -> bool:
    """Whether its ranks may each have a part of the model or of the optimizer alone."""
    return task.spec.training is not None and not task.spec.training.parallel.is_plain


def covered(task: Task, ranks: Sequence[Rank], step_version: int = -1) -> bool:
    """Whether these have all of it, one of them after `step_version` steps or more.

    Of one generation some may have taken a step that the others have yet to take, but can: then all
    had come to its end. So they are not told apart.
    """
    train = task.spec.training
    if train is None or train.parallel.is_plain:
        return any(rank.has_state and rank.step_version >= step_version for rank in ranks)
    found: dict[int, list[Held]] = {}
    most: dict[int, int] = {}
    for rank in ranks:
        if rank.has_state and rank.held is not None:
            found.setdefault(rank.held.generation, []).append(rank.held)
            most[rank.held.generation] = max(most.get(rank.held.generation, -1), rank.step_version)
    return any(covers(held[0].axes, train.parallel.optimizer, [one.place for one in held])
               for number, held in found.items() if most[number] >= step_version)


def take_place(task: Task, rank: Rank, step_version: int) -> None:
    """Fold: the rank has settled, and has the part of its place. Who is beside the layout keeps
    what it had."""
    if task.axes is None:
        rank.held, rank.step_version = None, step_version
    elif (place := place_of(task, rank)) < num_places(task.axes):
        rank.held = Held(generation=task.generation, axes=task.axes, place=place)
        rank.step_version = step_version


def forget_beside(task: Task) -> None:
    """Fold: the others train on: who is beside the layout has given what it had."""
    for rank in task.living_members():
        if is_beside(task, rank):
            rank.held, rank.has_state, rank.step_version = None, False, -1


def place_of(task: Task, rank: Rank) -> int:
    """Of a member of the present generation."""
    return [member.rank for member in task.members].index(rank.rank)


def is_beside(task: Task, rank: Rank) -> bool:
    """Whether the layout has no place for this member."""
    return task.axes is not None and place_of(task, rank) >= num_places(task.axes)


def speaks(task: Task, rank: Rank) -> bool:
    """Whether the member tells of micro-batches: of a replica its first alone."""
    return task.axes is None or parallelism.speaks(task.axes, place_of(task, rank))


def is_pinned(state: ClusterState, task: Task) -> bool:
    """Nothing is changed of it: it has ranks on a node that is silent, of which nothing is known;
    or it is a command that runs, and leaving its slots would cost what it has not saved."""
    if not task.heals_in_memory and not task.incident and _runs_where_nothing_starts(state, task):
        return True
    return bool(state.silent) and any(state.nodes[rank.slot.node].silent
                                      for rank in task.ranks.values())


def _runs_where_nothing_starts(state: ClusterState, task: Task) -> bool:
    """Some of its slots are out, or quarantined, and it goes on in spite of that."""
    return any(not (node := state.nodes[rank.slot.node]).drained
               and (node.quarantine is not None or node.is_out(rank.slot.index))
               for rank in task.ranks.values())


def is_whole(task: Task) -> bool:
    """Whether nobody is missing of those that the task should have."""
    if task.heals_in_memory:
        return len(task.living_members()) == len(task.target)
    return bool(task.ranks)


def inject_fault(state: ClusterState, asked: FaultRequested) -> InjectFault | None:
    """The order that breaks what was asked for, None where that is not allowed or not there.

    Nor is it kept for a node that is silent: nobody asked for a fault at some later time.
    """
    task = state.tasks.get(asked.task)
    rank = task.ranks.get(asked.rank) if task is not None else None
    node = state.nodes.get(asked.node if asked.what == "node" else rank.slot.node if rank else "")
    if not state.policy.allow_inject or node is None or node.health != "healthy":
        return None
    return InjectFault(nodes=(node.name,), what=asked.what, task=task.id if task else 0,
                       rank=rank.rank if rank else -1, attempt=rank.attempt if rank else 0,
                       incarnation=node.incarnation, stop_s=max(asked.stop_s, 0.0))
