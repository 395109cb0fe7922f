"""What the cluster has shown of itself: how often it breaks, and for how long a change stands.

A fault is an incident, whatever it was, unless somebody asked for it (FaultRequested), or the job
names what is not there. A node that takes several tasks with it is one fault. Only the time of
running processes counts, while a leader watched.

A task stands for as long as it made no progress: the time between two told iterations, less what
those between them take undisturbed. A command that goes on from its own checkpoint tells old ones
again: what they take is part of it.
"""

from __future__ import annotations

from math import inf
from statistics import median

from msgspec import Struct

from ...events.records.envelope import Record
from ...events.records.reports import EpochStarted
from ...events.records.statuses import WRONG_INPUT
from ...events.spec.parallelism import shape
from ..state.cluster import ClusterState
from ..state.incident import Incident
from ..state.task import Standing, Task


class Transition(Struct, frozen=True, kw_only=True):
    """D_transition by kind of change: for so long the change costs what the task earns now."""

    same_s: float
    """Back to as many slots, after a fault."""
    shrink_s: float
    grow_s: float
    stop_s: float
    """To none."""
    reshape_s: float = 0.0
    """To a layout that splits a replica in another way: all of the state moves."""

    @classmethod
    def alike(cls, length_s: float) -> Transition:
        """One number for all kinds."""
        return cls(same_s=length_s, shrink_s=length_s, grow_s=length_s, stop_s=length_s,
                   reshape_s=length_s)

HARMED_S_MAX = 600.0
"""A fault that was asked for longer ago has come to nothing."""
NUM_STOOD_MAX = 16
"""Changes of one kind that the state keeps of one task."""
NUM_STOOD_MIN = 3
"""So many are a measurement."""
MTBF_S_MIN = 1.0


# --- how often it breaks ------------------------------------------------------------------------
def watch(state: ClusterState, record: Record) -> None:
    """Fold, before the record's time is the state's: the time until it was watched.

    Not where a leader begins: before that there was none.
    """
    if not isinstance(record.body, EpochStarted):
        state.observed_slot_s += state.num_running * max(record.at_s - state.at_s, 0.0)
    settle_mtbf(state)


def was_harmed(harmed_s: float, at_s: float) -> bool:
    """Whether what somebody asked to break at `harmed_s` may have broken for that at `at_s`."""
    return harmed_s >= 0 and at_s - harmed_s <= HARMED_S_MAX


def is_fault(state: ClusterState, task: Task, incident: Incident) -> bool:
    """Whether an incident that is being opened counts; the task's faults are not taken in yet."""
    nodes = [state.nodes.get(rank.slot.node) for rank in task.ranks.values()]
    harmed = [rank.harmed_s for rank in task.ranks.values()]
    harmed += [node.harmed_s for node in nodes if node is not None]
    if any(was_harmed(harmed_s, state.at_s) for harmed_s in harmed) or any(
            fault.on_purpose for fault in task.faults):
        return False
    alike = any(other.node == incident.node and other.task != task.id
                and incident.opened_s - other.opened_s <= state.policy.replace_after_s
                for other in state.incidents.values()) if incident.node else False
    return incident.status != WRONG_INPUT and not alike


def settle_mtbf(state: ClusterState) -> None:
    """Fold: the time between two faults of one slot, by the prior and what was seen, as a Gamma
    prior joins them. The value stands until it is off by `calibrate_min`; one without end, of an
    old log's policy, does not stand."""
    policy, last = state.policy, state.mtbf_gpu_s
    num = policy.mtbf_faults + state.num_faults
    seen_s = policy.mtbf_faults * policy.mtbf_gpu_s + state.observed_slot_s
    found = max(seen_s / num, MTBF_S_MIN) if num > 0 else policy.mtbf_gpu_s
    if not 0 < last < inf or abs(found - last) > policy.calibrate_min * last:
        state.mtbf_gpu_s = found


# --- for how long a change stands ---------------------------------------------------------------
def transition(state: ClusterState, task: Task) -> Transition:
    """D_transition of each kind of change: the median of the last ones, else the policy's prior.

    Of leaving it is what leaving and coming back take.
    """
    prior_s = state.policy.transition_s

    def usual_s(kind: str) -> float | None:
        stood_s = task.stood_s.get(kind, ())
        return median(stood_s) if len(stood_s) >= NUM_STOOD_MIN else None

    found = {kind: prior_s if (one := usual_s(kind)) is None else one
             for kind in ("same", "shrink", "grow")}
    reshape_s = usual_s("reshape")
    leave_s, start_s = usual_s("stop"), usual_s("start")
    stop_s = prior_s if leave_s is None or start_s is None else leave_s + start_s
    return Transition(same_s=found["same"], shrink_s=found["shrink"], grow_s=found["grow"],
                      stop_s=stop_s,
                      reshape_s=state.policy.reshape_s if reshape_s is None else reshape_s)


def num_slots(task: Task) -> int:
    """On how many it trains: a command on all that it was given."""
    return len(task.members) if task.heals_in_memory else len(task.target)


def stands(state: ClusterState, task: Task) -> None:
    """Fold: from its last told iteration on it stands, if it did not already."""
    if not task.heals_in_memory:
        return
    size = len(task.members)
    since_s = task.progressed_s if size and task.progressed_s > 0 else state.at_s
    if task.standing is None:
        task.standing = Standing(size=size, since_s=since_s, iteration=task.iteration,
                                 iteration_s=_iteration_s(task, size) or task.step_s,
                                 axes=task.axes, void=bool(state.held))
    elif task.standing.since_s < 0:
        task.standing.since_s, task.standing.iteration = since_s, task.iteration


def halts(state: ClusterState, task: Task) -> None:
    """Fold: a command has no process any more. If it told of iterations it stands since the last.

    With no slots it waits for others: that is no transition of its own.
    """
    logged = task.logged
    if not task.target or logged is None:
        task.standing = None
    elif task.standing is None and task.phase == "training" and logged.round == task.rounds:
        task.standing = Standing(
            size=logged.size, since_s=task.progressed_s, iteration=task.iteration,
            iteration_s=_iteration_s(task, logged.size) or task.step_s, void=bool(state.held))


def goes_on(state: ClusterState, task: Task, iteration: int) -> None:
    """Fold: a new round of a command tells of its first iterations."""
    standing = task.standing
    if standing is not None and not task.heals_in_memory:
        _add(state, task, standing, iteration)
        _keep(state, task, standing, num_slots(task))


def steps_again(state: ClusterState, task: Task, iteration: int) -> None:
    """Fold: a new generation has finished an iteration; `iteration` are told of now."""
    standing = task.standing
    if standing is not None and standing.since_s >= 0:
        _add(state, task, standing, iteration)
        arrived(state, task)


def arrived(state: ClusterState, task: Task) -> None:
    """Fold: if it steps with all that it was given, the change is over."""
    standing, target = task.standing, {seat.rank for seat in task.target}
    if standing is None or standing.since_s >= 0 or not target:
        return
    if {member.rank for member in task.members} == target:
        _keep(state, task, standing, len(target))


def stood_to_leave(state: ClusterState, task: Task) -> None:
    """Fold: it has no slots any more, and no process."""
    standing = task.standing
    if standing is None:
        return
    if standing.since_s >= 0:
        _add(state, task, standing, task.iteration)
    if standing.size:
        _keep(state, task, standing, 0)
    task.standing = None


def void_standings(state: ClusterState) -> None:
    """Fold: where healing is held, what stands waits for a person."""
    for task in state.tasks.values() if state.held else ():
        if task.standing is not None:
            task.standing.void = True


def _add(state: ClusterState, task: Task, standing: Standing, iteration: int) -> None:
    num, size = iteration - standing.iteration, num_slots(task) or standing.size
    iteration_s = _iteration_s(task, size)
    if not iteration_s and standing.iteration_s:
        iteration_s = standing.iteration_s * _times_slower(task, size, standing.size)
    elif not iteration_s:
        iteration_s = task.step_s
    standing.stood_s += max(state.at_s - standing.since_s - num * iteration_s, 0.0)
    standing.since_s = -1.0


def _keep(state: ClusterState, task: Task, standing: Standing, size: int) -> None:
    before, task.standing = standing.size, None
    kind = ("start" if not before else "stop" if not size else
            "reshape" if _is_reshaped(standing, task) else
            "same" if size == before else "shrink" if size < before else "grow")
    if not standing.void:
        task.stood_s[kind] = [*task.stood_s.get(kind, ()), standing.stood_s][-NUM_STOOD_MAX:]


def _is_reshaped(standing: Standing, task: Task) -> bool:
    before, now = standing.axes, task.axes
    return before is not None and now is not None and shape(before) != shape(now)


def _iteration_s(task: Task, size: int) -> float:
    """What an undisturbed iteration takes on so many members, by the nearest size that was
    measured; 0: none was."""
    if not task.times_s or not size:
        return 0.0
    near = min(sorted(task.times_s), key=lambda known: abs(known - size))
    return median(task.times_s[near]) * _times_slower(task, size, near)


def _times_slower(task: Task, size: int, known: int) -> float:
    """How many times the iteration of `known` members one of `size` takes, by the table."""
    table = task.throughput
    rates = dict(zip(table.sizes, table.rates_flops, strict=False)) if table is not None else {}
    ratio = rates.get(known, 0.0) / rates[size] if rates.get(size) else 0.0
    return ratio or 1.0
