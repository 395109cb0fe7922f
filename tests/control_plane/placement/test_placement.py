"""Placement: two nodes and two racks for each task if possible; seats move only if necessary."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from decider import spec
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_inputs import Case, Held, Where, clusters, of, task_at
from unicron.control_plane.placement import placement
from unicron.control_plane.state.task import Checkpoint, Task
from unicron.control_plane.throughput.state_size import seat_bytes, trained_bytes
from unicron.events.records.types import Labels, Seat, Slot
from unicron.events.spec.job import Train


def splits(count: int, room: Held) -> Iterator[Held]:
    """Every way to put `count` seats on the nodes."""
    nodes = sorted(room)
    for numbers in itertools.product(*(range(min(count, room[node]) + 1) for node in nodes)):
        if sum(numbers) == count:
            yield {node: num for node, num in zip(nodes, numbers, strict=True) if num}


Score = tuple[int, int, int, int]
"""(tasks on one node, tasks on one rack, moved seats, moved bytes), compared in this order. Less is
better."""


def score(held: Held, kept: Held, count: int, where: Where, heavy: int) -> Score:
    stay = sum(min(num, kept.get(node, 0)) for node, num in held.items())
    racks = {where[node].rack or node for node in held}
    moved = min(count, sum(kept.values())) - stay
    return (
        int(count > 1 and len(held) == 1),
        int(count > 1 and len(racks) == 1),
        moved,
        moved * heavy,
    )


def brute_force(
    counts: Sequence[int], kept: Sequence[Held], room: Held, where: Where, heavy: Sequence[int]
) -> Score:
    """The least score of all placements of these tasks."""
    if not counts:
        return 0, 0, 0, 0
    found: list[Score] = []
    for held in splits(counts[0], room):
        left = {node: num - held.get(node, 0) for node, num in room.items()}
        rest = brute_force(counts[1:], kept[1:], left, where, heavy[1:])
        own = score(held, kept[0], counts[0], where, heavy[0])
        found.append((own[0] + rest[0], own[1] + rest[1], own[2] + rest[2], own[3] + rest[3]))
    return min(found)


def trains(draw: st.DrawFn, number: int, slots: Sequence[Slot]) -> Task:
    return task_at(number, slots, started=draw(st.booleans()), num_layers=draw(st.integers(1, 3)))


TRAININGS = clusters(trains, each_max=3, tasks_max=3, count_max=4)


@given(TRAININGS)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_the_placement_has_the_best_score(case: Case) -> None:
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
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
    kept = [
        of([rank.slot for rank in task.ranks.values() if rank.slot in slots]) for task, _ in movable
    ]
    heavy = [seat_bytes(task, count) for task, count in movable]
    scores = [
        score(of([seat.slot for seat in seats[task.id]]), own, count, where, each)
        for (task, count), own, each in zip(movable, kept, heavy, strict=True)
    ]
    total = tuple(map(sum, zip((0, 0, 0, 0), *scores, strict=True)))
    moved = sum(
        min(count, sum(own.values()))
        - sum(
            task.ranks[seat.rank].slot == seat.slot
            for seat in seats[task.id]
            if seat.rank in task.ranks
        )
        for (task, count), own in zip(movable, kept, strict=True)
    )
    assert total == brute_force([count for _, count in movable], kept, room, where, heavy)
    assert moved == total[2], "a rank that keeps its node keeps its slot"


@given(TRAININGS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_order_of_the_input_changes_nothing(case: Case) -> None:
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
    for task in tasks:
        task.ranks = dict(reversed(task.ranks.items()))
    assert placement.place(tasks, counts, slots[::-1], dict(reversed(where.items()))) == seats


# --- three nodes of two slots -------------------------------------------------------------------
NODES = ("n1", "n2", "n3")
SLOTS = [Slot(node, index) for node in NODES for index in range(2)]
PAIRS = [(4, 2), (3, 1), (3, 3), (2, 2)]


def nodes_of(seats: Sequence[Seat]) -> int:
    return len({seat.slot.node for seat in seats})


@pytest.mark.parametrize("lost", NODES)
@pytest.mark.parametrize("after", [(3, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("before", PAIRS)
def test_a_node_is_lost_and_comes_back(
    before: tuple[int, int], after: tuple[int, int], lost: str
) -> None:
    """Each task is on two nodes before, during and after the loss. Unchanged tasks do not move."""
    tasks = [task_at(1, []), task_at(2, [])]
    for counts, slots in (
        (before, SLOTS),
        (after, [x for x in SLOTS if x.node != lost]),
        (before, SLOTS),
    ):
        seats = placement.place(tasks, counts, slots, {})
        for task, count in zip(tasks, counts, strict=True):
            assert nodes_of(seats[task.id]) >= min(count, 2)
            if count == len(task.target) and all(seat.slot in slots for seat in task.target):
                assert seats[task.id] == task.target
        tasks = [task_at(task.id, [seat.slot for seat in seats[task.id]]) for task in tasks]


def test_a_healthy_task_is_not_moved_for_the_spread() -> None:
    """All seats of t1 are on n1. They are spread only when t1 changes anyway."""
    tasks = [task_at(1, SLOTS[:2]), task_at(2, [])]
    seats = placement.place(tasks, [2, 2], SLOTS[:4], {})
    assert seats[1] == tasks[0].target
    assert nodes_of(seats[2]) == 1, "the free slots are all on one node"
    both = placement.place(tasks, [3, 2], SLOTS[:5], {})
    assert [nodes_of(both[1]), nodes_of(both[2])] == [2, 2]


def test_a_task_that_changes_makes_room_for_a_new_one() -> None:
    """t1 shrinks to one seat on n1 and one on n2, so that t2 can be on two nodes."""
    tasks = [task_at(1, [*SLOTS[:2], SLOTS[2], SLOTS[3]]), task_at(2, [])]
    seats = placement.place(tasks, [2, 2], SLOTS[:4], {})
    assert [nodes_of(seats[1]), nodes_of(seats[2])] == [2, 2]
    assert all(seat in tasks[0].target for seat in seats[1])


FOUR = [Slot(node, index) for node in ("n1", "n2", "n3", "n4") for index in range(3)]
ON_RACKS = {
    "n1": Labels(rack="r1", switch="s1"),
    "n2": Labels(rack="r1", switch="s2"),
    "n3": Labels(rack="r1", switch="s1"),
    "n4": Labels(rack="r2", switch="s3"),
}


@pytest.mark.parametrize(
    ("count", "nodes"),
    [
        (3, {"n1": 2, "n4": 1}),
        (4, {"n1": 3, "n4": 1}),
        (6, {"n1": 3, "n3": 2, "n4": 1}),
        (8, {"n1": 3, "n3": 3, "n2": 1, "n4": 1}),
        (11, {"n1": 3, "n3": 3, "n2": 3, "n4": 2}),
    ],
)
def test_new_seats_are_as_near_as_possible(count: int, nodes: Held) -> None:
    """The order is: the same node, its switch, its rack. One seat is on another rack."""
    seats = placement.place([task_at(1, FOUR[:1])], [count], FOUR, ON_RACKS)
    assert of([seat.slot for seat in seats[1]]) == nodes


def test_a_seat_that_must_move_goes_to_the_nearest() -> None:
    """One seat must leave rack r1. n5 is at the same switch; n4 has more free slots."""
    where = ON_RACKS | {"n5": Labels(rack="r2", switch="s1")}
    task = task_at(1, [*FOUR[:2], Slot("n9", 0)])
    seats = placement.place([task], [2], [*FOUR, Slot("n5", 0)], where)
    assert of([seat.slot for seat in seats[1]]) == {"n1": 1, "n5": 1}


@given(st.data())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_nearer_slots_go_to_the_heavier_task(data: st.DataObject) -> None:
    """No new slot of the heavier task is farther from it than a new slot of the lighter task."""
    nodes = [f"n{i}" for i in range(data.draw(st.integers(3, 6)))]
    where = {
        node: Labels(
            rack=data.draw(st.sampled_from(["r1", "r2", "r3"])),
            switch=data.draw(st.sampled_from(["", "s1", "s2"])),
        )
        for node in nodes
    }
    every = [Slot(node, index) for node in nodes for index in range(3)]
    order = data.draw(st.permutations(every))
    layers = data.draw(st.permutations([1, 2, 3]))
    tasks = [
        task_at(number + 1, sorted(order[2 * number : 2 * number + 2]), num_layers=layers[number])
        for number in range(data.draw(st.integers(2, 3)))
    ]
    counts = [2 + data.draw(st.integers(0, 2)) for _ in tasks]
    seats = placement.place(tasks, counts, every, where)
    new = {
        task.id: [seat.slot.node for seat in seats[task.id] if seat not in task.target]
        for task in tasks
    }
    for heavy, light in itertools.permutations(tasks, 2):
        on_one_rack = any(
            len({where[seat.slot.node].rack for seat in task.target}) == 1
            for task in (heavy, light)
        )
        if seat_bytes(heavy, 1) <= seat_bytes(light, 1) or on_one_rack:
            continue  # a task on one rack first gets a seat on another
        for node, other in itertools.product(new[heavy.id], new[light.id]):
            assert far(heavy, node, where) <= far(heavy, other, where)


def far(task: Task, node: str, where: Where) -> int:
    """Distance from the task's seats. 0: same node, 1: same switch, 2: same rack, 3: elsewhere."""
    near = [where[seat.slot.node] for seat in task.target]
    tests = (
        any(seat.slot.node == node for seat in task.target),
        any(label.switch == where[node].switch != "" for label in near),
        any(label.rack == where[node].rack for label in near),
        True,
    )
    return tests.index(True)


def test_the_task_with_the_least_state_moves_for_the_spread() -> None:
    """Three tasks change. t3 is on one node, and t1 or t2 must move to make room on the other."""
    for layers, moved in (((1, 2), 1), ((2, 1), 2)):
        tasks = [
            task_at(1, [SLOTS[2]], num_layers=layers[0]),
            task_at(2, [SLOTS[3]], num_layers=layers[1]),
            task_at(3, SLOTS[:2]),
        ]
        for task in tasks[:2]:
            task.target = (*task.target, Seat(1, Slot("n9", task.id)))
        tasks[2].target = (*tasks[2].target, Seat(2, Slot("n9", 0)))
        seats = placement.place(tasks, [1, 1, 2], SLOTS[:4], {})
        assert nodes_of(seats[3]) == 2
        assert [key for key in (1, 2) if seats[key][0].slot.node != "n2"] == [moved]


def test_a_shrinking_task_stays_on_two_racks() -> None:
    task = task_at(1, [*FOUR[:8], FOUR[9]])
    for count in range(2, 10):
        seats = placement.place([task], [count], FOUR, ON_RACKS)[1]
        assert Seat(8, FOUR[9]) in seats, "it is the only seat on rack r2"
        assert set(seats) <= set(task.target)


def test_a_large_cluster_that_loses_a_rack() -> None:
    """A rack of 16 nodes is lost under 40 tasks. Then each task is on two racks again."""
    nodes = [f"n{i:03}" for i in range(128)]
    where = {node: Labels(rack=f"r{i // 16}", switch=f"s{i // 8}") for i, node in enumerate(nodes)}
    every = [Slot(node, index) for node in nodes for index in range(8)]
    tasks = [task_at(i + 1, every[24 * i : 24 * i + 24]) for i in range(40)]
    slots = [slot for slot in every if where[slot.node].rack != "r3"]
    seats = placement.place(tasks, [20] * 40, slots, where)
    for task in tasks:
        kept = [seat for seat in task.target if seat.slot in set(slots)]
        racks = {where[seat.slot.node].rack for seat in seats[task.id]}
        assert len(racks) == 2
        one = len({where[seat.slot.node].rack for seat in kept}) == 1
        most = 20 - (one and len(kept) >= 20)
        assert len(set(kept) & set(seats[task.id])) == min(len(kept), most)


def test_the_possible_loss_is_named() -> None:
    task = task_at(1, SLOTS[:2])
    here = SLOTS[:2]
    assert placement.why_placed(task, task.target, here, {}) == (
        "all 2 seats on n1, no state elsewhere: its loss would cost all since its start; there is "
        "no other node"
    )
    assert placement.why_placed(task, task.target, SLOTS, {}).endswith("; no other node has room")
    task.max_iteration, task.iteration = 90, 40  # 50 iterations are lost already
    assert placement.why_placed(task, task.target[:1], here, {}) == (
        "one seat on n1, no state elsewhere: its loss would cost the 40 iterations since its start"
    )
    task.checkpoint = Checkpoint(generation=1, step_version=30, path="gen-1/iter-30", final=False)
    assert placement.why_placed(task, task.target[:1], here, {}) == (
        "one seat on n1, no state elsewhere: its loss would cost the 10 iterations since its "
        "checkpoint"
    )
    assert task.lost_with() == 10, "the task's screen shows the same number"
    spread = [Seat(0, SLOTS[0]), Seat(1, SLOTS[2])]
    assert placement.why_placed(task, spread, SLOTS, {}) == "2 seats on n1 n2"
    where = {"n1": Labels(rack="r1"), "n2": Labels(rack="r1"), "n3": Labels(rack="r2")}
    assert placement.why_placed(task, spread, SLOTS, where) == (
        "2 seats on n1 n2, all on rack r1: no other rack has room"
    )
    assert placement.why_placed(task, spread, SLOTS[:4], where) == (
        "2 seats on n1 n2, all on rack r1: no slot is on another rack"
    )
    where["n2"] = Labels(rack="r2")
    assert placement.why_placed(task, spread, SLOTS, where) == "2 seats on n1 n2"


@pytest.mark.parametrize(
    ("parallel", "count", "share"),
    [
        ({}, 4, 1.0),
        ({"optimizer": "sharded"}, 4, (4 + 8 / 4) / 12),
        ({"optimizer": "mirrored"}, 4, (4 + 8 / 2) / 12),
        ({"optimizer": "mirrored"}, 1, 1.0),
        ({"tensor": [2]}, 4, 0.5),
        ({"tensor": [2], "optimizer": "sharded"}, 4, (4 + 8 / 2) / 24),
    ],
)
def test_the_state_size_of_one_seat(parallel: dict[str, Any], count: int, share: float) -> None:
    def of(**parallel: Any) -> Train:
        found = spec(
            slots={"min": 1, "max": 4},
            train={
                "iterations": 9,
                "output": "/o",
                "batch": {"global": 24, "micro": 1},
                "model": {"num_layers": 12},
                "parallel": parallel,
            },
        ).train
        assert found is not None
        return found

    whole = trained_bytes(of(), 1)
    assert trained_bytes(of(**parallel), count) == pytest.approx(share * whole, abs=1)
