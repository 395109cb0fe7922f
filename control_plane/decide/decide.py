"""The decision: what follows from a report that has just been folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import TaskPlaced
from ...events.records.envelope import Record
from ...events.records.reports import DeviceErred, HealthChanged, IterationsLogged, QuarantineLifted
from ...events.records.types import Slot
from ..fold.edits import task_of_deadline
from ..incidents import node_incidents
from ..placement import placement
from ..planner import constraints, explain, hot_spare, pending, straggler_cost
from ..planner.problem_of_state import plan_input
from ..state import members
from ..state.cluster import ClusterState, live_tasks
from ..state.members import is_pinned
from ..state.task import Task
from ..throughput import calibration, table
from . import transition

Decide = Callable[[ClusterState, Record], Iterator[t.Body]]
Plan = Callable[[ClusterState], Iterator[t.Body]]
"""How many slots each task gets, which ones, and why."""
_ANSWERS = (r.RankStarted, r.RankReady, r.Quiesced, r.Reconfigured)
_OF_ALL = (
    r.EpochStarted,
    r.NodeJoined,
    r.NodeLeft,
    r.NodeUnreachable,
    r.NodeReachable,
    r.PolicySet,
    r.OrderRefused,
    r.HealingFrozen,
    r.HealingResumed,
    DeviceErred,
    HealthChanged,
    QuarantineLifted,
)
"""What may concern every task: nodes, the policy, whether we act."""
_PROGRESS = (r.TaskProgressed, IterationsLogged)


def decide(state: ClusterState, record: Record) -> Iterator[t.Body]:
    """The decisions that follow from `record`, which is folded already.

    The driver folds each body before it asks for the next. Called for reports only.
    """
    yield from answer(state, record, plan)
    yield from straggler_cost.priced(state)


def answer(state: ClusterState, record: Record, plan: Plan) -> Iterator[t.Body]:
    """The decisions, with this way to plan."""
    if isinstance(record.body, r.TaskSubmitted):
        yield table.table(record.seq, record.body.spec,
                               state.slot_flops or table.SLOT_FLOPS, record.body.modelled)
    if isinstance(record.body, _PROGRESS) and record.body.task in state.tasks:
        yield from calibration.calibrate(state, state.tasks[record.body.task])
    if isinstance(record.body, r.FaultRequested):
        fault = members.inject_fault(state, record.body)
        if fault is not None:
            yield fault
    yield from steps(state, affected_tasks(state, record))
    yield from node_incidents.settle(state, record)
    for _ in range(2 * len(state.tasks) + 2):
        if not state.replan or not _can_plan(state):
            return
        yield from plan(state)
        yield from steps(state, [state.tasks[key] for key in sorted(state.tasks)])
        yield from node_incidents.settle(state, record)
    raise AssertionError(f"seq {record.seq}: planning does not come to rest: {state.replan}")


def _can_plan(state: ClusterState) -> bool:
    """Whether there is a task that a plan may change. Else what made the plan out of date stands,
    and a plan follows when there is one."""
    return any(not task.ending and not is_pinned(state, task) for task in live_tasks(state))


def affected_tasks(state: ClusterState, record: Record) -> list[Task]:
    """Tasks of which something may follow from the record, by id: all others are at rest.

    What concerns nodes or the policy may affect every task; all else affects the task that it
    names, or whose deadline it is. The end of a process also affects tasks that have a seat and no
    process there: they may wait for its slot. Progress affects a task only where something is wrong
    with it: it heals, or shows that a slow rank holds up the others. An answer affects no task
    while other answers are outstanding.
    """
    body = record.body
    number: int = getattr(body, "task", 0)
    if isinstance(body, r.DeadlineReached):
        number = task_of_deadline(body.deadline)
    if isinstance(body, _OF_ALL) or (isinstance(body, r.DeadlineReached) and not number):
        return [state.tasks[key] for key in sorted(state.tasks)]
    if isinstance(body, r.RankExited):
        return [state.tasks[key] for key in sorted(state.tasks)
                if key == number or _has_empty_seat(state.tasks[key])]
    task = state.tasks.get(number)
    if task is None:
        return []
    if isinstance(body, _PROGRESS):
        return [task] if task.incident or task.faults else []
    if isinstance(body, _ANSWERS) and task.num_outstanding and not _is_none(task, record):
        return []
    return [task]


def _has_empty_seat(task: Task) -> bool:
    return any(seat.rank not in task.ranks for seat in task.target)


def _is_none(task: Task, record: Record) -> bool:
    """A command's process that says that it is ready to heal in memory answers nothing."""
    return isinstance(record.body, r.RankReady) and not task.heals_in_memory


def steps(state: ClusterState, tasks: Iterable[Task]) -> Iterator[t.Body]:
    """The next decisions for each of these."""
    for task in tasks:
        yield from transition.step(state, task)


def plan(state: ClusterState) -> Iterator[t.Body]:
    """Counts for the whole cluster, then seats, then who waits and why."""
    ground = plan_input(state)
    open_tasks = [state.tasks[wish.task] for wish in ground.asked.wishes]
    choice = hot_spare.choose(ground.asked)
    yield explain.chosen(state, ground, choice)
    if not state.held:
        yield from place(state, open_tasks, choice.plan.slots, ground.slots)
    short = constraints.short(ground.asked, choice.plan.slots)
    by_quota = constraints.barred_by_quota(ground.asked, short)
    for task, count in zip(open_tasks, choice.plan.slots, strict=True):
        if task.target:  # held, whom the plan gives nothing trains on
            continue
        if count == 0:
            yield from pending.wait(state, task, len(ground.slots), short.get(task.id, 0),
                                    by_quota=task.id in by_quota)
        elif state.held:  # it has no seats yet
            yield from pending.wait_for_healing(state, task)


def place(state: ClusterState, tasks: list[Task], counts: tuple[int, ...],
           slots: Sequence[Slot]) -> Iterator[t.Body]:
    """The seats of all; who shrinks or stays is told first."""
    where = {name: node.labels for name, node in state.nodes.items()}
    seats = placement.place(tasks, counts, slots, where)
    for task in sorted(tasks, key=lambda task: (len(seats[task.id]) > len(task.target), task.id)):
        if seats[task.id] != task.target:
            why = (placement.why_placed(task, seats[task.id], slots, where) if seats[task.id]
                   else "the plan gives it no slots")
            yield TaskPlaced(task=task.id, seats=seats[task.id], why=why)
