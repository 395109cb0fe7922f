"""The decision: what follows from a report that has just been folded."""

from __future__ import annotations

from collections.abc import Iterator

from ..events import reports as r
from ..events.orders import PlanChosen, Slot, TaskPlaced
from ..events.records import Record
from . import calibration, placement, planner, pricing, processes, throughput, transition, waiting
from .state import ClusterState, Task, live_tasks, usable_slots

_OF_ALL = (r.EpochStarted, r.NodeJoined, r.NodeLeft, r.NodeSilenced, r.NodeHeard, r.PolicySet,
           r.DeadlineReached, r.OrderRefused, r.RankExited, r.HealingFrozen, r.HealingResumed)
"""What may concern every task: nodes, time, slots that become free, whether we act."""


def decide(state: ClusterState, record: Record) -> Iterator[r.Body]:
    """The decisions that follow from `record`, which is folded already.

    The driver folds each body before it asks for the next. Called for reports only.
    """
    if isinstance(record.body, r.TaskSubmitted):
        yield throughput.table(record.seq, record.body.spec,
                               state.slot_flops or throughput.SLOT_FLOPS)
    if isinstance(record.body, r.TaskProgressed) and record.body.task in state.tasks:
        yield from calibration.calibrate(state, state.tasks[record.body.task])
    if isinstance(record.body, r.FaultRequested):
        fault = processes.inject_fault(state, record.body)
        if fault is not None:
            yield fault
    for task in _concerned(state, record):
        yield from transition.step(state, task)
    for _ in range(2 * len(state.tasks) + 2):
        if not state.replan or not live_tasks(state):
            return
        yield from _plan(state)
        for task in [state.tasks[key] for key in sorted(state.tasks)]:
            yield from transition.step(state, task)
    raise AssertionError(f"seq {record.seq}: planning does not come to rest: {state.replan}")


def _concerned(state: ClusterState, record: Record) -> list[Task]:
    """Tasks whose step may yield something: all others are at rest."""
    if isinstance(record.body, _OF_ALL):
        return [state.tasks[key] for key in sorted(state.tasks)]
    task = state.tasks.get(getattr(record.body, "task", 0))
    if task is None or (isinstance(record.body, r.TaskProgressed) and not task.incident):
        return []  # progress heals, and nothing else
    return [task]


def _plan(state: ClusterState) -> Iterator[r.Body]:
    """Counts for the whole cluster, then seats, then who waits and for what."""
    slots = usable_slots(state)
    open_tasks: list[Task] = []
    theirs: list[Slot] = []
    for task in live_tasks(state):
        if task.ending or _pinned(state, task):
            theirs += [rank.slot for rank in task.ranks.values()]
            theirs += [seat.slot for seat in task.target]
        else:
            open_tasks.append(task)
    given = {seat.slot for task in open_tasks for seat in task.target}
    taken, usable = set(theirs) - given, set(slots)
    slots = [slot for slot in slots if slot not in taken]
    policy = state.policy
    every = {task.id: _wish(task, usable, policy.transition_s)
             for task in live_tasks(state) if not task.ending}
    asked = planner.PlanInput(wishes=tuple(every[task.id] for task in open_tasks),
                              num_slots=len(slots), mtbf_gpu_s=policy.mtbf_gpu_s,
                              gain_min=policy.gain_min)
    choice = planner.choose(asked)
    yield PlanChosen(trigger=state.replan, num_slots=len(slots), allocations=choice.allocations,
                     waf=choice.plan.waf, objective=choice.plan.objective,
                     alternatives=choice.alternatives,
                     ideal_waf=_ideal_waf(state, list(every.values())))
    if not state.held:
        yield from _place(open_tasks, choice.plan.slots, slots)
    told = pricing.prices(asked, choice.plan)
    for task, count in zip(open_tasks, choice.plan.slots, strict=True):
        if task.target:  # held, whom the plan gives nothing trains on
            continue
        if count == 0:
            yield from waiting.wait(state, task, len(slots), told.get(task.id))
        elif state.held:  # it has no seats yet
            yield from waiting.wait_for_healing(state, task)


def _ideal_waf(state: ClusterState, wishes: list[planner.Wish]) -> float:
    """What the best plan would earn with every slot of every node that has not left."""
    num_slots = sum(node.num_slots for node in state.nodes.values() if node.health != "left")
    return planner.ideal_waf(wishes, num_slots)


def _pinned(state: ClusterState, task: Task) -> bool:
    """It has ranks on a node that is silent: nothing is known of it, so nothing is changed."""
    return any((node := state.nodes.get(rank.slot.node)) is not None and node.silent
               for rank in task.ranks.values())


def _wish(task: Task, usable: set[Slot], transition_s: float) -> planner.Wish:
    table = task.throughput or throughput.table(task.id, task.spec)
    found = throughput.candidates(table, len(task.target))
    whole = len(task.living_members()) == len(task.target) if task.is_train else bool(task.ranks)
    fits = all(seat.slot in usable for seat in task.target)
    hurt = bool(task.target) and not (fits and (whole or not task.incident))
    weight = task.weight
    return planner.Wish(task=task.id, name=task.spec.name, now=len(task.target), hurt=hurt,
                        transition_s=transition_s, sizes=tuple(size for size, _ in found),
                        wafs=tuple(weight * rate for _, rate in found))


def _place(tasks: list[Task], counts: tuple[int, ...], slots: list[Slot]) -> Iterator[r.Body]:
    """The seats of all; who shrinks or stays is told first."""
    seats = placement.place(tasks, counts, slots)
    for task in sorted(tasks, key=lambda task: (len(seats[task.id]) > len(task.target), task.id)):
        if seats[task.id] != task.target:
            why = (placement.why_placed(task, seats[task.id]) if seats[task.id]
                   else "the plan gives it no slots")
            yield TaskPlaced(task=task.id, seats=seats[task.id], why=why)
