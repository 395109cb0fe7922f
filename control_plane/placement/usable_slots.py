"""The tasks that may not have every slot, and which slots are left for them.

There are two reasons. Agents of some nodes cannot read the task's orders. Or the task fails by
itself: until it has passed its point of failure, it takes no slot from another task, and none that
it suspects.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ...events.records.order_format import ORDER_FORMAT_VERSION, needed_format
from ...events.records.types import Slot
from ..state.cluster import ClusterState
from ..state.node import Node
from ..state.task import Task


class Barred(Struct, frozen=True):
    """What one task may not have, apart from slots of other tasks."""

    unread: frozenset[str] = frozenset()
    """Nodes whose agents read an older order format than the task needs."""
    suspected: frozenset[Slot] = frozenset()
    """Slots that ranks of the task have left because they failed there."""
    slots_max: int = 0
    """The most slots that the task may have; 0: no such limit."""
    fails: bool = False
    """Whether it fails by itself (`fails_by_itself`)."""


Limits = Mapping[int, Barred]
"""By task. Tasks that may have every slot, also those of other tasks, are absent."""


class Pool(Struct, frozen=True):
    """The slots that one task may have: its own, and those of no task."""

    own: tuple[Slot, ...]
    free: tuple[Slot, ...]


def limits(state: ClusterState, tasks: Sequence[Task]) -> Limits:
    """What the tasks may not have. A node that runs a process of a task can read its orders: its
    agent has read some."""
    needs = {task.id: needed for task in tasks if (needed := needed_format(task.spec))}
    barred: dict[int, Barred] = {}
    for task in tasks:
        unread: frozenset[str] = frozenset()
        if needs:
            here = {rank.slot.node for rank in task.ranks.values()}
            unread = frozenset(
                node.name
                for node in state.nodes.values()
                if node.order_format < needs.get(task.id, 0) and node.name not in here
            )
        fails = fails_by_itself(state, task)
        if unread or fails or task.suspects or task.slots_max:
            left = [suspect.slot for suspect in task.suspects.values() if not suspect.is_exchanged]
            barred[task.id] = Barred(unread, frozenset(left), task.slots_max, fails)
    return barred


def fails_by_itself(state: ClusterState, task: Task) -> bool:
    """Whether the task's own processes fail on a slot that nothing else is wrong with. If all slots
    where they failed are out by a device error or a check, or their nodes are lost or quarantined,
    that explains the failures."""
    return task.failures is not None and any(
        (node := state.nodes.get(slot.node)) is not None
        and node.health not in ("lost", "left")
        and node.quarantine is None
        and (slot in task.blamed_slots or not node.is_disabled(slot.index))
        for slot in task.failures.slots
    )


def reads(node: Node, task: Task) -> bool:
    """Whether a process of the task can start on the node: its agent may have been replaced by an
    older one while the task has a seat there."""
    return (
        node.order_format >= ORDER_FORMAT_VERSION
        or node.order_format >= needed_format(task.spec)
        or any(rank.slot.node == node.name for rank in task.ranks.values())
    )


def pools(tasks: Sequence[Task], slots: Sequence[Slot], barred: Limits) -> dict[int, Pool]:
    """The slots of each task in `barred`. `tasks`: all whose seats the plan may change."""
    claimed = {seat.slot for task in tasks for seat in task.target} if barred else set[Slot]()
    given: dict[int, Pool] = {}
    for task in tasks:
        if (bars := barred.get(task.id)) is not None:
            mine = {seat.slot for seat in task.target}
            may = [
                slot
                for slot in slots
                if slot.node not in bars.unread and slot not in bars.suspected
            ]
            given[task.id] = Pool(
                tuple(slot for slot in may if slot in mine),
                tuple(slot for slot in may if slot not in claimed),
            )
    return given


def most_slots(tasks: Sequence[Task], given: Mapping[int, Pool], barred: Limits) -> dict[int, int]:
    """The most slots of each task, so that all may have as many at once: the first come first."""
    most: dict[int, int] = {}
    num_reserved = 0
    for task in tasks:
        if (pool := given.get(task.id)) is not None:
            room = len(pool.own) + max(len(pool.free) - num_reserved, 0)
            room = min(room, barred[task.id].slots_max or room)
            most[task.id] = room
            largest = max((size for size in task.spec.slots.counts if size <= room), default=0)
            num_reserved += largest if largest > len(pool.own) else 0
    return most
