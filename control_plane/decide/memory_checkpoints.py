"""Copies in memory: which keepers get them, and which of them a task may come back from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...events.records.orders import DropMemoryCheckpoints, SetCheckpointStores
from ...events.records.types import Body, Copy, Keeper
from ..state.cluster import ClusterState
from ..state.members import has_layouts
from ..state.node import Node
from ..state.task import Rank, Task

NUM_KEEPERS_MAX = 2


def keepers(state: ClusterState, task: Task, first: str) -> tuple[Keeper, ...]:
    """Who takes copies from a first member on node `first`: its own node, then another.

    The other one is one without members, which loses nothing together with them. Of those, who has
    copies already stays; else it is the next by name, so that tasks on different nodes have
    different ones.
    """
    train = task.spec.training
    if train is None or not train.copy_every:
        return ()
    names = sorted(state.nodes)
    fit = [name for name in names if _takes(state.nodes[name])]
    now = [keeper.node for keeper in task.keepers]
    taken = {rank.slot.node for rank in task.ranks.values()}
    begin = names.index(first) if first in names else 0
    others = sorted((name for name in fit if name != first), key=lambda name: (
        name in taken, name not in now, (names.index(name) - begin) % len(names)))
    chosen = [*(name for name in fit if name == first), *others][:NUM_KEEPERS_MAX]
    return tuple(Keeper(name, state.nodes[name].keeper) for name in chosen)


def sources(state: ClusterState, task: Task, members: Sequence[Rank]) -> tuple[Copy, ...]:
    """What these members can come back from where none of them has state, or each a part alone
    (they find out themselves whether that is all of it): the newest first, then the nearest to the
    first member. What is older than the published checkpoint is left out.

    A node that is merely unreachable may have nothing wrong but its agent, and the only copy: it
    is asked last. One that is lost is not asked at all.
    """
    if not has_layouts(task) and any(rank.has_state for rank in members):
        return ()
    here = members[0].slot.node
    fit = [copy for copy in task.copies if copy.step_version >= task.saved_iteration
           and state.nodes[copy.node].health in ("healthy", "unreachable")]
    return tuple(sorted(fit, key=lambda copy: (
        state.nodes[copy.node].silent, -copy.step_version, -copy.generation, copy.node != here,
        copy.node)))


def keep(state: ClusterState, task: Task) -> Iterator[Body]:
    """While it trains: another keeper, where one was lost, or one without members has come.

    Who is only lost is tried on: it may be its agent alone that is silent.
    """
    first = task.members[0].node if task.members else ""
    node = state.nodes.get(first)
    if task.phase != "training" or node is None or node.health != "healthy":
        return
    wanted = keepers(state, task, first)
    if any(keeper not in task.keepers for keeper in wanted):
        yield SetCheckpointStores(nodes=tuple(sorted({member.node for member in task.members})),
                                  task=task.id, generation=task.generation, keepers=wanted)


def drop(state: ClusterState, task: Task) -> Iterator[Body]:
    """The task has ended: whoever may have copies of it forgets them."""
    there = [name for name in task.kept_on
             if name in state.nodes and state.nodes[name].health != "left"]
    if task.outcome and there and not task.drop_order:
        yield DropMemoryCheckpoints(nodes=tuple(there), task=task.id)


def _takes(node: Node) -> bool:
    return node.takes_tasks and bool(node.keeper)
