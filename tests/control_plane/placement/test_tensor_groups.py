"""Tensor-parallel groups: the ranks of a group are on one node if the free slots permit it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from decider import Driver, task_of
from described_jobs import MODEL, job, submitted
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_jobs import job as layouts
from placement_inputs import Case, Held, clusters, of, task_at
from unicron.control_plane.placement import placement, tensor_groups
from unicron.control_plane.state.task import Rank, Task
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import Labels, Seat, Slot
from unicron.events.spec.job import parse
from unicron.events.spec.model import Axes, Modelled
from unicron.workers.agent.processes.launcher import NodeConfig, environment

pytestmark = pytest.mark.nodes(1)


def modelled(each: int) -> Modelled:
    """A model that runs on any number of slots, in groups of `each`."""
    return Modelled(sizes=(1,), rates_flops=(1e14,), layouts=("",), axes=(Axes(tp=each),))


def command_at(number: int, slots: Sequence[Slot], each: int) -> Task:
    """A command that runs on these slots, in groups of `each`."""
    spec = parse(job(name=f"c{number}"))
    return Task(
        id=number,
        spec=spec,
        weight=1.0,
        submitted_s=0.0,
        since_s=0.0,
        modelled=modelled(each),
        target=tuple(Seat(rank, slot) for rank, slot in enumerate(slots)),
        ranks={
            rank: Rank(rank=rank, attempt=1, slot=slot, state="running")
            for rank, slot in enumerate(slots)
        },
    )


def fits_whole(sizes: Sequence[int], room: Held) -> bool:
    """True if each group of these sizes fits on one node; tries every assignment."""
    if not sizes:
        return True
    return any(
        fits_whole(sizes[1:], room | {node: room[node] - sizes[0]})
        for node in room
        if room[node] >= sizes[0]
    )


def commands(draw: st.DrawFn, number: int, slots: Sequence[Slot]) -> Task:
    return command_at(number, slots, draw(st.sampled_from([1, 2, 4])))


COMMANDS = clusters(commands, each_max=5, tasks_max=4, count_max=8)


@given(COMMANDS)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_no_group_is_split_without_need(case: Case) -> None:
    """Commands that do not change keep their seats: no group moves them."""
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
    used = [seat.slot for key in seats for seat in seats[key]]
    assert len(used) == len(set(used)) == sum(counts)
    room, wanted, num_split = of(slots), list[int](), 0
    for task, count in zip(tasks, counts, strict=True):
        assert [seat.rank for seat in seats[task.id]] == list(range(count))
        stays = count == len(task.target) and all(seat.slot in slots for seat in task.target)
        if stays:
            assert seats[task.id] == task.target, "unchanged tasks keep their seats"
        each = tensor_groups.size(task, count)
        if stays or each == 1:
            kept = {seat.slot for seat in task.target} & {seat.slot for seat in seats[task.id]}
            for slot in kept:
                room[slot.node] -= 1
        else:
            wanted += [each] * (count // each)
            num_split += tensor_groups.num_split(task, seats[task.id], each)
            assert (
                "not on one node" in placement.why_placed(task, seats[task.id], slots, where)
            ) == (tensor_groups.num_split(task, seats[task.id], each) > 0)
    assert (num_split == 0) == fits_whole(sorted(wanted, reverse=True), room)


@given(COMMANDS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whole_groups_keep_the_most_seats(case: Case) -> None:
    """One command alone: no other placement with whole groups keeps more seats."""
    tasks, counts, slots, where = case
    task, count = tasks[0], counts[0]
    each = tensor_groups.size(task, count)
    seats = placement.place([task], [count], slots, where)[task.id]
    rest = count % each
    count -= rest
    room, own = of(slots), of([seat.slot for seat in task.target if seat.slot in slots])
    if each == 1 or tensor_groups.num_split(task, seats, each) or not count:
        return
    most = max(
        sum(min(num * each, own.get(node, 0)) for node, num in zip(room, nums, strict=True))
        for nums in itertools.product(*(range(have // each + 1) for have in room.values()))
        if sum(nums) * each == count
    )
    target = {seat.slot for seat in task.target}
    kept = sum(seat.slot in target for seat in seats)
    assert kept >= most if rest else kept == most


@given(COMMANDS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_order_of_the_input_changes_nothing(case: Case) -> None:
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
    assert placement.place(tasks, counts, slots[::-1], dict(reversed(where.items()))) == seats


TWELVE = [Slot(node, index) for node in ("n1", "n2", "n3") for index in range(4)]


def test_a_training_task_takes_slots_that_groups_leave() -> None:
    """The training task comes first by id. Alone it would take slots of the emptiest nodes."""
    train, command = task_at(1, []), command_at(2, [], 4)
    seats = placement.place([train, command], [3, 8], [*TWELVE, Slot("n4", 0)], {})
    assert of([seat.slot for seat in seats[2]]) == {"n1": 4, "n2": 4}
    assert of([seat.slot for seat in seats[1]]) == {"n3": 2, "n4": 1}


def test_the_spread_over_nodes_splits_no_group() -> None:
    """12 seats on 12 slots: the training task could be on two nodes only if a group were split."""
    train, command = task_at(1, []), command_at(2, [], 4)
    seats = placement.place([train, command], [4, 8], TWELVE, {})
    assert len(of([seat.slot for seat in seats[1]])) == 1
    assert tensor_groups.num_split(command, seats[2], 4) == 0
    running = task_at(1, [seat.slot for seat in seats[1]])
    assert placement.why_placed(running, seats[1], TWELVE, {}).endswith("; no other node has room")


def tensor_task(number: int, slots: Sequence[Slot]) -> Task:
    """A training task of TP 2 whose ranks have the slots in this order."""
    task = task_at(number, slots)
    task.spec = layouts(tensor=[2])
    return task


def test_a_whole_group_makes_room_for_the_spread() -> None:
    """Two nodes of two TP groups and a plain task: each task is on both nodes."""
    plain, command = task_at(1, []), command_at(2, [], 2)
    seats = placement.place([plain, command], [4, 4], TWELVE[:8], {})
    for key in (1, 2):
        assert of([seat.slot for seat in seats[key]]) == {"n1": 2, "n2": 2}
    assert tensor_groups.num_split(command, seats[2], 2) == 0


def test_two_jobs_on_two_nodes_of_two_slots_split_no_group() -> None:
    slots = [slot for slot in TWELVE[:8] if slot.index < 2]
    plain, tensor = task_at(1, []), tensor_task(2, [])
    seats = placement.place([plain, tensor], [2, 2], slots, {})
    assert [len(of([seat.slot for seat in seats[key]])) for key in (1, 2)] == [1, 1]


def test_groups_of_a_training_task_are_formed_on_each_node() -> None:
    """Ranks 0 and 2 are on n1, 1 and 3 on n2: each pair is a group."""
    task = tensor_task(1, [TWELVE[0], TWELVE[4], TWELVE[1], TWELVE[5]])
    assert tensor_groups.why_split(task, task.target, TWELVE) == ""
    moved = tensor_task(1, [TWELVE[0], TWELVE[4]])
    assert tensor_groups.why_split(moved, moved.target, TWELVE) == (
        "; 1 of 1 tensor-parallel groups of 2 is not on one node: other tasks have slots of the "
        "nodes with 2"
    )
    pipeline = task_at(1, [TWELVE[0], TWELVE[4]])
    pipeline.spec = layouts(pipeline=[2])
    assert tensor_groups.why_split(pipeline, pipeline.target, [TWELVE[0], TWELVE[4]]) == (
        "; 1 of 1 pipelines of 2 is not on one node: no node has more than 1 slot"
    )


def mixed(draw: st.DrawFn, number: int, slots: Sequence[Slot]) -> Task:
    """A plain training task, or one of two or four ranks in a group, or a command with groups."""
    kind = draw(st.sampled_from(["plain", "tensor", "command"]))
    if kind == "command":
        return command_at(number, slots, draw(st.sampled_from([2, 4])))
    return task_at(number, slots) if kind == "plain" else tensor_task(number, slots)


@given(clusters(mixed, each_max=4, tasks_max=4, count_max=8))
@settings(max_examples=1000, deadline=None, derandomize=True)
@pytest.mark.thorough
def test_the_spread_of_other_tasks_splits_no_group(case: Case) -> None:
    """Where all groups that change fit whole beside the seats that stay, they are whole."""
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
    used = [seat.slot for key in seats for seat in seats[key]]
    assert len(used) == len(set(used)) == sum(counts)
    room, wanted, num_split = of(slots), list[int](), 0
    for task, count in zip(tasks, counts, strict=True):
        each = tensor_groups.size(task, count)
        stays = count == len(task.target) and all(seat.slot in slots for seat in task.target)
        if stays or each == 1:
            claimed = {seat.slot for seat in task.target}.intersection(slots)
            if len(claimed) > count:  # which seats a smaller task keeps is a rule of its own
                claimed &= {seat.slot for seat in seats[task.id]}
            for slot in claimed:
                room[slot.node] -= 1
        else:
            wanted += [each] * (count // each)
            num_split += tensor_groups.num_split(task, seats[task.id], each)
    if fits_whole(sorted(wanted, reverse=True), room):
        assert num_split == 0


@st.composite
def nearly_full(draw: st.DrawFn) -> Case:
    """A plain training task, and commands of whole groups of one size; few slots are free."""
    size = draw(st.sampled_from([2, 3, 4]))
    nodes = [(f"n{i}", draw(st.integers(2, 5))) for i in range(draw(st.integers(2, 3)))]
    slots = [Slot(name, index) for name, num in nodes for index in range(num)]
    where = {name: Labels(rack=draw(st.sampled_from(["", "r1"]))) for name, _ in nodes}
    order, left = draw(st.permutations(slots)), len(slots)
    tasks, counts = list[Task](), list[int]()
    while len(tasks) < 4:
        each = size if tasks else 1
        count = each * draw(st.integers(1, 4)) if tasks else draw(st.integers(2, 4))
        if count > left:
            break
        at = sorted(order[: draw(st.integers(0, min(2, len(order))))])
        tasks.append(command_at(len(tasks) + 1, at, each) if tasks else task_at(1, at))
        counts.append(count)
        order, left = order[len(at) :], left - count
    return tasks, counts, slots, where


def leaves_two_nodes(sizes: Sequence[int], room: Held) -> bool:
    """True if whole groups of these sizes can leave room on two nodes; tries every assignment."""
    if not sizes:
        return sum(num > 0 for num in room.values()) > 1
    return any(
        leaves_two_nodes(sizes[1:], room | {node: room[node] - sizes[0]})
        for node in room
        if room[node] >= sizes[0]
    )


@given(nearly_full())
@settings(max_examples=4000, deadline=None, derandomize=True)
def test_a_plain_task_is_on_two_nodes_wherever_whole_groups_permit(case: Case) -> None:
    """As often as a search of all assignments that keep unchanged tasks finds one."""
    tasks, counts, slots, where = case
    seats = placement.place(tasks, counts, slots, where)
    room, wanted = of(slots), list[int]()
    for task, count in list(zip(tasks, counts, strict=True))[1:]:
        if count == len(task.target) and all(seat.slot in slots for seat in task.target):
            for seat in task.target:
                room[seat.slot.node] -= 1
            continue
        each = tensor_groups.size(task, count)
        wanted += [each] * (count // each)
        if tensor_groups.num_split(task, seats[task.id], each):
            return
    plain, count = tasks[0], counts[0]
    stays = count == len(plain.target) and all(seat.slot in slots for seat in plain.target)
    if count > 1 and not stays:
        is_spread = len(of([seat.slot for seat in seats[plain.id]])) > 1
        assert is_spread == leaves_two_nodes(wanted, room)


def test_a_group_larger_than_any_node_is_reported() -> None:
    command = command_at(1, [], 8)
    seats = placement.place([command], [8], TWELVE, {})[1]
    assert placement.why_placed(command, seats, TWELVE, {}) == (
        "8 seats on n1 n2; 1 of 1 tensor-parallel groups of 8 is not on one node: "
        "no node has more than 4 slots"
    )


def test_new_groups_are_as_near_as_possible() -> None:
    """Groups are placed on n1, then at its switch (n4), then in its rack (n3), then elsewhere."""
    where = {
        "n1": Labels(rack="r1", switch="s1"),
        "n2": Labels(rack="r2", switch="s2"),
        "n3": Labels(rack="r1", switch="s3"),
        "n4": Labels(rack="r3", switch="s1"),
    }
    slots = [*TWELVE, *(Slot("n4", index) for index in range(2))]
    command = command_at(1, TWELVE[:2], 2)
    for count, nodes in (
        (4, ["n1"]),
        (6, ["n1", "n4"]),
        (8, ["n1", "n3", "n4"]),
        (12, ["n1", "n2", "n3", "n4"]),
    ):
        seats = placement.place([command], [count], slots, where)[1]
        assert sorted(of([seat.slot for seat in seats])) == nodes
        assert tensor_groups.num_split(command, seats, 2) == 0


def test_ranks_beyond_the_last_group_come_last() -> None:
    command = command_at(1, [], 4)
    seats = placement.place([command], [10], [*TWELVE[1:], Slot("n0", 0)], {})[1]
    nodes = [seat.slot.node for seat in seats]
    assert nodes[:8] == ["n2"] * 4 + ["n3"] * 4
    assert set(nodes[8:]) <= {"n0", "n1"}


def test_the_command_receives_the_layout_of_the_plan() -> None:
    """The layout is in the record, the order, the seats and the environment."""
    large = {**MODEL, "hidden": 8192, "num_heads": 64, "num_layers": 32, "global_batch": 64}
    body = submitted(job(large, slots={"min": 8, "max": 16, "multiple_of": 8}))
    assert body.modelled is not None
    assert all(
        x.tp * x.pp * x.cp * x.dp == size
        for size, x in zip(body.modelled.sizes, body.modelled.axes, strict=True)
    )
    axes = body.modelled.axes[-1]
    assert axes.tp > 1
    assert body.modelled.layouts[-1].startswith(f"TP {axes.tp} x PP {axes.pp} x DP {axes.dp}, ")
    d = Driver(nodes=3, slots=9)
    records = d.tell("operator/a", body)
    task = task_of(d, records[0].seq)
    assert len(task.target) == 16
    assert tensor_groups.num_split(task, task.target, axes.tp) == 0
    orders = [record.body for record in records if isinstance(record.body, o.StartRank)]
    assert len(orders) == 16
    node = NodeConfig(
        name="n1", incarnation=1, cluster="c", host="h", num_slots=9, state_dir=Path()
    )
    for order in orders:
        assert order.axes == axes
        env = environment(order, node, {})
        assert (env["UNICRON_TP"], env["UNICRON_PP"], env["UNICRON_DP"]) == (
            str(axes.tp),
            str(axes.pp),
            str(axes.dp),
        )
        assert env["UNICRON_RECOMPUTE"] == axes.recompute
        assert int(env["UNICRON_MICRO_BATCH"]) == axes.micro_batch


@pytest.mark.parametrize("known", [None, Modelled(sizes=(1,), rates_flops=(1e14,), layouts=("a",))])
def test_without_a_layout_there_are_no_groups(d: Driver, known: Modelled | None) -> None:
    """A command without a model, and a command submitted to an earlier release."""
    spec = parse(job(slots={"min": 2, "max": 2}))
    records = d.tell("operator/a", r.TaskSubmitted(spec=spec, modelled=known))
    order = next(record.body for record in records if isinstance(record.body, o.StartRank))
    assert order.axes is None
    assert tensor_groups.size(task_of(d, records[0].seq), 2) == 1
