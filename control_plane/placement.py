"""From counts to seats: which task sits where.

Every piece of a training task's state should have holders on two nodes: a task of two or more
seats is spread over two where it can be. Then own seats are kept, then few nodes are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..events.orders import Seat, Slot
from .state import Task


def place(task: Task, count: int, free: Sequence[Slot]) -> tuple[Seat, ...]:
    """The task's seats: `count` of them, out of its own usable ones and `free`.

    `free` holds the usable slots that no other task is given, the task's own included.
    """
    usable = sorted(free)
    kept = [seat for seat in task.target if seat.slot in usable]
    if task.is_train:
        kept = _back(task, kept, usable, count)
    kept = _keep(task, kept, count)
    taken = [seat.slot for seat in kept]
    slots = _choose([slot for slot in usable if slot not in taken], taken, count - len(kept))
    if not task.is_train:
        every = sorted([*taken, *slots])
        if every == sorted(taken):
            return tuple(sorted(kept))
        return tuple(Seat(number, slot) for number, slot in enumerate(every))
    used = {seat.rank for seat in kept} | set(task.ranks)
    numbers = (number for number in range(len(used) + count) if number not in used)
    return tuple(sorted([*kept, *(Seat(next(numbers), slot) for slot in slots)]))


def _back(task: Task, kept: Sequence[Seat], usable: Sequence[Slot], count: int) -> list[Seat]:
    """Seats for processes that were to leave, rather than for new ones."""
    filled = [seat for seat in kept if seat.rank in task.ranks]
    here = [Seat(rank.rank, rank.slot) for rank in task.living_members()
            if not (rank.stopping or rank.overdue or rank.error_seq)]
    taken = [seat.rank for seat in kept]
    here = [seat for seat in sorted(here) if seat.rank not in taken and seat.slot in usable]
    back = here[: max(count - len(filled), 0)]
    used = [seat.slot for seat in back]
    return [*filled, *back, *(seat for seat in kept
                              if seat not in filled and seat.slot not in used)]


def _keep(task: Task, seats: Sequence[Seat], count: int) -> list[Seat]:
    """Drop seats until `count` are left: empty ones first, then from the fullest node."""
    kept = sorted(seats)
    while len(kept) > count:
        on = {seat.slot.node: 0 for seat in kept}
        for seat in kept:
            on[seat.slot.node] += 1
        spread = len(on) == 2 and count >= 2
        worst = max(kept, key=lambda seat: (seat.rank not in task.ranks,
                                            on[seat.slot.node] if spread else -on[seat.slot.node],
                                            seat.rank))
        kept.remove(worst)
    return kept


def _choose(free: Sequence[Slot], own: Sequence[Slot], count: int) -> list[Slot]:
    """`count` slots: own nodes first, then the emptiest; two nodes where there are two."""
    chosen: list[Slot] = []
    while len(chosen) < count and len(chosen) < len(free):
        left = [slot for slot in free if slot not in chosen]
        nodes = [slot.node for slot in (*own, *chosen)]
        last = len(chosen) == count - 1
        alone = last and len(nodes) >= 1 and len(dict.fromkeys(nodes)) == 1
        elsewhere = [slot for slot in left if slot.node not in nodes]
        if alone and elsewhere:
            left = elsewhere
        room = {slot.node: 0 for slot in left}
        for slot in left:
            room[slot.node] += 1
        chosen.append(min(left, key=lambda slot: (slot.node not in nodes, -room[slot.node], slot)))
    return chosen


def why_placed(seats: Sequence[Seat]) -> str:
    """What a person should know of this placement."""
    nodes = list(dict.fromkeys(sorted(seat.slot.node for seat in seats)))
    if len(seats) > 1 and len(nodes) == 1:
        return f"all on {nodes[0]}: no slot elsewhere, so that its loss would cost a checkpoint"
    if len(seats) == 1:
        return f"one seat, on {nodes[0]}: nobody else holds its state"
    return f"{len(seats)} seats on {len(nodes)} nodes"
