"""Random clusters and tasks for tests of placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decider import spec
from hypothesis import strategies as st
from unicron.control_plane.fold.edits import set_members
from unicron.control_plane.state.task import Rank, Task
from unicron.events.records.types import Labels, Member, Seat, Slot

Held = dict[str, int]
"""Number of a task's seats by node."""
Where = dict[str, Labels]
Case = tuple[list[Task], list[int], list[Slot], Where]
Sits = Callable[[st.DrawFn, int, Sequence[Slot]], Task]
"""Makes the task with this number on these slots."""


def task_at(
    number: int, slots: Sequence[Slot], *, started: bool = True, num_layers: int = 1
) -> Task:
    """A task that trains on these slots, or that is only assigned to them."""
    train = {
        "iterations": 50,
        "output": "/tmp/out",
        "batch": {"global": 24, "micro": 2},
        "model": {"num_layers": num_layers},
    }
    task = Task(
        id=number,
        spec=spec(name=f"t{number}", train=train),
        weight=1.0,
        submitted_s=0.0,
        since_s=0.0,
        target=tuple(Seat(rank, slot) for rank, slot in enumerate(slots)),
    )
    if started:
        task.phase = "training"
        task.ranks = {
            rank: Rank(rank=rank, attempt=1, slot=slot, state="member", has_state=True)
            for rank, slot in enumerate(slots)
        }
        set_members(task, tuple(Member(rank, 1, slot.node, "") for rank, slot in enumerate(slots)))
    return task


def of(slots: Sequence[Slot]) -> Held:
    held: Held = {}
    for slot in slots:
        held[slot.node] = held.get(slot.node, 0) + 1
    return held


@st.composite
def clusters(draw: st.DrawFn, sits: Sits, *, each_max: int, tasks_max: int, count_max: int) -> Case:
    """Tasks on slots of which some are lost; their new numbers of slots; the slots; labels.

    `each_max`: most slots of a node, and of a task before. `count_max`: most slots of a task now.
    """
    nodes = [(f"n{i}", draw(st.integers(1, each_max))) for i in range(draw(st.integers(2, 4)))]
    where = {
        name: Labels(
            rack=draw(st.sampled_from(["", "r1", "r2"])),
            switch=draw(st.sampled_from(["", "s1", "s2"])),
        )
        for name, _ in nodes
    }
    every = [Slot(name, index) for name, num in nodes for index in range(num)]
    order, tasks = draw(st.permutations(every)), list[Task]()
    for number in range(1, draw(st.integers(1, tasks_max)) + 1):
        num = draw(st.integers(0, min(each_max, len(order))))
        tasks.append(sits(draw, number, sorted(order[:num])))
        order = order[num:]
    slots = [slot for slot in every if draw(st.integers(0, 5))]
    counts: list[int] = []
    for task in tasks:
        stays = len(task.target) if draw(st.booleans()) else draw(st.integers(0, count_max))
        counts.append(min(stays, len(slots) - sum(counts)))
    if draw(st.booleans()):
        where = dict.fromkeys(where, Labels())
    return tasks, counts, slots, where
