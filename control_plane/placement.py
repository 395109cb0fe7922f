"""From counts to seats: which task sits where.

The hard rule: a training task of two or more seats is on two nodes, so that all of its state has
holders on both. It is kept wherever it can be without moving a seat of a task that stays as it
is: a healthy task is not moved for the spread alone, its own or another's. One that is placed
anew, grows, shrinks or lost a seat may have more of its seats moved, but only for that rule and
as few as it takes. Apart from it every seat that can be kept is kept, and few nodes are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from ..events.orders import Seat, Slot
from .room import Room
from .state import Task

Taken = dict[int, list[Slot]]
"""Slots by task."""
Move = tuple[int, str, str]
"""One seat of a task from a node to another."""


def place(tasks: Sequence[Task], counts: Sequence[int],
          slots: Sequence[Slot]) -> dict[int, tuple[Seat, ...]]:
    """By task: the seats of `counts[i]` slots for task i; the counts fit into `slots`."""
    wanted = {task.id: count for task, count in zip(tasks, counts, strict=True)}
    usable = set(slots)
    taken = _claims(tasks, wanted, usable)
    room = Room(usable.difference(*taken.values()))
    for task in tasks:
        own = taken[task.id]
        own += _choose(room, own, wanted[task.id] - len(own))
    movable = [task for task in tasks if len(task.target) != wanted[task.id]
               or any(seat.slot not in usable for seat in task.target)]
    _spread(movable, taken, slots)
    return {task.id: _seats(task, taken[task.id]) for task in tasks}


# --- what is kept -------------------------------------------------------------------------------
def _claims(tasks: Sequence[Task], wanted: dict[int, int], usable: set[Slot]) -> Taken:
    """What each keeps: first seats with a process, then processes that were to leave, then
    seats that are still empty. So two tasks never wait for each other's slots."""
    taken: Taken = {}
    for task in tasks:
        here = [seat for seat in task.target if seat.slot in usable and seat.rank in task.ranks]
        taken[task.id] = [seat.slot for seat in _keep(here, wanted[task.id])]
    claimed = {slot for own in taken.values() for slot in own}
    for kind in (_processes, _empty):
        for task in tasks:
            for slot in kind(task):
                if slot in usable and slot not in claimed and (
                        len(taken[task.id]) < wanted[task.id]):
                    taken[task.id].append(slot)
                    claimed.add(slot)
    return taken


def _processes(task: Task) -> list[Slot]:
    """Where members are that may stay."""
    return sorted(rank.slot for rank in task.living_members() if rank.sound)


def _empty(task: Task) -> list[Slot]:
    return [seat.slot for seat in sorted(task.target) if seat.rank not in task.ranks]


def _keep(seats: Sequence[Seat], count: int) -> list[Seat]:
    """Drop seats until `count` are left: from the fullest node of two, else from the emptiest.

    Among nodes that are equally full the highest rank goes.
    """
    on: dict[str, list[Seat]] = {}
    for seat in sorted(seats):
        on.setdefault(seat.slot.node, []).append(seat)
    left = len(seats)
    heap = [(len(own), -own[-1].rank, node) for node, own in on.items()]
    heapify(heap)
    while left > count and (len(on) != 2 or count < 2):
        _, _, node = heappop(heap)  # what is emptiest stays so until it is empty
        for _ in range(min(left - count, len(on[node]))):
            on[node].pop()
            left -= 1
        if not on[node]:
            del on[node]
    while left > count:
        max(on.values(), key=lambda own: (len(own), own[-1].rank)).pop()
        left -= 1
    return sorted(seat for own in on.values() for seat in own)


# --- what is new --------------------------------------------------------------------------------
def _choose(room: Room, own: Sequence[Slot], count: int) -> list[Slot]:
    """`count` slots: own nodes first, then the emptiest; two nodes where there are two."""
    chosen: list[Slot] = []
    nodes = {slot.node for slot in own}
    near = [(-room.on(node), node) for node in sorted(nodes) if room.on(node)]
    heapify(near)
    while (left := count - len(chosen)) > 0:
        elsewhere = room.roomiest(nodes) if left == 1 and len(nodes) == 1 else ""
        node = elsewhere or (near[0][1] if near else room.roomiest())
        if not node:
            break
        alone = len(near) <= 1 and left > 1  # the last seat may have to go elsewhere
        chosen += room.take(node, min(room.on(node), left - 1) if alone else 1)
        nodes.add(node)
        if near:
            heappop(near)
        if room.on(node):
            heappush(near, (-room.on(node), node))
    return chosen


def _seats(task: Task, slots: Sequence[Slot]) -> tuple[Seat, ...]:
    """Numbers for the slots: a seat or a process that is there keeps its own."""
    if not task.is_train:
        every = sorted(slots)
        if every == sorted(seat.slot for seat in task.target):
            return task.target
        return tuple(Seat(number, slot) for number, slot in enumerate(every))
    known = {rank.slot: rank.rank for rank in task.living_members()}
    known |= {seat.slot: seat.rank for seat in task.target}
    used = {known[slot] for slot in slots if slot in known} | set(task.ranks)
    numbers = (number for number in range(len(used) + len(slots)) if number not in used)
    return tuple(sorted(Seat(known[slot] if slot in known else next(numbers), slot)
                        for slot in sorted(slots)))


# --- the hard rule ------------------------------------------------------------------------------
def _spread(movable: Sequence[Task], taken: Taken, slots: Sequence[Slot]) -> None:
    """Bring every movable task of two or more seats onto two nodes, where that is possible.

    No node may hold all seats of such a task: a flow from tasks to nodes with that bound on each
    edge. One augmenting path for each task that breaks it: as in any flow, where there is none
    the rule cannot be kept for more of them.
    """
    tasks = {task.id: task for task in movable}
    for key, task in tasks.items():
        path = _path(key, tasks, taken, slots) if task.is_train and _all_on(taken[key]) else None
        if path is not None:
            _follow(path, tasks, taken, slots)


def _all_on(slots: Sequence[Slot]) -> str:
    """The node that holds all of two or more, else empty."""
    return slots[0].node if len(slots) > 1 and len(_by_node(slots)) == 1 else ""


def _path(first: int, tasks: dict[int, Task], taken: Taken,
          slots: Sequence[Slot]) -> list[Move] | None:
    """The cheapest moves that take a seat of task `first` off its node, None where there are none.

    Each goes where the next makes room; the last into a free slot, or to where the first was.
    A move of a process costs 1, unless it lets another keep its seat; of an empty seat nothing.
    """
    home = _all_on(taken[first])
    used = {slot for own in taken.values() for slot in own}
    room = dict.fromkeys(sorted(slot.node for slot in slots), 0)
    for slot in slots:
        room[slot.node] += slot not in used
    on = {key: _by_node(taken[key]) for key in tasks}
    best: dict[str, tuple[int, list[Move]]] = {
        node: (_cost(tasks[first], taken[first], home, node), [(first, home, node)])
        for node in room if node != home}
    todo = list(best)
    while todo:
        node = todo.pop(0)
        cost, path = best[node]
        moved = [move[0] for move in path]
        for key in [key for key in tasks if node in on[key] and key not in moved]:
            most = len(taken[key]) - 1 if tasks[key].is_train and len(taken[key]) > 1 else None
            for other in [x for x in room if most is None or on[key][x] < most]:
                step = cost + _cost(tasks[key], taken[key], node, other)
                if other != node and (other not in best or step < best[other][0]):
                    best[other] = step, [*path, (key, node, other)]
                    todo.append(other)
    ends = [(cost, len(path), path) for node, (cost, path) in best.items()
            if room[node] or node == home]
    return min(ends)[2] if ends else None


def _cost(task: Task, own: Sequence[Slot], node: str, other: str) -> int:
    """1 if a process is in each seat on `node`; less 1 if one without a seat is on `other`."""
    there = _at(task)
    return int(all(slot in there for slot in own if slot.node == node)) - int(
        any(slot.node == other and slot not in own for slot in there))


def _follow(path: Sequence[Move], tasks: dict[int, Task], taken: Taken,
            slots: Sequence[Slot]) -> None:
    """Carry out the moves from the last to the first, each into the slot that is free by then."""
    used = {slot for own in taken.values() for slot in own}
    left = [max((slot not in _at(tasks[key]), slot in _at(tasks[into]), slot)
                for slot in taken[key] if slot.node == node)[2]
            for (key, node, _), (into, _, _) in zip(path, [path[-1], *path], strict=False)]
    last, _, end = path[-1]
    ends = [slot for slot in slots if slot.node == end and (slot not in used or slot == left[0])]
    into = [*left[1:], min((slot not in _at(tasks[last]), slot) for slot in ends)[1]]
    for (key, _, _), old, new in zip(path, left, into, strict=True):
        taken[key].remove(old)
        taken[key].append(new)


def _at(task: Task) -> list[Slot]:
    """Where its processes are."""
    return [rank.slot for rank in task.ranks.values()]


def _by_node(slots: Iterable[Slot]) -> Counter[str]:
    return Counter(slot.node for slot in slots)


def why_placed(task: Task, seats: Sequence[Seat]) -> str:
    """What a person should know of this placement, and what the loss of a node would cost."""
    nodes = sorted({seat.slot.node for seat in seats})
    if not task.is_train or len(nodes) > 1:
        return f"{len(seats)} seat{'s' * (len(seats) > 1)} on {' '.join(nodes)}"
    num, since = task.lost_with(nodes[0]), "checkpoint" if task.saved_iteration else "start"
    elsewhere = [copy for copy in task.copies if copy.node != nodes[0]]
    where = "no state elsewhere"
    if elsewhere and max(copy.step_version for copy in elsewhere) >= task.saved_iteration:
        since, where = "copy", f"a copy on {' '.join(sorted({copy.node for copy in elsewhere}))}"
    lost = f"the {num} iterations since its {since}" if num > 0 else f"all since its {since}"
    what = "one seat" if len(seats) == 1 else f"all {len(seats)} seats"
    return f"{what} on {nodes[0]}, {where}: its loss would cost {lost}"
