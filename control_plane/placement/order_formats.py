"""Nodes whose agents cannot read the orders of a task: which slots are left for it."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ...events.records.order_format import ORDER_FORMAT_VERSION, needed_format
from ...events.records.types import Slot
from ..state.cluster import ClusterState
from ..state.node import Node
from ..state.task import Task

Unread = Mapping[int, frozenset[str]]
"""By task: nodes on which none of its processes can start. Tasks without such nodes are absent."""


class Pool(Struct, frozen=True):
    """The slots that one task may have: its own, and those of no task."""

    own: tuple[Slot, ...]
    free: tuple[Slot, ...]


def unread(state: ClusterState, tasks: Sequence[Task]) -> Unread:
    """The nodes whose agents read an older order format than the task needs. A node that runs a
    process of the task is not among them: its agent has read such an order."""
    needs = {task.id: needed for task in tasks if (needed := needed_format(task.spec))}
    if not needs:
        return {}
    found: dict[int, frozenset[str]] = {}
    for task in tasks:
        here = {rank.slot.node for rank in task.ranks.values()}
        found[task.id] = frozenset(
            node.name
            for node in state.nodes.values()
            if node.order_format < needs.get(task.id, 0) and node.name not in here
        )
    return {key: names for key, names in found.items() if names}


def reads(node: Node, task: Task) -> bool:
    """Whether a process of the task can start on the node, as in `unread`: its agent may have been
    replaced by an older one while the task has a seat there."""
    return (
        node.order_format >= ORDER_FORMAT_VERSION
        or node.order_format >= needed_format(task.spec)
        or any(rank.slot.node == node.name for rank in task.ranks.values())
    )


def pools(tasks: Sequence[Task], slots: Sequence[Slot], nodes: Unread) -> dict[int, Pool]:
    """The slots of each task in `nodes`. `tasks`: all whose seats the plan may change."""
    claimed = {seat.slot for task in tasks for seat in task.target}
    found: dict[int, Pool] = {}
    for task in tasks:
        if names := nodes.get(task.id):
            mine = {seat.slot for seat in task.target}
            may = [slot for slot in slots if slot.node not in names]
            found[task.id] = Pool(
                tuple(slot for slot in may if slot in mine),
                tuple(slot for slot in may if slot not in claimed),
            )
    return found


def most_slots(tasks: Sequence[Task], found: Mapping[int, Pool]) -> dict[int, int]:
    """The most slots of each task, so that all may have as many at once: the first come first."""
    most: dict[int, int] = {}
    num_reserved = 0
    for task in tasks:
        if (pool := found.get(task.id)) is not None:
            room = len(pool.own) + max(len(pool.free) - num_reserved, 0)
            most[task.id] = room
            largest = max((size for size in task.spec.slots.counts if size <= room), default=0)
            num_reserved += largest if largest > len(pool.own) else 0
    return most
