"""Two nodes for every task that can have them, nobody moved without need: brute force agrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from heart_driver import spec
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane import placement
from unicron.control_plane.state import Checkpoint, Rank, Task
from unicron.events.orders import Member, Seat, Slot

Held = dict[str, int]
"""Seats of one task by node."""


def task_at(number: int, slots: Sequence[Slot], *, started: bool = True) -> Task:
    """A task that trains on these slots, or that only wants to."""
    task = Task(id=number, spec=spec(name=f"t{number}"), weight=1.0, submitted_s=0.0, since_s=0.0,
                target=tuple(Seat(rank, slot) for rank, slot in enumerate(slots)))
    if started:
        task.phase = "training"
        task.ranks = {rank: Rank(rank=rank, attempt=1, slot=slot, state="member", has_state=True)
                      for rank, slot in enumerate(slots)}
        task.members = tuple(Member(rank, 1, slot.node, "") for rank, slot in enumerate(slots))
    return task


def of(slots: Sequence[Slot]) -> Held:
    held: Held = {}
    for slot in slots:
        held[slot.node] = held.get(slot.node, 0) + 1
    return held


def splits(count: int, room: Held) -> Iterator[Held]:
    """Every way to put `count` seats on the nodes."""
    nodes = sorted(room)
    for numbers in itertools.product(*(range(min(count, room[node]) + 1) for node in nodes)):
        if sum(numbers) == count:
            yield {node: num for node, num in zip(nodes, numbers, strict=True) if num}


def brute_force(counts: Sequence[int], kept: Sequence[Held], room: Held) -> tuple[int, int]:
    """(tasks left on one node, seats moved): the least of the first, and then of the second."""
    if not counts:
        return 0, 0
    found: list[tuple[int, int]] = []
    for held in splits(counts[0], room):
        left = {node: num - held.get(node, 0) for node, num in room.items()}
        broken, moved = brute_force(counts[1:], kept[1:], left)
        stay = sum(min(num, kept[0].get(node, 0)) for node, num in held.items())
        found.append((broken + (counts[0] > 1 and len(held) == 1),
                      moved + min(counts[0], sum(kept[0].values())) - stay))
    return min(found)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Task], list[int], list[Slot]]:
    """Tasks that sit somewhere, some of whose slots are gone, and what the plan gives them now."""
    nodes = [(f"n{i}", draw(st.integers(1, 3))) for i in range(draw(st.integers(2, 4)))]
    every = [Slot(name, index) for name, num in nodes for index in range(num)]
    order, tasks = draw(st.permutations(every)), list[Task]()
    for number in range(1, draw(st.integers(1, 3)) + 1):
        num = draw(st.integers(0, min(3, len(order))))
        tasks.append(task_at(number, sorted(order[:num]), started=draw(st.booleans())))
        order = order[num:]
    slots = [slot for slot in every if draw(st.integers(0, 5))]
    counts: list[int] = []
    for task in tasks:
        stays = len(task.target) if draw(st.booleans()) else draw(st.integers(0, 4))
        counts.append(min(stays, len(slots) - sum(counts)))
    return tasks, counts, slots


@given(clusters())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_two_nodes_wherever_there_are_two(case: tuple[list[Task], list[int], list[Slot]]) -> None:
    tasks, counts, slots = case
    seats = placement.place(tasks, counts, slots)
    used = [seat.slot for key in seats for seat in seats[key]]
    assert len(used) == len(set(used))
    assert set(used) <= set(slots)
    room, movable = of(slots), list[tuple[Task, int]]()
    for task, count in zip(tasks, counts, strict=True):
        assert len(seats[task.id]) == count
        assert len({seat.rank for seat in seats[task.id]}) == count
        if count == len(task.target) and all(seat.slot in slots for seat in task.target):
            assert seats[task.id] == task.target, "a healthy task is never moved"
            for seat in task.target:
                room[seat.slot.node] -= 1
        else:
            movable.append((task, count))
    kept = [of([rank.slot for rank in task.ranks.values() if rank.slot in slots])
            for task, _ in movable]
    broken = sum(count > 1 and len({seat.slot.node for seat in seats[task.id]}) == 1
                 for task, count in movable)
    moved = sum(min(count, sum(held.values()))
                - sum(task.ranks[seat.rank].slot == seat.slot for seat in seats[task.id]
                      if seat.rank in task.ranks)
                for (task, count), held in zip(movable, kept, strict=True))
    assert (broken, moved) == brute_force([count for _, count in movable], kept, room)


# --- three nodes of two slots -------------------------------------------------------------------
NODES = ("n1", "n2", "n3")
SLOTS = [Slot(node, index) for node in NODES for index in range(2)]
PAIRS = [(4, 2), (3, 1), (3, 3), (2, 2)]


def nodes_of(seats: Sequence[Seat]) -> int:
    return len({seat.slot.node for seat in seats})


@pytest.mark.parametrize("lost", NODES)
@pytest.mark.parametrize("after", [(3, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("before", PAIRS)
def test_a_node_goes_and_comes_back(before: tuple[int, int], after: tuple[int, int],
                                    lost: str) -> None:
    """Both tasks on two nodes before, between and after; who stays as it is, stays."""
    tasks = [task_at(1, []), task_at(2, [])]
    for counts, slots in ((before, SLOTS), (after, [x for x in SLOTS if x.node != lost]),
                          (before, SLOTS)):
        seats = placement.place(tasks, counts, slots)
        for task, count in zip(tasks, counts, strict=True):
            assert nodes_of(seats[task.id]) >= min(count, 2)
            if count == len(task.target) and all(seat.slot in slots for seat in task.target):
                assert seats[task.id] == task.target
        tasks = [task_at(task.id, [seat.slot for seat in seats[task.id]]) for task in tasks]


def test_a_healthy_task_is_not_moved_for_the_spread() -> None:
    """All of t1 on n1, as it is: the rule waits until it is changed anyway."""
    tasks = [task_at(1, SLOTS[:2]), task_at(2, [])]
    seats = placement.place(tasks, [2, 2], SLOTS[:4])
    assert seats[1] == tasks[0].target
    assert nodes_of(seats[2]) == 1, "what is left is on one node"
    both = placement.place(tasks, [3, 2], SLOTS[:5])
    assert [nodes_of(both[1]), nodes_of(both[2])] == [2, 2]


def test_one_that_changes_gives_way_to_a_new_one() -> None:
    """t1 shrinks to two seats on n1 and n2 anyway, so that t2 need not sit on one node."""
    tasks = [task_at(1, [*SLOTS[:2], SLOTS[2], SLOTS[3]]), task_at(2, [])]
    seats = placement.place(tasks, [2, 2], SLOTS[:4])
    assert [nodes_of(seats[1]), nodes_of(seats[2])] == [2, 2]
    assert all(seat in tasks[0].target for seat in seats[1])


def test_what_would_be_lost_is_named() -> None:
    task = task_at(1, SLOTS[:2])
    assert placement.why_placed(task, task.target) == (
        "all 2 seats on n1, no state elsewhere: its loss would cost all since its start")
    task.furthest, task.iteration = 90, 40  # 50 were lost once, and are not there to be lost
    assert placement.why_placed(task, task.target[:1]) == (
        "one seat on n1, no state elsewhere: its loss would cost the 40 iterations since its start")
    task.checkpoint = Checkpoint(generation=1, step_version=30, path="gen-1/iter-30", final=False)
    assert placement.why_placed(task, task.target[:1]) == (
        "one seat on n1, no state elsewhere: its loss would cost the 10 iterations since its "
        "checkpoint")
    assert task.unsaved == 10, "as the screen of the task tells it"
    spread = [Seat(0, SLOTS[0]), Seat(1, SLOTS[2])]
    assert placement.why_placed(task, spread) == "2 seats on n1 n2"
