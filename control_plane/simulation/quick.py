"""Unicron's plans without what explains them: where nobody keeps the log, nobody reads it.

The same counts on the same slots as the heart's own plan, for the same reports. The plans that were
beaten, what binds a plan and the price of a task that waits are left out. Under limits, floors,
alpha and hot spares, or while healing is held, the heart's own plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...events.records import types as t
from ...events.records.decisions import PlanChosen
from ...events.records.envelope import Record
from ..decide import decide as heart
from ..decide.decide import Known
from ..planner import constraints, pending, planner, straggler_cost
from ..planner.problem import allocation
from ..planner.problem_of_state import plan_input
from ..state.cluster import ClusterState, may_hold
from ..state.task import Task


def decide(state: ClusterState, record: Record, known: Known | None) -> Iterator[t.Body]:
    """As the heart does, with quick plans."""
    yield from heart.answer(state, record, known, plan)
    yield from straggler_cost.priced(state)


def plan(state: ClusterState, known: Known | None) -> Iterator[t.Body]:
    """Counts for the whole cluster, then seats for those that do not stay as they are."""
    ground = plan_input(state)
    asked = ground.asked
    if (
        state.held
        or asked.spare_slots
        or asked.limits is not None
        or not constraints.is_plain(asked)
    ):
        yield from heart.plan(state, known)
        return
    chosen = planner.planned(asked)
    given = [allocation(wish, slots)
             for wish, slots in zip(asked.wishes, chosen.slots, strict=True)]
    yield PlanChosen(
        trigger=state.replan, num_slots=asked.num_slots, allocations=tuple(given),
        waf=chosen.waf, objective=chosen.objective, alternatives=(), input=0,
        running_s=asked.running_s)
    moved = [one for wish, one in zip(asked.wishes, given, strict=True)
             if one.slots != wish.now or wish.hurt or not _trains(state.tasks[wish.task])]
    if all(_stays(state, state.tasks[one.task], one.slots) for one in moved):
        return
    about = {one.task for one in moved}
    kept = {seat.slot for one in given if one.task not in about
            for seat in state.tasks[one.task].target}
    yield from heart.place(state, [state.tasks[one.task] for one in moved],
                           tuple(one.slots for one in moved),
                           [slot for slot in ground.slots if slot not in kept])
    for one in moved:
        task = state.tasks[one.task]
        if not task.target and not one.slots:
            yield from pending.wait(state, task, len(ground.slots), None)


def _trains(task: Task) -> bool:
    return (task.phase == "training" and not task.incident
            and len(task.ranks) == len(task.members) == len(task.target))


def _stays(state: ClusterState, task: Task, slots: int) -> bool:
    """Whether every process is where it has a seat, and all seats may stay where they are."""
    seats_at = task.seats_at
    return (slots == len(task.target) and (bool(slots) or bool(task.why))
            and may_hold(state, task.target)
            and all(seats_at.get(rank.rank) == rank.slot for rank in task.ranks.values()))
