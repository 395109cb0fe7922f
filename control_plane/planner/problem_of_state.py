"""What a plan follows from: the planner's input, made of the cluster's state by one function.

`decide` plans with it, and so does every dry run: the two cannot differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
from msgspec import Struct

from ...events.records.types import Slot
from ...events.spec.parallelism import shape
from ..state.cluster import ClusterState, live_tasks, may_hold, usable_slots
from ..state.members import is_pinned, is_whole
from ..state.task import Task
from ..throughput import table as throughput
from ..throughput import transition_cost
from ..throughput.training_layouts import layout_within
from .problem import PlanInput, Wish

_SPARE_BITS = 64 - 52
"""JSON readers hold integers as doubles: exact to 53 bits."""


class Ground(Struct, frozen=True, kw_only=True):
    """What is to be planned, and on what."""

    asked: PlanInput
    """Its wishes are of the tasks that the plan is about, by id."""
    slots: tuple[Slot, ...]
    """That the plan may give, in the order of `usable_slots`; `asked.num_slots` of them."""
    every: tuple[Wish, ...]
    """Of each live task that is not ending, also of those that the plan leaves alone."""
    num_slots_all: int
    """Of every node that has not left."""


def plan_input(state: ClusterState, *, without: str = "") -> Ground:
    """The ground of a plan that would be made now, or if the node `without` were drained.

    Tasks that are ending, or that have ranks on a node that is silent, keep what they have: their
    slots are not the plan's to give, unless another task has been given them already.
    """
    slots = [slot for slot in usable_slots(state) if slot.node != without] if without else (
        usable_slots(state))
    open_tasks: list[Task] = []
    theirs: list[Slot] = []
    for task in live_tasks(state):
        if task.ending or is_pinned(state, task):
            theirs += [rank.slot for rank in task.ranks.values()]
            theirs += [seat.slot for seat in task.target]
        else:
            open_tasks.append(task)
    taken = set(theirs)
    if taken:
        taken -= {seat.slot for task in open_tasks for seat in task.target}
    free = tuple(slot for slot in slots if slot not in taken) if taken else tuple(slots)
    policy = state.policy
    every = {task.id: _wish(state, task, without)
             for task in live_tasks(state) if not task.ending}
    spares = policy.hot_spare and not policy.alpha  # they are priced by what is earned alone
    asked = PlanInput(wishes=tuple(every[task.id] for task in open_tasks), num_slots=len(free),
                      mtbf_gpu_s=state.mtbf_gpu_s or policy.mtbf_gpu_s, gain_min=policy.gain_min,
                      moves_max=policy.moves_max, quotas=tuple(sorted(policy.quotas.items())),
                      floor=policy.floor, alpha=policy.alpha,
                      repair_s=policy.repair_s if spares else 0.0,
                      spare_slots=node_slots(state) if spares else 0)
    return Ground(asked=asked, slots=free, every=tuple(every.values()),
                  num_slots_all=sum(node.num_slots for node in state.nodes.values()
                                    if node.health != "left"))


def digest(state: ClusterState, ground: Ground) -> int:
    """Of all that a plan follows from now, in 52 bits: two moments with one digest have one plan,
    on the same slots.

    For the `--check` of `plan --apply`: whether a dry run is out of date.
    """
    targets = [state.tasks[wish.task].target for wish in ground.every]
    data = msgspec.msgpack.encode((ground.asked, ground.slots, targets))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> _SPARE_BITS


def input_digest(state: ClusterState) -> int:
    """`digest` of a plan that would be made now."""
    return digest(state, plan_input(state))


def node_slots(state: ClusterState) -> int:
    """Of most nodes that have not left, the larger where two sizes are as frequent; 0: no node."""
    counts = Counter(node.num_slots for node in state.nodes.values()
                     if node.health != "left" and node.num_slots)
    return max(counts, key=lambda num: (counts[num], num), default=0)


def _wish(state: ClusterState, task: Task, without: str) -> Wish:
    table = task.throughput or throughput.table(task.id, task.spec, modelled=task.modelled)
    found = throughput.candidates(table, len(task.target), task.spec.slots.floor)
    fits = may_hold(state, task.target) and not (
        without and any(seat.slot.node == without for seat in task.target))
    hurt = bool(task.target) and not (fits and (is_whole(task) or not task.incident))
    weight = task.weight
    return Wish(task=task.id, name=task.spec.name, now=len(task.target), hurt=hurt,
                transition=transition_cost.transition(state, task),
                sizes=tuple(size for size, _ in found), shapes=shapes(task, found),
                wafs=tuple(weight * rate for _, rate in found), priority=task.spec.priority,
                team=task.spec.team, weight=weight, floor=task.spec.slots.floor)


def shapes(task: Task, found: list[tuple[int, float]]) -> tuple[int, ...]:
    """By candidate: which of its shapes the layout on so many has."""
    train = task.spec.training
    layouts = [layout_within(train, size) for size, _ in found] if train is not None else []
    known = [shape(axes) if axes is not None else None for axes in layouts]
    return tuple(map(known.index, known)) if len(dict.fromkeys(known)) > 1 else ()
