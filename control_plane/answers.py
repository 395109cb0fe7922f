"""Who of a task's members has answered, and of whom nothing is heard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .state import ClusterState, Rank, Task


def last_first(task: Task) -> Iterator[Rank]:
    """The living members, the last first: who answers in order is waited for at the end."""
    for member in reversed(task.members):
        rank = task.ranks.get(member.rank)
        if rank is not None and rank.attempt == member.attempt:
            yield rank


def members_on(state: ClusterState, task: Task, names: Iterable[str]) -> Iterator[Rank]:
    """Living members on these nodes, which are few."""
    for name in names:
        for one in state.nodes[name].occupants.values():
            rank = task.member(one.rank) if one.task == task.id else None
            if rank is not None and rank.attempt == one.attempt:
                yield rank


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
