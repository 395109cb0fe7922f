"""Tensor-parallel groups: consecutive ranks that belong on one node.

If a seat of a command changes, all its processes restart. So if a command changes, whole groups
have precedence over the slots that it could keep. An unchanged command stays where it is.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...events.records.types import Labels, Seat, Slot
from ..state.task import Task
from ..throughput import table
from ..throughput.state_size import seat_bytes
from .free_slots import FreeSlots, domain, neighbours
from .topology_spread import Taken, num_elsewhere


def size(task: Task, count: int) -> int:
    """The ranks of one group if the task has `count` slots: TP of the layout. For training without
    TP: the ranks of a replica, so that another replica can be on another node. 1: no groups."""
    train = task.spec.training
    axes = table.axes(task.spec, task.modelled, count)
    if axes is None:
        return 1
    return axes.pp if train is not None and axes.tp == 1 else axes.tp


def has_tensor_axis(task: Task, count: int) -> bool:
    """Whether the groups are tensor-parallel ones. A pipeline's ranks may be on several nodes."""
    axes = table.axes(task.spec, task.modelled, count)
    return axes is not None and axes.tp > 1


def assign_groups(
    tasks: Sequence[Task],
    wanted: Mapping[int, int],
    slots: Sequence[Slot],
    given: Collection[Slot],
    where: Mapping[str, Labels],
) -> tuple[Taken, FreeSlots]:
    """Assign slots to whole groups: (slots by task, the remaining free slots). `given`: slots of
    other tasks. The largest groups come first: if sizes divide one another, this never costs a
    smaller one its place. Groups on one node stay, unless then fewer seats are in groups."""
    room = FreeSlots(slots, given, where)
    found = _deal(tasks, wanted, room, where, stay=True)
    num = sum(map(len, found.values()))
    if num < sum(wanted[task.id] - wanted[task.id] % size(task, wanted[task.id]) for task in tasks):
        other = FreeSlots(slots, given, where)
        moved = _deal(tasks, wanted, other, where, stay=False)
        if sum(map(len, moved.values())) > num:
            return moved, other
    return found, room


def _deal(
    tasks: Sequence[Task],
    wanted: Mapping[int, int],
    room: FreeSlots,
    where: Mapping[str, Labels],
    *,
    stay: bool,
) -> Taken:
    """With `stay`, all tasks keep their whole groups before any task gets new groups."""
    assignments = [_GroupAssignment(task, wanted[task.id], room, where) for task in tasks]
    assignments.sort(key=lambda one: (-one.each, -one.num_bytes, one.key))
    for assignment in assignments if stay else ():
        assignment.keep()
    for assignment in assignments:
        assignment.keep()
        assignment.fill()
    return {assignment.key: assignment.taken for assignment in assignments}


class _GroupAssignment:
    def __init__(
        self, task: Task, count: int, room: FreeSlots, where: Mapping[str, Labels]
    ) -> None:
        self.key, self.each, self.num_bytes = task.id, size(task, count), seat_bytes(task, count)
        self.taken: list[Slot] = []
        self._left: int = count // self.each
        self._most = (count - away) // self.each if (away := num_elsewhere(task, count)) else count
        """The most groups on one node, as long as other nodes can take the rest."""
        self._room, self._where = room, where
        self._own: dict[str, list[Slot]] = {}
        """The task's present slots by node."""
        for seat in task.target:
            self._own.setdefault(seat.slot.node, []).append(seat.slot)

    def keep(self) -> None:
        """Keep present slots that make up whole groups on a node."""
        free = {node: self._free(node) for node in self._own}
        for node in sorted(free, key=lambda node: (-len(free[node]), node)):
            self._take(node, len(free[node]) // self.each)

    def fill(self) -> None:
        """Assign the remaining groups, as near to the present slots as possible."""
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
        return self._room.most_free(but=lambda node: not self._may(node))

    def _may(self, node: str) -> int:
        """The number of further groups that the node may get."""
        there = sum(slot.node == node for slot in self.taken) // self.each
        return max(min(self._room.on(node) // self.each, self._most - there), 0)

    def _free(self, node: str) -> set[Slot]:
        """The task's present slots on the node that are free."""
        return set(self._room.slots(node)).intersection(self._own.get(node, ()))

    def _take(self, node: str, num: int) -> None:
        num = min(num, self._left, self._may(node))
        if num:
            self.taken += self._room.take(node, num * self.each, self._free(node))
            self._left -= num


def exchange(
    alone: Sequence[Task],
    grouped: Sequence[Task],
    taken: Taken,
    room: FreeSlots,
    where: Mapping[str, Labels],
) -> None:
    """Change `taken` so that the tasks `alone`, which have no groups, are on two nodes, if possible
    on two racks: a whole group of another task takes their slots. No group is split. Exact for
    groups of one size: an exchange for several smaller ones is not tried."""
    for task in sorted(alone, key=lambda task: task.id):
        own = taken[task.id]
        if num_elsewhere(task, len(own)) != 1 or len({slot.node for slot in own}) > 1:
            continue
        home = own[0].node
        found = min(
            (
                offer
                for other in grouped
                for offer in _offers(other, taken[other.id], home, where)
                if len(offer.slots) - room.on(home) < len(own)
            ),
            default=None,
        )
        if found is None:
            continue
        num = max(len(found.slots) - room.on(home), 1)
        given, free = _idle_first(task, own)[:num], room.slots(home)[: len(found.slots) - num]
        got, freed = found.slots[:num], found.slots[num:]
        for one, other in zip(free, freed, strict=True):
            room.exchange(one, other)
        moves = ((task.id, given, got), (found.task, found.slots, (*given, *free)))
        for key, left, joined in moves:
            taken[key] = [slot for slot in taken[key] if slot not in left] + list(joined)


class _Offer(NamedTuple):
    """A whole group of a task that may move to another node; the least offer is the best."""

    is_same_rack: bool
    num_processes: int
    task: int
    slots: tuple[Slot, ...]


def _offers(
    task: Task, slots: Sequence[Slot], home: str, where: Mapping[str, Labels]
) -> Iterator[_Offer]:
    """A group of each other node that may move to `home`. The task stays on two nodes if it is."""
    each, at = size(task, len(slots)), {seat.slot for seat in task.target}
    most = len(slots) - num_elsewhere(task, len(slots))
    on: dict[str, list[Slot]] = {}
    for slot in _idle_first(task, slots):
        on.setdefault(slot.node, []).append(slot)
    num_home = len(on.get(home, ()))
    for node, there in on.items():
        if node != home and len(there) >= each and not num_home <= most < num_home + each:
            yield _Offer(
                domain(node, where) == domain(home, where),
                len(at.intersection(there[:each])),
                task.id,
                tuple(there[:each]),
            )


def _idle_first(task: Task, slots: Sequence[Slot]) -> list[Slot]:
    """The slots, those that are not the task's present ones first."""
    at = {seat.slot for seat in task.target}
    return sorted(slots, key=lambda slot: (slot in at, slot))


def ranked(slots: Sequence[Slot], *sizes: int) -> list[Slot]:
    """Slots in rank order: by node, groups of the first size, then of the next, then the rest."""
    on: dict[str, list[Slot]] = {}
    for slot in sorted(slots):
        on.setdefault(slot.node, []).append(slot)
    if not sizes:
        return [slot for own in on.values() for slot in own]
    each = sizes[0]
    whole = [slot for own in on.values() for slot in own[: len(own) // each * each]]
    rest = [slot for own in on.values() for slot in own[len(own) // each * each :]]
    return whole + ranked(rest, *sizes[1:])


def num_split(task: Task, seats: Sequence[Seat], each: int) -> int:
    """The number of whole groups of `each` ranks that are split across nodes. A command's groups
    are consecutive ranks. A training task forms its groups from the ranks of each node."""
    if task.spec.training is not None:
        on = Counter(seat.slot.node for seat in seats)
        return max(len(seats) // each - sum(num // each for num in on.values()), 0)
    nodes = [seat.slot.node for seat in sorted(seats)]
    return sum(
        len(set(nodes[at : at + each])) > 1 for at in range(0, len(nodes) // each * each, each)
    )


def why_split(task: Task, seats: Sequence[Seat], slots: Sequence[Slot]) -> str:
    """Explain why groups are split across nodes. Empty if no group is split."""
    each = size(task, len(seats))
    if not (num := num_split(task, seats, each)):
        return ""
    on = Counter(slot.node for slot in slots)
    most, num_groups = max(on.values(), default=0), len(seats) // each
    why = (
        f"no node has more than {most} slot{'s' * (most != 1)}"
        if most < each
        else f"too few nodes have {each} together"
        if sum(have // each for have in on.values()) < num_groups
        else f"other tasks have slots of the nodes with {each}"
    )
    kind = "tensor-parallel groups" if has_tensor_axis(task, len(seats)) else "pipelines"
    return (
        f"; {num} of {num_groups} {kind} of {each} "
        f"{'is' if num == 1 else 'are'} not on one node: {why}"
    )
