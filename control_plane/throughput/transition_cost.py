"""Measured reliability: the MTBF of the cluster, and the downtime of transitions.

docs/decisions/limits-of-plans.md has the rules. Iterations that a command repeats are downtime.
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
from ..state.task import OngoingTransition, Task


class Transition(Struct, frozen=True, kw_only=True):
    """D_transition by kind of change: how long the task loses its present throughput."""

    same_s: float
    """To the same number of slots, after a fault."""
    shrink_s: float
    grow_s: float
    stop_s: float
    """To no slots."""
    reshape_s: float = 0.0
    """To a layout that splits a replica differently: all of the state moves."""

    @classmethod
    def uniform(cls, length_s: float) -> Transition:
        return cls(
            same_s=length_s, shrink_s=length_s, grow_s=length_s, stop_s=length_s, reshape_s=length_s
        )


INJECTED_S_MAX = 600.0
"""An injected fault older than this is taken to have had no effect."""
NUM_DOWNTIMES_MAX = 16
"""Downtimes of one kind that the state keeps per task."""
NUM_DOWNTIMES_MIN = 3
"""Downtimes that make a measurement."""
MTBF_S_MIN = 1.0


# --- MTBF ---
def observe_time(state: ClusterState, record: Record) -> None:
    """Fold, before the record's time is set: add slot time, but not the time without a leader."""
    if not isinstance(record.body, EpochStarted):
        state.observed_slot_s += state.num_running * max(record.at_s - state.at_s, 0.0)
    update_mtbf(state)


def was_injected(harmed_s: float, at_s: float) -> bool:
    """Whether a fault injected at `harmed_s` may be the cause at `at_s`."""
    return harmed_s >= 0 and at_s - harmed_s <= INJECTED_S_MAX


def is_fault(state: ClusterState, task: Task, incident: Incident) -> bool:
    """Whether an incident counts as a fault. Called when it opens: `task.faults` is still full."""
    nodes = [state.nodes.get(rank.slot.node) for rank in task.ranks.values()]
    harmed = [rank.fault_injected_s for rank in task.ranks.values()]
    harmed += [node.fault_injected_s for node in nodes if node is not None]
    if any(was_injected(harmed_s, state.at_s) for harmed_s in harmed) or any(
        fault.on_purpose for fault in task.faults
    ):
        return False
    alike = (
        any(
            other.node == incident.node
            and other.task != task.id
            and incident.opened_s - other.opened_s <= state.policy.replace_after_s
            for other in state.incidents.values()
        )
        if incident.node
        else False
    )
    return incident.status != WRONG_INPUT and not alike


def update_mtbf(state: ClusterState) -> None:
    """Fold: update the MTBF of one slot from a Gamma prior and the observations. It changes only by
    more than the share `calibrate_min`, or if the old value is not finite (old logs)."""
    policy, last = state.policy, state.mtbf_gpu_s
    num = policy.mtbf_faults + state.num_faults
    seen_s = policy.mtbf_faults * policy.mtbf_gpu_s + state.observed_slot_s
    found = max(seen_s / num, MTBF_S_MIN) if num > 0 else policy.mtbf_gpu_s
    if not 0 < last < inf or abs(found - last) > policy.calibrate_min * last:
        state.mtbf_gpu_s = found


# --- downtime of transitions ---
def transition(state: ClusterState, task: Task) -> Transition:
    """D_transition by kind of change: the median of recent ones, else the policy's prior. For a
    preemption (`stop_s`) it is the time to stop plus the time to start again later."""
    prior_s = state.policy.transition_s

    def usual_s(kind: str, else_s: float) -> float:
        stood_s = task.downtime_s.get(kind, ())
        return median(stood_s) if len(stood_s) >= NUM_DOWNTIMES_MIN else else_s

    leave_s, start_s = usual_s("stop", -1.0), usual_s("start", -1.0)
    return Transition(
        same_s=usual_s("same", prior_s),
        shrink_s=usual_s("shrink", prior_s),
        grow_s=usual_s("grow", prior_s),
        stop_s=leave_s + start_s if leave_s >= 0 and start_s >= 0 else prior_s,
        reshape_s=usual_s("reshape", state.policy.reshape_s),
    )


def num_slots(task: Task) -> int:
    """Slots that the task trains on; for a command, all of its target."""
    return len(task.members) if task.heals_in_memory else len(task.target)


def transition_began(state: ClusterState, task: Task) -> None:
    """Fold: a transition begins at the last reported iteration, unless one is in progress."""
    if not task.heals_in_memory:
        return
    size = len(task.members)
    since_s = task.progressed_s if size and task.progressed_s > 0 else state.at_s
    if task.transition is None:
        task.transition = OngoingTransition(
            size=size,
            since_s=since_s,
            iteration=task.iteration,
            iteration_s=_iteration_s(task, size) or task.step_s,
            axes=task.axes,
            void=bool(state.starts_held),
        )
    elif task.transition.since_s < 0:
        task.transition.since_s, task.transition.iteration = since_s, task.iteration


def command_stopped(state: ClusterState, task: Task) -> None:
    """Fold: the last process of a command ended. If the command logged iterations, the transition
    began at the last one. A command without a target waits for slots: that is no transition."""
    logged = task.logged
    if not task.target or logged is None:
        task.transition = None
    elif task.transition is None and task.phase == "training" and task.logged_now is not None:
        task.transition = OngoingTransition(
            size=logged.size,
            since_s=task.progressed_s,
            iteration=task.iteration,
            iteration_s=_iteration_s(task, logged.size) or task.step_s,
            void=bool(state.starts_held),
        )


def command_resumed(state: ClusterState, task: Task, iteration: int) -> None:
    """Fold: a new round of a command logged its first iterations."""
    standing = task.transition
    if standing is not None and not task.heals_in_memory:
        _add(state, task, standing, iteration)
        _keep(state, task, standing, num_slots(task))


def transition_stepped(state: ClusterState, task: Task, iteration: int) -> None:
    """Fold: a new generation finished an iteration; `iteration` is the newest reported."""
    standing = task.transition
    if standing is not None and standing.since_s >= 0:
        _add(state, task, standing, iteration)
        transition_completed(state, task)


def transition_completed(state: ClusterState, task: Task) -> None:
    """Fold: if the task steps with its whole target, the transition is complete."""
    standing, target = task.transition, {seat.rank for seat in task.target}
    if standing is None or standing.since_s >= 0 or not target:
        return
    if {member.rank for member in task.members} == target:
        _keep(state, task, standing, len(target))


def transition_to_idle(state: ClusterState, task: Task) -> None:
    """Fold: the task has no slots and no process any more."""
    standing = task.transition
    if standing is None:
        return
    if standing.since_s >= 0:
        _add(state, task, standing, task.iteration)
    if standing.size:
        _keep(state, task, standing, 0)
    task.transition = None


def void_transitions(state: ClusterState) -> None:
    """Fold: while nothing is started, transitions wait for an operator and are not measured."""
    for task in state.tasks.values() if state.starts_held else ():
        if task.transition is not None:
            task.transition.void = True


def _add(state: ClusterState, task: Task, standing: OngoingTransition, iteration: int) -> None:
    num, size = iteration - standing.iteration, num_slots(task) or standing.size
    iteration_s = _iteration_s(task, size)
    if not iteration_s and standing.iteration_s:
        iteration_s = standing.iteration_s * _times_slower(task, size, standing.size)
    elif not iteration_s:
        iteration_s = task.step_s
    standing.downtime_s += max(state.at_s - standing.since_s - num * iteration_s, 0.0)
    standing.since_s = -1.0


def _keep(state: ClusterState, task: Task, standing: OngoingTransition, size: int) -> None:
    before, task.transition = standing.size, None
    kind = (
        "start"
        if not before
        else "stop"
        if not size
        else "reshape"
        if standing.axes is not None
        and task.axes is not None
        and shape(standing.axes) != shape(task.axes)
        else "same"
        if size == before
        else "shrink"
        if size < before
        else "grow"
    )
    if not standing.void:
        task.downtime_s[kind] = [*task.downtime_s.get(kind, ()), standing.downtime_s][
            -NUM_DOWNTIMES_MAX:
        ]


def _iteration_s(task: Task, size: int) -> float:
    """Undisturbed iteration time at `size` members, by the nearest measured size; 0: none."""
    if not task.times_s or not size:
        return 0.0
    near = min(sorted(task.times_s), key=lambda known: abs(known - size))
    return median(task.times_s[near]) * _times_slower(task, size, near)


def _times_slower(task: Task, size: int, known: int) -> float:
    """Iteration time of `size` members relative to that of `known` members, by the table."""
    table = task.throughput
    rates = dict(zip(table.sizes, table.rates_flops, strict=False)) if table is not None else {}
    ratio = rates.get(known, 0.0) / rates[size] if rates.get(size) else 0.0
    return ratio or 1.0
