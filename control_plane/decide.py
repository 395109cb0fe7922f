"""The decision: what follows from a report that has just been folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..events import reports as r
from ..events.detected import DeviceErred, HealthChanged, QuarantineLifted
from ..events.logged import IterationsLogged
from ..events.orders import Slot, TaskPlaced
from ..events.records import Record
from . import (
    barring,
    calibration,
    calm,
    degraded,
    explain,
    floors,
    node_incidents,
    placement,
    pricing,
    processes,
    spare,
    throughput,
    transition,
    waiting,
)
from .plan_input import is_pinned, plan_input
from .rows import Found
from .state import ClusterState, Task, live_tasks
from .wishes import PlanInput

Known = Callable[[PlanInput], Found | None]
Decide = Callable[[ClusterState, Record, Known | None], Iterator[r.Body]]
Plan = Callable[[ClusterState, Known | None], Iterator[r.Body]]
"""How many slots each task gets, which ones, and why."""
_OF_ALL = (r.EpochStarted, r.NodeJoined, r.NodeLeft, r.NodeSilenced, r.NodeHeard, r.PolicySet,
           r.DeadlineReached, r.OrderRefused, r.RankExited, r.HealingFrozen, r.HealingResumed,
           DeviceErred, HealthChanged, QuarantineLifted)
"""What may concern every task: nodes, time, slots that become free, whether we act."""
_PROGRESS = (r.TaskProgressed, IterationsLogged)


def decide(state: ClusterState, record: Record, known: Known | None = None) -> Iterator[r.Body]:
    """The decisions that follow from `record`, which is folded already.

    The driver folds each body before it asks for the next. Called for reports only. `known`: optima
    that were found before; with them and without the decisions are the same.
    """
    yield from answer(state, record, known, plan)
    yield from degraded.priced(state)


def answer(state: ClusterState, record: Record, known: Known | None, plan: Plan
           ) -> Iterator[r.Body]:
    """The decisions, with this way to plan."""
    if calm.is_one_of_many(state, record.body) and calm.is_quiet(state, record.body):
        return
    if isinstance(record.body, r.TaskSubmitted):
        yield throughput.table(record.seq, record.body.spec,
                               state.slot_flops or throughput.SLOT_FLOPS, record.body.modelled)
    if isinstance(record.body, _PROGRESS) and record.body.task in state.tasks:
        yield from calibration.calibrate(state, state.tasks[record.body.task])
    if isinstance(record.body, r.FaultRequested):
        fault = processes.inject_fault(state, record.body)
        if fault is not None:
            yield fault
    yield from steps(state, concerned(state, record))
    yield from node_incidents.settle(state, record)
    for _ in range(2 * len(state.tasks) + 2):
        if not state.replan or not _can_plan(state):
            return
        yield from plan(state, known)
        yield from steps(state, [state.tasks[key] for key in sorted(state.tasks)])
        yield from node_incidents.settle(state, record)
    raise AssertionError(f"seq {record.seq}: planning does not come to rest: {state.replan}")


def _can_plan(state: ClusterState) -> bool:
    """Whether there is a task that a plan may change. Else what made the plan out of date stands,
    and a plan follows when there is one."""
    return any(not task.ending and not is_pinned(state, task) for task in live_tasks(state))


def concerned(state: ClusterState, record: Record) -> list[Task]:
    """Tasks whose step may yield something: all others are at rest."""
    if not calm.is_one_of_many(state, record.body):
        state.resting.discard(getattr(record.body, "task", 0))
    if isinstance(record.body, _OF_ALL):
        return [state.tasks[key] for key in sorted(state.tasks)]
    task = state.tasks.get(getattr(record.body, "task", 0))
    if task is None or (isinstance(record.body, _PROGRESS)
                        and not task.incident and not task.faults):
        return []  # progress heals, or shows that a slow rank holds up the others
    return [task]


def steps(state: ClusterState, tasks: Iterable[Task]) -> Iterator[r.Body]:
    """The next decisions for each of these."""
    for task in tasks:
        if not calm.rests(state, task):
            is_last = True
            for body in transition.step(state, task):
                is_last = False
                yield body
            calm.settle(state, task, is_last=is_last)


def plan(state: ClusterState, known: Known | None) -> Iterator[r.Body]:
    """Counts for the whole cluster, then seats, then who waits and for what."""
    ground = plan_input(state)
    open_tasks = [state.tasks[wish.task] for wish in ground.asked.wishes]
    choice = spare.choose(ground.asked, known(ground.asked) if known is not None else None)
    yield explain.chosen(state, ground, choice)
    if not state.held:
        yield from place(state, open_tasks, choice.plan.slots, ground.slots)
    told = pricing.prices(ground.asked, choice.plan)
    short = floors.short(ground.asked, choice.plan.slots)
    by_quota = floors.barred_by_quota(ground.asked, short)
    idle = choice.spare.num_slots if choice.spare and choice.spare.verdict == "kept" else 0
    bars = barring.barred(ground.asked, choice.plan.slots, min(idle, ground.asked.num_slots))
    for task, count in zip(open_tasks, choice.plan.slots, strict=True):
        if task.target:  # held, whom the plan gives nothing trains on
            continue
        if count == 0:
            yield from waiting.wait(state, task, len(ground.slots), told.get(task.id),
                                    short.get(task.id, 0), bars.get(task.id),
                                    by_quota=task.id in by_quota)
        elif state.held:  # it has no seats yet
            yield from waiting.wait_for_healing(state, task)


def place(state: ClusterState, tasks: list[Task], counts: tuple[int, ...],
           slots: Sequence[Slot]) -> Iterator[r.Body]:
    """The seats of all; who shrinks or stays is told first."""
    where = {name: node.labels for name, node in state.nodes.items()}
    seats = placement.place(tasks, counts, slots, where)
    for task in sorted(tasks, key=lambda task: (len(seats[task.id]) > len(task.target), task.id)):
        if seats[task.id] != task.target:
            why = (placement.why_placed(task, seats[task.id], slots, where) if seats[task.id]
                   else "the plan gives it no slots")
            yield TaskPlaced(task=task.id, seats=seats[task.id], why=why)
