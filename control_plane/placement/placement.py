"""From counts to seats: which task runs where.

docs/ARCHITECTURE.md, "Placement", has the rules and their order.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

from ...events.records.types import Labels, Seat, Slot
from ..state.memory_checkpoints import whole_checkpoints
from ..state.task import Task
from ..throughput.state_size import seat_bytes
from . import tensor_groups, usable_slots
from .free_slots import FreeSlots, domain, neighbours
from .topology_spread import Taken, spread
from .usable_slots import Limits

Where = Mapping[str, Labels]
"""Labels by node."""


def place(
    tasks: Sequence[Task],
    counts: Sequence[int],
    slots: Sequence[Slot],
    where: Where,
    barred: Limits | None = None,
) -> dict[int, tuple[Seat, ...]]:
    """The seats by task: `counts[i]` slots for task i. The counts must fit into `slots`, and those
    of tasks in `barred` into what it leaves (usable_slots.most_slots): these come first."""
    found: dict[int, tuple[Seat, ...]] = {}
    taken: set[Slot] = set()
    limited = usable_slots.pools(tasks, slots, barred or {})
    for task, count in zip(tasks, counts, strict=True):
        if (pool := limited.get(task.id)) is not None:
            more = pool.free if count > len(pool.own) else ()
            room = [slot for slot in (*pool.own, *more) if slot not in taken]
            found |= _place([task], [count], sorted(room), where)
            taken |= {seat.slot for seat in found[task.id]}
    rest = [
        (task, count) for task, count in zip(tasks, counts, strict=True) if task.id not in limited
    ]
    return found | _place(
        [task for task, _ in rest],
        [count for _, count in rest],
        [slot for slot in slots if slot not in taken] if taken else slots,
        where,
    )


def _place(
    tasks: Sequence[Task], counts: Sequence[int], slots: Sequence[Slot], where: Where
) -> dict[int, tuple[Seat, ...]]:
    wanted = {task.id: count for task, count in zip(tasks, counts, strict=True)}
    usable = set(slots)
    taken = _claims(tasks, wanted, usable, where)
    grouped = [
        task
        for task in tasks
        if tensor_groups.size(task, wanted[task.id]) > 1
        and (
            len(task.target) != wanted[task.id]
            or sorted(taken[task.id]) != sorted(seat.slot for seat in task.target)
        )
    ]
    for task in grouped:
        taken[task.id] = []
    given = {slot for own in taken.values() for slot in own}
    dealt, room = tensor_groups.assign_groups(grouped, wanted, slots, given, where)
    taken |= dealt
    short = [task for task in tasks if len(taken[task.id]) < wanted[task.id]]
    for task in sorted(
        short,
        key=lambda task: (  # a task without slots has no near node
            not taken[task.id],
            -seat_bytes(task, wanted[task.id]),
            task.id,
        ),
    ):
        own = taken[task.id]
        own += _choose(room, own, wanted[task.id] - len(own), where)
    movable = [
        task
        for task in tasks
        if len(task.target) != wanted[task.id]
        or any(seat.slot not in usable for seat in task.target)
    ]
    alone = [task for task in movable if task.id not in dealt]
    spread(alone, taken, room, where, {})
    if dealt:  # copies are on two nodes in any case: no tensor-parallel group is split for a spread
        tensor_groups.exchange(alone, grouped, taken, room, where)
        spread(
            movable,
            taken,
            room,
            where,
            {
                task.id: tensor_groups.size(task, wanted[task.id])
                for task in grouped
                if tensor_groups.has_tensor_axis(task, wanted[task.id])
            },
        )
    return {task.id: _seats(task, taken[task.id]) for task in tasks}


# --- kept slots ---
def _claims(
    tasks: Sequence[Task], wanted: dict[int, int], usable: set[Slot], where: Where
) -> Taken:
    """The slots that each task keeps. Seats with a process come first, then slots of processes that
    were to leave, then empty seats. So no two tasks wait for each other's slots."""
    taken: Taken = {}
    for task in tasks:
        here = [seat for seat in task.target if seat.slot in usable and seat.rank in task.ranks]
        taken[task.id] = [seat.slot for seat in _keep(here, wanted[task.id], where)]
    claimed = {slot for own in taken.values() for slot in own}
    short = [task for task in tasks if len(taken[task.id]) < wanted[task.id]]
    for kind in (_processes, _empty):
        for task in short:
            for slot in kind(task):
                if (
                    slot in usable
                    and slot not in claimed
                    and (len(taken[task.id]) < wanted[task.id])
                ):
                    taken[task.id].append(slot)
                    claimed.add(slot)
    return taken


def _processes(task: Task) -> list[Slot]:
    """The slots of members that may stay, also of members without a seat."""
    return sorted(rank.slot for rank in task.living_members() if rank.is_healthy)


def _empty(task: Task) -> list[Slot]:
    return [seat.slot for seat in sorted(task.target) if seat.rank not in task.ranks]


def _keep(seats: Sequence[Seat], count: int, where: Where) -> list[Seat]:
    """Drop seats until `count` are left, such that two racks and few nodes remain: of two racks
    from the fuller one, else from the emptiest; in a rack from the emptiest node, the highest rank
    first. If all seats are on one rack, nodes count as racks."""
    drop = len(seats) - count
    if drop <= 0:
        return sorted(seats)
    racks: dict[str, list[Seat]] = {}
    for seat in sorted(seats):
        racks.setdefault(domain(seat.slot.node, where), []).append(seat)
    if len(racks) == 1 and len({seat.slot.node for seat in seats}) > 1:
        return _keep(seats, count, {})
    heap = [(len(own), -own[-1].rank, rack) for rack, own in racks.items()]
    heapify(heap)
    while drop > 0 and (len(racks) != 2 or count < 2):
        _, _, rack = heappop(heap)  # it remains the emptiest rack until it is empty
        num = min(drop, len(racks[rack]))
        racks[rack] = _emptiest_first(racks[rack])[num:]
        drop -= num
        if not racks[rack]:
            del racks[rack]
    if drop > 0:
        left = [_emptiest_first(own)[::-1] for own in racks.values()]
        for _ in range(drop):
            max(left, key=lambda own: (len(own), own[-1].rank)).pop()
        return sorted(seat for own in left for seat in own)
    return sorted(seat for own in racks.values() for seat in own)


def _emptiest_first(seats: Sequence[Seat]) -> list[Seat]:
    """Seats by node, the emptiest node first, then by rank; the highest rank comes first."""
    on: dict[str, list[Seat]] = {}
    for seat in sorted(seats, reverse=True):
        on.setdefault(seat.slot.node, []).append(seat)
    return [
        seat
        for own in sorted(on.values(), key=lambda own: (len(own), -own[0].rank))
        for seat in own
    ]


# --- new slots ---
def _choose(room: FreeSlots, own: Sequence[Slot], count: int, where: Where) -> list[Slot]:
    """Choose `count` slots on own, then near nodes; on two racks or nodes if possible."""
    chosen: list[Slot] = []
    nodes = dict.fromkeys(sorted(slot.node for slot in own))
    racks = dict.fromkeys(domain(node, where) for node in nodes)
    near = [(-room.on(node), node) for node in nodes if room.on(node)]
    heapify(near)
    near_by = neighbours(nodes, where)
    while (left := count - len(chosen)) > 0:
        node = _elsewhere(room, nodes, racks, where) if left == 1 else None
        if node is None:
            node = near[0][1] if near else room.nearest(near_by)
        if node is None:
            break
        alone = len(near) <= 1 and left > 1  # the last seat may need another node
        chosen += room.take(node, min(room.on(node), left - 1) if alone else 1)
        nodes[node] = racks[domain(node, where)] = None
        for known, new in zip(near_by, neighbours([node], where), strict=True):
            known.update(new)
        if near:
            heappop(near)
        if room.on(node):
            heappush(near, (-room.on(node), node))
    return chosen


def _elsewhere(
    room: FreeSlots, nodes: Collection[str], racks: Collection[str], where: Where
) -> str | None:
    """A node for the last seat, if else all seats were on one rack or node; None: any node."""
    if len(racks) != 1:
        return None
    found = room.most_free(but=lambda node: domain(node, where) in racks)
    if found is None and len(nodes) == 1:
        found = room.most_free(but=lambda node: node in nodes)
    return found


def _seats(task: Task, slots: Sequence[Slot]) -> tuple[Seat, ...]:
    """Assign ranks to the slots. Existing seats and processes keep their rank."""
    if sorted(slots) == sorted(seat.slot for seat in task.target):
        return task.target
    if not task.heals_in_memory:
        every = tensor_groups.ranked(slots, tensor_groups.size(task, len(slots)))
        return tuple(Seat(number, slot) for number, slot in enumerate(every))
    known = {rank.slot: rank.rank for rank in task.living_members()}
    known |= {seat.slot: seat.rank for seat in task.target}
    used = {known[slot] for slot in slots if slot in known} | set(task.ranks)
    numbers = (number for number in range(len(used) + len(slots)) if number not in used)
    return tuple(
        sorted(
            Seat(known[slot] if slot in known else next(numbers), slot) for slot in sorted(slots)
        )
    )


def why_placed(task: Task, seats: Sequence[Seat], slots: Sequence[Slot], where: Where) -> str:
    """Explain the placement: what the loss of a node costs; why all are on one node or rack."""
    nodes = sorted({seat.slot.node for seat in seats})
    if not task.heals_in_memory or len(nodes) > 1:
        text = (
            f"{len(seats)} seat{'s' * (len(seats) > 1)} on {' '.join(nodes)}"
            f"{tensor_groups.why_split(task, seats, slots)}"
        )
        if not task.heals_in_memory or len({domain(node, where) for node in nodes}) > 1:
            return text
        only = len({domain(slot.node, where) for slot in slots}) == 1
        why = "no slot is on another rack" if only else "no other rack has room"
        return f"{text}, all on {domain(nodes[0], where)}: {why}"
    num, since = task.lost_with(nodes[0]), "checkpoint" if task.saved_iteration else "start"
    elsewhere = whole_checkpoints(copy for copy in task.copies if copy.node != nodes[0])
    state = "no state elsewhere"
    if elsewhere and elsewhere[0].step_version >= task.saved_iteration:
        where_whole = sorted({node for whole in elsewhere for node in whole.nodes})
        since, state = "copy", f"a copy on {' '.join(where_whole)}"
    lost = f"the {num} iterations since its {since}" if num > 0 else f"all since its {since}"
    cost = f"on {nodes[0]}, {state}: its loss would cost {lost}"
    if len(seats) == 1:
        return f"one seat {cost}"
    only = len({slot.node for slot in slots}) == 1
    why = "there is no other node" if only else "no other node has room"
    return f"all {len(seats)} seats {cost}; {why}"
