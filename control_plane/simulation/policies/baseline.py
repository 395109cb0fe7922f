"""What policies beside Unicron's own have in common: who sits where is theirs to say, no more.

Until the first fault they plan as Unicron does, on what their spares leave, so that all begin
alike. From then on `allocate` says where each task is to sit. Allocation rules say from the
beginning how many slots each gets. The transitions follow by the heart's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ....events.records import types as t
from ....events.records.decisions import Allocation, PlanChosen, TaskPlaced, ThroughputSet
from ....events.records.types import Seat, Slot
from ...decide.decide import Decide, answer
from ...placement import placement
from ...planner import planner
from ...planner.problem import PlanInput, Wish
from ...planner.problem_of_state import Ground, plan_input
from ...state.cluster import ClusterState, live_tasks, may_hold, usable_slots
from ...state.task import Task
from ...throughput import table

Seats = Mapping[int, tuple[Seat, ...]]
"""By task."""
Allocate = Callable[[ClusterState, Mapping[int, int]], Seats]
"""Where each task is to sit, of which so many slots were its own before the first fault."""
Due = Callable[[Wish], float]
"""What a task's share is in proportion to."""


def following(allocate: Allocate, num_spares: int = 0) -> Decide:
    """A `decide` for one run: this allocation after the first fault, so many nodes idle before."""
    sizes: dict[int, int] = {}
    given: dict[int, _Given] = {}

    def plan(state: ClusterState) -> Iterator[t.Body]:
        if has_failed(state):
            yield from _seat(state, _with_newcomers(state, allocate(state, sizes), sizes), given)
            return
        seats = _planned(state, num_spares)
        sizes.update({task: len(mine) for task, mine in seats.items()})
        yield from _seat(state, seats, given)

    return lambda state, record: answer(state, record, plan)


def _with_newcomers(state: ClusterState, seats: Seats, sizes: dict[int, int]) -> Seats:
    """Tasks that came after the first fault get the most that is free, first come first served."""
    found = {**seats}
    for task in live_tasks(state):
        if task.id in sizes or found.get(task.id):
            continue
        taken = [seat.slot for mine in found.values() for seat in mine]
        free = [slot for slot in usable_slots(state) if slot not in taken]
        size = max((one for one in task.spec.slots.counts if one <= len(free)), default=0)
        if size:
            found[task.id], sizes[task.id] = _seats(task, free[:size]), size
    return found


def has_failed(state: ClusterState) -> bool:
    """Whether anything has befallen the cluster yet."""
    return bool(state.incidents) or any(
        node.health != "healthy" or node.drained or node.slots_out
        for node in state.nodes.values())


def sharing(due: Due) -> Decide:
    """A `decide` for one run: each task has its share, whatever that earns."""
    def plan(state: ClusterState) -> Iterator[t.Body]:
        ground = plan_input(state)
        yield from _seat(
            state, _placed(state, ground, shared(ground.asked, due), ground.slots), {})

    return lambda state, record: answer(state, record, plan)


def shared(asked: PlanInput, due: Due) -> tuple[int, ...]:
    """By task the largest size within its share. What is over goes, size by size, to whom the next
    one exceeds its share least; of those to the first."""
    dues = [due(wish) for wish in asked.wishes]
    whole = math.fsum(dues)
    shares = [asked.num_slots * one / whole for one in dues]
    found = [max((size for size in wish.sizes if size <= share), default=0)
             for wish, share in zip(asked.wishes, shares, strict=True)]
    while True:
        left = asked.num_slots - sum(found)
        more = [(size - shares[at], at, size) for at, wish in enumerate(asked.wishes)
                for size in wish.sizes if 0 < size - found[at] <= left]
        if not more:
            return tuple(found)
        _, at, size = min(more)
        found[at] = size


def _planned(state: ClusterState, num_spares: int) -> Seats:
    """By the planner, as if the last nodes were not there."""
    ground = plan_input(state)
    names = sorted({slot.node for slot in ground.slots})
    spare = set(names[len(names) - num_spares:] if num_spares else ())
    slots = [slot for slot in ground.slots if slot.node not in spare]
    plan = planner.planned(replace(ground.asked, num_slots=len(slots)))
    return _placed(state, ground, plan.slots, slots)


def _placed(state: ClusterState, ground: Ground, counts: tuple[int, ...], slots: Sequence[Slot]
            ) -> Seats:
    tasks = [state.tasks[wish.task] for wish in ground.asked.wishes]
    where = {name: node.labels for name, node in state.nodes.items()}
    return placement.place(tasks, counts, slots, where)


class _Given(NamedTuple):
    """An allocation, and what it follows from beside its slots."""

    table: ThroughputSet | None
    weight: float
    one: Allocation


def _seat(state: ClusterState, seats: Seats, known: dict[int, _Given]) -> Iterator[t.Body]:
    """`known`: what was given last, by task."""
    tasks, waf = live_tasks(state), 0.0
    for task in tasks:
        slots = len(task.target), len(seats.get(task.id, ()))
        last = known.get(task.id)
        if last is None or last.table is not task.throughput or last.weight != task.weight or (
                last.one.slots_before, last.one.slots) != slots:
            known[task.id] = last = _Given(task.throughput, task.weight, Allocation(
                task=task.id, slots_before=slots[0], slots=slots[1],
                waf=task.weight * table.rate_at(task.throughput, slots[1])))
        waf += last.one.waf
    yield PlanChosen(trigger=state.replan, num_slots=len(usable_slots(state)), waf=waf,
                     allocations=tuple([known[task.id].one for task in tasks]), objective=0,
                     alternatives=())
    for task in tasks:
        mine = seats.get(task.id, ())
        if mine != task.target:
            yield TaskPlaced(task=task.id, seats=mine, why="by the policy")


# --- where tasks sit ----------------------------------------------------------------------------
def kept(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """Every task stays where it is, whatever becomes of its nodes."""
    return {task.id: task.target for task in live_tasks(state)}


def moved(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """What a task lost is taken from free slots, if there are enough for all of it; else it waits.
    """
    return _refilled(state, sizes, whole=True)


def shrunk(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """A task goes on with what is left to it, and gets free slots up to what it had."""
    return _refilled(state, sizes, whole=False)


def _refilled(state: ClusterState, sizes: Mapping[int, int], *, whole: bool) -> Seats:
    tasks = live_tasks(state)
    found = {task.id: task.target for task in tasks if len(task.target) == sizes.get(task.id, 0)
             and not any(len(state.nodes[name].usable()) < state.nodes[name].num_slots
                         for name in dict.fromkeys(seat.slot.node for seat in task.target))}
    if len(found) == len(tasks):
        return found
    mended = [task for task in tasks if task.id not in found]
    own = {task.id: [seat.slot for seat in task.target if may_hold(state, (seat,))]
           for task in mended}
    taken = {seat.slot for target in found.values() for seat in target}
    taken.update(*own.values())
    free = [slot for slot in usable_slots(state) if slot not in taken]
    grows = True
    while grows:  # what one gives up another may lack
        grows = False
        for task in mended:
            lacks = sizes.get(task.id, 0) - len(own[task.id])
            if whole and lacks > len(free):
                found[task.id] = task.target
                continue
            more, free = free[:max(lacks, 0)], free[max(lacks, 0):]
            slots = [*own[task.id], *more]
            size = max((one for one in task.spec.slots.counts if one <= len(slots)), default=0)
            free += slots[size:]
            grows = grows or (size != len(own[task.id]) and not whole)
            own[task.id] = slots[:size]
            found[task.id] = _seats(task, own[task.id])
    return found


def _seats(task: Task, slots: Sequence[Slot]) -> tuple[Seat, ...]:
    """Who sits there already keeps its number; newcomers get the smallest that are free."""
    numbers = {seat.slot: seat.rank for seat in task.target}
    used = frozenset(numbers[slot] for slot in slots if slot in numbers)
    new = iter([number for number in range(2 * len(slots) + 1) if number not in used])
    return tuple(sorted(Seat(numbers[slot] if slot in numbers else next(new), slot)
                        for slot in slots))
