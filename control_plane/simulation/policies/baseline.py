"""Common parts of the policies other than Unicron's, which only choose the assignment of slots.

Until the first fault these policies use Unicron's planner on all nodes but their spares; then
`allocate` assigns the slots of each task.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from ....events.records import types as t
from ....events.records.decisions import Allocation, PlanChosen, TaskPlaced
from ....events.records.types import Seat, Slot
from ...decide.decide import Decide, decisions
from ...placement import placement
from ...planner import planner
from ...planner.problem_of_state import PlanningSnapshot, planning_snapshot
from ...state.cluster import ClusterState, allocatable_slots, can_allocate, live_tasks
from ...state.task import Task
from ...throughput import table

Seats = Mapping[int, tuple[Seat, ...]]
"""The assignments of each task, by the number of the task."""
Allocate = Callable[[ClusterState, Mapping[int, int]], Seats]
"""The assignment of each task, given the sizes that tasks had before the first fault."""


def following(allocate: Allocate, num_spares: int = 0) -> Decide:
    """For one run: the planner with `num_spares` idle nodes; after the first fault `allocate`."""
    sizes: dict[int, int] = {}

    def plan(state: ClusterState) -> Iterator[t.Body]:
        if has_failed(state):
            yield from records(state, _with_newcomers(state, allocate(state, sizes), sizes))
            return
        seats = _initial_plan(state, num_spares)
        sizes.update({task: len(mine) for task, mine in seats.items()})
        yield from records(state, seats)

    return lambda state, record: decisions(state, record, plan)


def _with_newcomers(state: ClusterState, seats: Seats, sizes: dict[int, int]) -> Seats:
    """Give each task submitted after the first fault, in order, its largest size that is free."""
    found = {**seats}
    for task in live_tasks(state):
        if task.id in sizes or found.get(task.id):
            continue
        taken = [seat.slot for mine in found.values() for seat in mine]
        free = [slot for slot in allocatable_slots(state) if slot not in taken]
        size = max((one for one in task.spec.slots.counts if one <= len(free)), default=0)
        if size:
            found[task.id], sizes[task.id] = _seats(task, free[:size]), size
    return found


def has_failed(state: ClusterState) -> bool:
    return bool(state.incidents) or any(
        node.health != "healthy" or node.drained or node.slots_disabled
        for node in state.nodes.values()
    )


def _initial_plan(state: ClusterState, num_spares: int) -> Seats:
    """The planner's assignment if the last `num_spares` nodes, by name, are left idle."""
    snapshot = planning_snapshot(state)
    names = sorted({slot.node for slot in snapshot.slots})
    spare = set(names[len(names) - num_spares :] if num_spares else ())
    slots = [slot for slot in snapshot.slots if slot.node not in spare]
    plan = planner.solve(replace(snapshot.problem, num_slots=len(slots)))
    return placed(state, snapshot, plan.slots, slots)


def placed(
    state: ClusterState, snapshot: PlanningSnapshot, counts: tuple[int, ...], slots: Sequence[Slot]
) -> Seats:
    """The assignment of this number of slots to each task of the snapshot."""
    tasks = [state.tasks[demand.task] for demand in snapshot.problem.demands]
    where = {name: node.labels for name, node in state.nodes.items()}
    return placement.place(tasks, counts, slots, where, snapshot.barred)


def records(state: ClusterState, seats: Seats) -> Iterator[t.Body]:
    """The plan, and the assignments that it changes."""
    tasks = live_tasks(state)
    allocations = tuple(
        [
            Allocation(
                task=task.id,
                slots_before=len(task.target),
                slots=slots,
                waf=task.weight * table.rate_at(task.throughput, slots),
            )
            for task in tasks
            for slots in [len(seats.get(task.id, ()))]
        ]
    )
    yield PlanChosen(
        trigger=state.replan,
        num_slots=len(allocatable_slots(state)),
        waf=math.fsum([one.waf for one in allocations]),
        allocations=allocations,
        objective=0,
        alternatives=(),
    )
    for task in tasks:
        mine = seats.get(task.id, ())
        if mine != task.target:
            yield TaskPlaced(task=task.id, seats=mine, why="by the policy")


# --- assignments after the first fault ----------------------------------------------------------
def kept(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """Every task keeps its slots, whatever happens to its nodes."""
    return {task.id: task.target for task in live_tasks(state)}


def moved(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """A task replaces its lost slots by free slots. If these are too few, the task waits."""
    return _refilled(state, sizes, whole=True)


def shrunk(state: ClusterState, sizes: Mapping[int, int]) -> Seats:
    """A task continues on its remaining slots, and gets free slots up to its former size."""
    return _refilled(state, sizes, whole=False)


def _refilled(state: ClusterState, sizes: Mapping[int, int], *, whole: bool) -> Seats:
    tasks, allocatable = live_tasks(state), allocatable_slots(state)
    num_on = Counter(slot.node for slot in allocatable)
    found = {
        task.id: task.target
        for task in tasks
        if len(task.target) == sizes.get(task.id, 0)
        and not any(
            num_on[seat.slot.node] < state.nodes[seat.slot.node].num_slots for seat in task.target
        )
    }
    if len(found) == len(tasks):
        return found
    changed = [task for task in tasks if task.id not in found]
    own = {
        task.id: [seat.slot for seat in task.target if can_allocate(state, (seat,))]
        for task in changed
    }
    taken = {seat.slot for target in found.values() for seat in target}
    taken.update(*own.values())
    free = [slot for slot in allocatable if slot not in taken]
    grows = True
    while grows:  # another task may use the slots that one task frees
        grows = False
        for task in changed:
            lacks = sizes.get(task.id, 0) - len(own[task.id])
            if whole and lacks > len(free):
                found[task.id] = task.target
                continue
            more, free = free[: max(lacks, 0)], free[max(lacks, 0) :]
            slots = [*own[task.id], *more]
            size = max((one for one in task.spec.slots.counts if one <= len(slots)), default=0)
            free += slots[size:]
            grows = grows or (size != len(own[task.id]) and not whole)
            own[task.id] = slots[:size]
            found[task.id] = _seats(task, own[task.id])
    return found


def _seats(task: Task, slots: Sequence[Slot]) -> tuple[Seat, ...]:
    """Ranks keep their numbers on their slots; new ranks get the smallest free numbers."""
    numbers = {seat.slot: seat.rank for seat in task.target}
    used = frozenset(numbers[slot] for slot in slots if slot in numbers)
    new = iter([number for number in range(2 * len(slots) + 1) if number not in used])
    return tuple(
        sorted(Seat(numbers[slot] if slot in numbers else next(new), slot) for slot in slots)
    )
