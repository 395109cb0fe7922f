"""The decisions that follow from a report that has just been folded."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import LossSpiked, TaskPlaced
from ...events.records.envelope import Record
from ...events.records.types import Slot
from ..fold.edits import LOSSES, task_of_deadline
from ..incidents import node_incidents, probes
from ..incidents.blame import is_avoided
from ..placement import placement
from ..planner import constraints, explain, hot_spare, pending, straggler_cost
from ..planner.problem_of_state import PlanningSnapshot, planning_snapshot
from ..state import members
from ..state.cluster import ClusterState, live_tasks
from ..state.members import is_pinned
from ..state.task import Task
from ..throughput import calibration, table
from . import transition

Decide = Callable[[ClusterState, Record], Iterator[t.Body]]
Plan = Callable[[ClusterState], Iterator[t.Body]]
"""Yields the plan: slots per task, their placement, and the reasons of waiting tasks."""
_ANSWERS = (r.RankStarted, r.RankReady, r.Quiesced, r.Reconfigured)
_AFFECTING_ALL = (
    r.EpochStarted,
    r.NodeJoined,
    r.NodeLeft,
    r.NodeReachable,
    r.PolicySet,
    r.RoomChanged,
    r.OrderRefused,
    r.HealingFrozen,
    r.HealingResumed,
    r.DeviceErred,
    r.HealthChanged,
    r.QuarantineLifted,
)
"""Reports that may affect every task: of nodes, of the policy, of what is paused or on."""
_MAY_PROBE = (
    r.NodeJoined,
    r.NodeReachable,
    r.NodeUnreachable,
    r.DeadlineReached,
    r.HealingResumed,
)
"""Reports after which a probe may be due, or agents there that can make it."""
_PROGRESS = (r.TaskProgressed, r.IterationsLogged)


def decide(state: ClusterState, record: Record) -> Iterator[t.Body]:
    """The decisions after the folded report. The caller folds each one before it takes the next."""
    yield from decisions(state, record, plan)
    for name in list(state.to_price):
        yield straggler_cost.node_cost(state, name)


def decisions(state: ClusterState, record: Record, plan: Plan) -> Iterator[t.Body]:
    """As `decide`, with this plan function and without costs of degraded nodes."""
    if isinstance(record.body, r.TaskSubmitted):
        yield table.table(
            record.seq, record.body.spec, state.slot_flops or table.SLOT_FLOPS, record.body.modelled
        )
    if isinstance(record.body, _PROGRESS) and record.body.task in state.tasks:
        yield from calibration.calibrate(state, state.tasks[record.body.task])
        yield from _spike(state, state.tasks[record.body.task])
    if isinstance(record.body, r.FaultRequested):
        fault = members.inject_fault(state, record.body)
        if fault is not None:
            yield fault
    yield from task_decisions(state, affected_tasks(state, record))
    yield from node_incidents.decide_nodes(state, record)
    if state.to_probe and isinstance(record.body, _MAY_PROBE):
        yield from probes.decide_probes(state)
    for _ in range(2 * len(state.tasks) + 2):
        if (
            not state.replan
            or LOSSES in state.deadlines
            or all(task.ending or is_pinned(state, task) for task in live_tasks(state))
        ):
            break  # `state.replan` stays set until a plan may change any task
        yield from plan(state)
        yield from task_decisions(state, _all_tasks(state))
        yield from node_incidents.decide_nodes(state, record)
    else:
        raise AssertionError(f"seq {record.seq}: planning does not come to rest: {state.replan}")
    if state.held:  # any record may change what would be ordered, and that is recorded
        yield from task_decisions(state, _all_tasks(state))


def _spike(state: ClusterState, task: Task) -> Iterator[t.Body]:
    """Record a spike of the loss once, when it has lasted for long enough."""
    spike = task.spike
    if spike is not None and not spike.seq and spike.num >= state.policy.loss_iterations:
        yield LossSpiked(
            task=task.id,
            iteration=spike.first,
            num=spike.num,
            loss=spike.loss,
            median=spike.median,
            deviation=spike.deviation,
        )


def affected_tasks(state: ClusterState, record: Record) -> list[Task]:
    """The tasks for which decisions may follow from the record, by id.

    Records about nodes or the policy may affect every task. A node that is lost, or is drained to
    shut it down, affects only the tasks that use it, because many nodes may be lost at once. Any
    other record affects the task that it names, or the task of its deadline. The exit of a process
    also affects each task that has a seat without a process on that node: the seat may wait for the
    slot. Progress affects only a task with faults or an incident, also a recovering one, since it
    may close it or show a straggler, and one that ends because of its loss. RankWorked affects
    none: only a deadline moves. An answer to an order has no effect while other answers are
    outstanding, nor has one more failed collective of members that leave their generation at once:
    a thousand members report theirs. While healing is paused, `decisions` looks at every task after
    each record.
    """
    body = record.body
    number: int = getattr(body, "task", 0)
    if isinstance(body, r.DeadlineReached):
        number = task_of_deadline(body.deadline)
    if isinstance(body, _AFFECTING_ALL) or (isinstance(body, r.DeadlineReached) and not number):
        return _all_tasks(state)
    if isinstance(body, r.NodeProbed):
        ended = any(node.unreached_seq == record.seq for node in state.nodes.values())
        return [task for task in _all_tasks(state) if ended and _uses(task, body.target)]
    if isinstance(body, r.NodeUnreachable) or (isinstance(body, r.NodeDrained) and body.down):
        return [task for task in _all_tasks(state) if _uses(task, body.node)]
    if isinstance(body, r.RankExited):
        node = record.source.rpartition("/")[0]
        return [
            task
            for task in _all_tasks(state)
            if task.id == number
            or any(seat.slot.node == node and seat.rank not in task.ranks for seat in task.target)
        ]
    task = None if isinstance(body, r.RankWorked) else state.tasks.get(number)
    if task is None:
        return []
    if isinstance(body, _PROGRESS):
        is_due = task.incident or task.recovering or task.faults
        moves = is_due or task.suspects or task.ending
        return [task] if moves else []
    # The RankReady of a command's process answers no order.
    unsolicited = isinstance(body, r.RankReady) and not task.heals_in_memory
    if isinstance(body, _ANSWERS) and task.num_outstanding and not unsolicited:
        return []
    if isinstance(body, r.CollectiveFailed) and _is_evidence_only(state, task):
        return []
    return [task]


def _is_evidence_only(state: ClusterState, task: Task) -> bool:
    """Whether a failed collective only adds to what is known. Its members leave at once, because of
    a fault that is decided on; no device is at fault, and no node is silent, which the collective's
    peer might confirm to be lost. The last answer is looked at with all that was reported."""
    return (
        task.phase == "quiescing"
        and task.mode == "now"
        and task.num_outstanding > 0
        and not (task.faults or task.suspects or state.unreachable)
    )


def _uses(task: Task, node: str) -> bool:
    """Whether the task has a process, a seat, a member or an in-memory checkpoint on the node."""
    return (
        any(rank.slot.node == node for rank in chain(task.ranks.values(), task.orphans))
        or any(seat.slot.node == node for seat in task.target)
        or any(member.node == node for member in task.members)
        or any(node in one.stores for one in task.stores)
        or node in task.store_nodes
    )


def _all_tasks(state: ClusterState) -> list[Task]:
    return [state.tasks[key] for key in sorted(state.tasks)]


def task_decisions(state: ClusterState, tasks: Iterable[Task]) -> Iterator[t.Body]:
    for task in tasks:
        yield from transition.next_decisions(state, task)


def plan(state: ClusterState) -> Iterator[t.Body]:
    """The slots per task for the whole cluster, then seats, then the reasons of waiting tasks."""
    snapshot = planning_snapshot(state)
    choice = hot_spare.with_hot_spare(snapshot.problem)
    yield explain.plan_record(state, snapshot, choice)
    counts = choice.plan.slots
    open_tasks = [state.tasks[demand.task] for demand in snapshot.problem.demands]
    if not state.starts_held:
        yield from place(state, open_tasks, counts, snapshot)
    short = constraints.below_floor(snapshot.problem, counts)
    by_quota = constraints.blocked_by_quota(snapshot.problem, short)
    for task, count in zip(open_tasks, counts, strict=True):
        if task.target:  # it has seats, or keeps them while no process is started
            continue
        if count == 0:
            yield from pending.record_waiting(
                state, task, snapshot, short.get(task.id, 0), by_quota=task.id in by_quota
            )
        elif state.starts_held:  # it gets no seats
            yield from pending.record_reason(task, state.starts_held)


def _preferred(
    state: ClusterState, tasks: list[Task], counts: tuple[int, ...], snapshot: PlanningSnapshot
) -> tuple[Slot, ...]:
    """The slots without free ones on avoided nodes, if there are enough of them."""
    avoided = {name for name, node in state.nodes.items() if is_avoided(state, node)}
    if not avoided or snapshot.barred:
        return snapshot.slots
    mine = {seat.slot for task in tasks for seat in task.target}
    slots = [slot for slot in snapshot.slots if slot.node not in avoided or slot in mine]
    return tuple(slots) if len(slots) >= sum(counts) else snapshot.slots


def place(
    state: ClusterState, tasks: list[Task], counts: tuple[int, ...], snapshot: PlanningSnapshot
) -> Iterator[t.Body]:
    """Record the changed seats of all tasks. Tasks that do not grow come first."""
    labels = {name: node.labels for name, node in state.nodes.items()}
    slots = _preferred(state, tasks, counts, snapshot)
    seats = placement.place(tasks, counts, slots, labels, snapshot.barred)
    for task in sorted(tasks, key=lambda task: (len(seats[task.id]) > len(task.target), task.id)):
        if seats[task.id] != task.target:
            why = (
                placement.why_placed(task, seats[task.id], slots, labels)
                if seats[task.id]
                else "the plan gives it no slots"
            )
            yield TaskPlaced(task=task.id, seats=seats[task.id], why=why)
