"""In-memory checkpoints: which stores receive them, and which ones a task can recover from.

Each member sends its share of the state to the stores of two other nodes. So a lost node is
restored from other nodes, and no node has more than a few shares of a task.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ...events.records.orders import DropMemoryCheckpoints, SetCheckpointStores
from ...events.records.types import (
    CHECKPOINTS_NUM_MAX,
    Body,
    MemoryCheckpoint,
    NodeStores,
    StoreEndpoint,
)
from ..state.cluster import ClusterState
from ..state.members import has_layouts
from ..state.memory_checkpoints import WholeCheckpoint, whole_checkpoints
from ..state.node import Node
from ..state.task import Rank, Task
from ..throughput.memory import in_gib
from ..throughput.state_size import NUM_STORES_MAX, share_bytes


class StoreAssignment(NamedTuple):
    """Which stores receive the shares of a task's members. `why`: why there are none. `fits`: False
    if they take more memory than the stores have."""

    keepers: tuple[StoreEndpoint, ...] = ()
    stores: tuple[NodeStores, ...] = ()
    why: str = ""
    fits: bool = True


def assign_stores(state: ClusterState, task: Task, nodes: Sequence[str]) -> StoreAssignment:
    """The stores of a task whose members are on `nodes` (one entry for each member): for each node
    two others, in two racks if nodes are labelled. A present store is kept; then come nodes with
    fewer shares of the task, and those without members."""
    train = task.spec.training
    if train is None or not train.copy_every or not nodes:
        return StoreAssignment()
    stores = _Stores(state, task, nodes)
    if not stores.usable:
        return StoreAssignment(why="no node has a checkpoint store")
    each_bytes = CHECKPOINTS_NUM_MAX * share_bytes(task, len(nodes))
    num_shares = Counter(nodes)
    found: list[NodeStores] = []
    for node in sorted(num_shares):
        own_bytes = num_shares[node] * each_bytes
        chosen: list[str] = []
        while len(chosen) < NUM_STORES_MAX and (best := stores.best(node, chosen, own_bytes)):
            chosen.append(best)
            stores.load[best] += num_shares[node]
            stores.free[best] -= own_bytes
        if not chosen:
            most = in_gib(max(stores.free[name] for name in stores.usable))
            return StoreAssignment(
                fits=False,
                why=f"they do not fit: {in_gib(own_bytes)} for the "
                f"{num_shares[node]} ranks of {node}, and no node has more than "
                f"{most} left for them",
            )
        found.append(NodeStores(node, tuple(chosen)))
    keepers = sorted({name for one in found for name in one.stores})
    return StoreAssignment(
        tuple(StoreEndpoint(name, state.nodes[name].keeper) for name in keepers), tuple(found)
    )


def node_bytes(task: Task) -> dict[str, int]:
    """By node: the bytes that the task's in-memory checkpoints may take, or its last ones take."""
    nodes = storing_nodes(task)
    if nodes and task.stores:
        return assigned_bytes(task, nodes, task.stores)
    found = Counter[str]()
    for copy in task.copies:
        found[copy.node] += copy.copy_bytes
    return dict(found)


def assigned_bytes(
    task: Task, nodes: Sequence[str], stores: Sequence[NodeStores]
) -> dict[str, int]:
    """By node: the memory for the shares of members on `nodes` (one entry for each member)."""
    num_members, found = Counter(nodes), Counter[str]()
    each_bytes = CHECKPOINTS_NUM_MAX * share_bytes(task, len(nodes))
    for one in stores:
        for name in one.stores:
            found[name] += num_members[one.node] * each_bytes
    return dict(found)


def bytes_max_of(state: ClusterState, node: Node) -> int:
    """The bytes for all in-memory checkpoints on the node, by policy and agent; 0: not known."""
    limits = [limit for limit in (state.policy.copies_bytes_max, node.copies_bytes_max) if limit]
    return min(limits, default=0)


class _Stores:
    """The stores that a task's members may be given: `load` by node, the shares given so far."""

    def __init__(self, state: ClusterState, task: Task, nodes: Sequence[str]) -> None:
        self._nodes = state.nodes
        self._names = sorted(state.nodes)
        self._members = set(nodes)
        self._index = {name: place for place, name in enumerate(self._names)}
        self._now = {one.node: one.stores for one in task.stores}
        self.usable = dict.fromkeys(name for name in self._names if _is_usable(state.nodes[name]))
        self.load, self.free = Counter[str](), _free_bytes(state, task)

    def best(self, node: str, chosen: Sequence[str], own_bytes: int) -> str:
        """The best store for the node's shares beside `chosen`; "" if none has memory for them. It
        looks at few nodes: the present stores, then the next nodes until none can be better."""
        racks = {rack for name in chosen if (rack := self._nodes[name].labels.rack)}
        at, kept = self._index[node], self._now.get(node, ())

        def rank(name: str) -> tuple[bool, bool, int, bool, int]:
            return (
                self._nodes[name].labels.rack in racks,
                name not in kept,
                self.load[name],
                name in self._members,
                (self._index[name] - at) % len(self._names),
            )

        def may(name: str) -> bool:
            return name in self.usable and name not in chosen and self.free[name] >= own_bytes

        found = min((name for name in kept if name != node and may(name)), key=rank, default="")
        if found and not rank(found)[0]:
            return found
        for name in chain(self._names[at + 1 :], self._names[:at]):
            if may(name) and (not found or rank(name) < rank(found)):
                found = name
                if rank(name)[:4] == (False, True, 0, False):
                    break
        return found or (node if may(node) else "")


def _free_bytes(state: ClusterState, task: Task) -> dict[str, float]:
    """By node: the memory that in-memory checkpoints of other tasks leave."""
    taken = Counter[str]()
    for other in state.tasks.values():
        if other is not task and not other.outcome:
            taken.update(node_bytes(other))
    return {
        name: (bytes_max_of(state, node) or float("inf")) - taken[name]
        for name, node in state.nodes.items()
    }


def _is_usable(node: Node) -> bool:
    return node.takes_tasks and bool(node.keeper)


def recovery_sources(
    state: ClusterState, task: Task, members: Sequence[Rank]
) -> tuple[MemoryCheckpoint, ...]:
    """The whole in-memory checkpoints to recover from, the newest first: one entry for each
    generation and store, without lost nodes and those older than the published one. If each member
    has only a part of the state, the members find out whether all is there."""
    if not has_layouts(task) and any(rank.has_state for rank in members):
        return ()
    reachable = [
        copy for copy in task.copies if state.nodes[copy.node].health in ("healthy", "unreachable")
    ]
    return tuple(entry for whole in whole_checkpoints(reachable) for entry in _entries(task, whole))


def _entries(task: Task, whole: WholeCheckpoint) -> Iterator[MemoryCheckpoint]:
    """The entries of a checkpoint in the order. The stores may have newer versions than
    `step_version`, the lowest allowed, unless a published checkpoint began a later generation."""
    published = task.checkpoint
    step_version = min(share.step_version for share in whole.shares)
    if published is not None:
        if whole.generation < published.generation and whole.step_version < published.step_version:
            return
        step_version = max(step_version, published.step_version)
    if 0 <= whole.step_version_max < step_version:
        return
    for node in sorted({share.node for share in whole.shares}):
        shares = {one.share: one for one in whole.shares if one.node == node}
        first = shares[min(shares)]
        yield MemoryCheckpoint(
            node=node,
            endpoint=first.endpoint,
            rank=first.rank,
            generation=whole.generation,
            step_version=step_version,
            step_version_max=whole.step_version_max,
            copy_bytes=sum(share.copy_bytes for share in shares.values()),
            checksum=first.checksum,
            share=first.share,
            num_shares=whole.num_shares,
        )


def replace_stores(state: ClusterState, task: Task) -> Iterator[Body]:
    """While the task trains, replace lost stores, and use a node that has become usable; not while
    a node of members is unreachable, for it could not receive the order. Until then members use the
    store of a lost node: perhaps only its agent failed."""
    nodes = storing_nodes(task)
    if task.phase != "training" or not nodes or _has_stores(state, task):
        return
    if any((node := state.nodes.get(name)) is None or node.health != "healthy" for name in nodes):
        return
    wanted = assign_stores(state, task, nodes)
    now = {one.node: one.stores for one in task.stores}
    if any(not set(one.stores).issubset(now.get(one.node, ())) for one in wanted.stores):
        yield SetCheckpointStores(
            nodes=tuple(sorted(set(nodes))),
            task=task.id,
            generation=task.generation,
            keepers=wanted.keepers,
            stores=wanted.stores,
            copies_bytes_max=state.policy.copies_bytes_max,
        )


def storing_nodes(task: Task) -> list[str]:
    """The node of each process that stores its state in memory."""
    if task.restarts_from_memory:
        return [task.ranks[key].slot.node for key in sorted(task.ranks)]
    return [member.node for member in task.members]


def _has_stores(state: ClusterState, task: Task) -> bool:
    """Whether each node of members has two usable stores on other nodes, or none is due."""
    train = task.spec.training
    if train is None or not train.copy_every:
        return True
    now = {one.node: one.stores for one in task.stores}
    for node in dict.fromkeys(storing_nodes(task)):
        stores = now.get(node, ())
        if (
            len(stores) < NUM_STORES_MAX
            or node in stores
            or not all(name in state.nodes and _is_usable(state.nodes[name]) for name in stores)
        ):
            return False
    return True


def drop_checkpoints(state: ClusterState, task: Task) -> Iterator[Body]:
    """After the end of the task, order the stores to drop the task's checkpoints."""
    there = [
        name
        for name in task.store_nodes
        if name in state.nodes and state.nodes[name].health != "left"
    ]
    if task.outcome and there and not task.drop_order:
        yield DropMemoryCheckpoints(nodes=tuple(there), task=task.id)
