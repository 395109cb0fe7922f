"""In-memory checkpoints: which stores receive them, and which ones a task can recover from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...events.records.orders import DropMemoryCheckpoints, SetCheckpointStores
from ...events.records.types import Body, MemoryCheckpoint, StoreEndpoint
from ..state.cluster import ClusterState
from ..state.members import has_layouts
from ..state.task import Rank, Task

NUM_STORES_MAX = 2


def checkpoint_stores(state: ClusterState, task: Task, first: str) -> tuple[StoreEndpoint, ...]:
    """The stores of a task whose first member is on node `first`: on this node, then on another.
    The other node is preferably without ranks of the task, so that one fault does not take both.
    Among such nodes a present store is kept; else the next node by name is taken, so that tasks on
    different nodes use different stores."""
    train = task.spec.training
    if train is None or not train.copy_every:
        return ()
    names = sorted(state.nodes)
    usable = [name for name in names if state.nodes[name].takes_tasks and state.nodes[name].keeper]
    now = [keeper.node for keeper in task.keepers]
    taken = {rank.slot.node for rank in task.ranks.values()}
    begin = names.index(first) if first in names else 0
    others = sorted((name for name in usable if name != first), key=lambda name: (
        name in taken, name not in now, (names.index(name) - begin) % len(names)))
    chosen = [*(name for name in usable if name == first), *others][:NUM_STORES_MAX]
    return tuple(StoreEndpoint(name, state.nodes[name].keeper) for name in chosen)


def recovery_sources(state: ClusterState, task: Task,
                     members: Sequence[Rank]) -> tuple[MemoryCheckpoint, ...]:
    """The in-memory checkpoints to recover from: the newest first, then those on the first member's
    node. If each member has only a part of the state, the members find out if all is there.
    Checkpoints older than the published one are left out, as are lost nodes. Unreachable nodes come
    last: perhaps only the agent failed, and the node may have the only checkpoint."""
    if not has_layouts(task) and any(rank.has_state for rank in members):
        return ()
    here = members[0].slot.node
    usable = [copy for copy in task.copies if copy.step_version >= task.saved_iteration
           and state.nodes[copy.node].health in ("healthy", "unreachable")]
    return tuple(sorted(usable, key=lambda copy: (
        state.nodes[copy.node].unreachable, -copy.step_version, -copy.generation, copy.node != here,
        copy.node)))


def replace_stores(state: ClusterState, task: Task) -> Iterator[Body]:
    """While the task trains, replace a lost store, or move a store to a node without members. Until
    then members use the store of a lost node, since perhaps only its agent failed."""
    first = task.members[0].node if task.members else ""
    node = state.nodes.get(first)
    if task.phase != "training" or node is None or node.health != "healthy":
        return
    wanted = checkpoint_stores(state, task, first)
    if any(keeper not in task.keepers for keeper in wanted):
        yield SetCheckpointStores(nodes=tuple(sorted({member.node for member in task.members})),
                                  task=task.id, generation=task.generation, keepers=wanted)


def drop_checkpoints(state: ClusterState, task: Task) -> Iterator[Body]:
    """After the end of the task, order the stores to drop the task's checkpoints."""
    there = [name for name in task.store_nodes
             if name in state.nodes and state.nodes[name].health != "left"]
    if task.outcome and there and not task.drop_order:
        yield DropMemoryCheckpoints(nodes=tuple(there), task=task.id)
