"""Groups: ranks that follow one another and belong on one node (tensor parallel).

Every process of a command starts anew where a seat of it changes. So a command that is changed
anyway takes whole groups first and keeps of its slots what it can; one that is not stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...events.records.types import Labels, Seat, Slot
from ..state.task import Task
from ..throughput import table
from ..throughput.state_size import seat_bytes
from .free_slots import Room, neighbours
from .topology_spread import Taken, elsewhere


def size(task: Task, count: int) -> int:
    """So many ranks are a group where the task has `count` slots: TP of its layout on so many; of
    training without TP a replica, so that another one can be elsewhere. 1: any node will do."""
    train = task.spec.training
    axes = table.axes(task.spec, task.modelled, count)
    if axes is None:
        return 1
    return axes.pp if train is not None and axes.tp == 1 else axes.tp


def deal(tasks: Sequence[Task], wanted: Mapping[int, int], slots: Sequence[Slot],
         given: Collection[Slot], where: Mapping[str, Labels]) -> tuple[Taken, Room]:
    """By task: the slots of its whole groups; and what room is left. `given`: to others.

    The largest groups first. Where sizes divide one another, as powers of two do, all groups are
    dealt if there is any way to: whichever nodes the larger ones take, the room for smaller ones is
    the same. A task's groups that are on one node already stay, unless that leaves fewer seats in
    groups.
    """
    room = Room(slots, given, where)
    found = _deal(tasks, wanted, room, where, stay=True)
    num = sum(map(len, found.values()))
    if num < sum(wanted[task.id] - wanted[task.id] % size(task, wanted[task.id])
                 for task in tasks):
        other = Room(slots, given, where)
        moved = _deal(tasks, wanted, other, where, stay=False)
        if sum(map(len, moved.values())) > num:
            return moved, other
    return found, room


def _deal(tasks: Sequence[Task], wanted: Mapping[int, int], room: Room,
          where: Mapping[str, Labels], *, stay: bool) -> Taken:
    """`stay`: all tasks keep their whole groups before any is given another."""
    hands = [_Hand(task, wanted[task.id], room, where) for task in tasks]
    hands.sort(key=lambda hand: (-hand.each, -hand.heavy, hand.key))
    for hand in hands if stay else ():
        hand.keep()
    for hand in hands:
        hand.keep()
        hand.fill()
    return {hand.key: hand.taken for hand in hands}


class _Hand:
    """What one task is dealt, group by group."""

    def __init__(self, task: Task, count: int, room: Room, where: Mapping[str, Labels]) -> None:
        self.key, self.each, self.heavy = task.id, size(task, count), seat_bytes(task, count)
        self.taken: list[Slot] = []
        self._left: int = count // self.each
        self._most = (count - away) // self.each if (away := elsewhere(task, count)) else count
        """Groups on one node, as long as there is another."""
        self._room, self._where = room, where
        self._own: dict[str, list[Slot]] = {}
        """Its present slots by node."""
        for seat in task.target:
            self._own.setdefault(seat.slot.node, []).append(seat.slot)

    def keep(self) -> None:
        """Whole groups where it has one."""
        free = {node: self._free(node) for node in self._own}
        for node in sorted(free, key=lambda node: (-len(free[node]), node)):
            self._take(node, len(free[node]) // self.each)

    def fill(self) -> None:
        """The others: where most of one is kept, then on its nodes, then as near as there is room;
        at last on whichever node."""
        self._fill()
        self._most = self._left + len(self.taken)
        self._fill()

    def _fill(self) -> None:
        free = {node: self._free(node) for node in self._own}
        for node in sorted(free, key=lambda node: (-len(free[node]), node)):
            if free[node]:
                self._take(node, 1)
        nodes = dict.fromkeys(sorted([*self._own, *(slot.node for slot in self.taken)]))
        for node in sorted(nodes, key=lambda node: (-self._room.on(node), node)):
            self._take(node, self._left)
        near = neighbours(nodes, self._where)
        while self._left and (found := self._nearest(near)) is not None:
            self._take(found, self._left)
            for known, new in zip(near, neighbours([found], self._where), strict=True):
                known.update(new)

    def _nearest(self, near: tuple[dict[str, None], dict[str, None]]) -> str | None:
        found = self._room.nearest(near, self.each)
        if found is None or self._may(found):
            return found
        return self._room.roomiest(but=lambda node: not self._may(node))

    def _may(self, node: str) -> int:
        """Groups that it may take there."""
        there = sum(slot.node == node for slot in self.taken) // self.each
        return max(min(self._room.on(node) // self.each, self._most - there), 0)

    def _free(self, node: str) -> set[Slot]:
        """Its present slots there that nobody was given."""
        return set(self._room.slots(node)).intersection(self._own.get(node, ()))

    def _take(self, node: str, num: int) -> None:
        """So many groups at most."""
        num = min(num, self._left, self._may(node))
        if num:
            self.taken += self._room.take(node, num * self.each, self._free(node))
            self._left -= num


def ranked(slots: Sequence[Slot], *sizes: int) -> list[Slot]:
    """In the order of ranks: node by node in groups of the first size, then what is left of nodes
    in groups of the next, at the end the rest."""
    on: dict[str, list[Slot]] = {}
    for slot in sorted(slots):
        on.setdefault(slot.node, []).append(slot)
    if not sizes:
        return [slot for own in on.values() for slot in own]
    each = sizes[0]
    whole = [slot for own in on.values() for slot in own[:len(own) // each * each]]
    rest = [slot for own in on.values() for slot in own[len(own) // each * each:]]
    return whole + ranked(rest, *sizes[1:])


def torn(seats: Sequence[Seat], each: int) -> int:
    """How many groups of `each` ranks are on more than one node; the last ranks may be no group."""
    nodes = [seat.slot.node for seat in sorted(seats)]
    return sum(len(set(nodes[at:at + each])) > 1
               for at in range(0, len(nodes) // each * each, each))


def why_torn(task: Task, seats: Sequence[Seat], slots: Sequence[Slot]) -> str:
    """What a person should know of groups that are not on one node; empty where all are."""
    each = size(task, len(seats))
    if not (num := torn(seats, each)):
        return ""
    on: dict[str, int] = {}
    for slot in slots:
        on[slot.node] = on.get(slot.node, 0) + 1
    most = max(on.values(), default=0)
    why = (f"no node has more than {most} slot{'s' * (most != 1)}" if most < each
           else f"too few nodes have {each} together")
    return (f"; {num} of {len(seats) // each} tensor-parallel groups of {each} "
            f"{'is' if num == 1 else 'are'} not on one node: {why}")
