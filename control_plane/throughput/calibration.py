"""Calibration: undisturbed iterations correct what was modelled of T(t, x)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ...events.records.decisions import ThroughputSet
from ...events.records.reports import IterationsLogged, TaskProgressed
from ...events.records.types import Body
from ...events.spec.job import RATE_FLOPS_MAX
from ..state.cluster import ClusterState, live_tasks
from ..state.task import Task
from . import table as throughput
from .transition_cost import num_slots

NUM_WARM_UP = 2
"""Iterations after a Resume that do not count: the interrupted one, and one to get warm."""
NUM_TIMES_MAX = 256
"""Times that the state keeps of one task at one size, whatever the policy asks for."""
NUM_SIZES_MAX = 16
"""Sizes of which it keeps them; the one measured longest ago is forgotten first."""


def keep_times(state: ClusterState, task: Task, body: TaskProgressed) -> None:
    """Fold: remember how long undisturbed iterations took at this number of members.

    A size that the task only passes through (a rank starts again beside it, and takes its share of
    the machine) says nothing of what the task would do if it stayed.
    """
    if not _counts(state, task) or task.failed_s >= 0 or len(task.members) != len(task.target):
        return
    first = body.first_iteration
    times = [step_s for iteration, step_s in enumerate(body.step_s, first)
             if iteration >= task.settled + NUM_WARM_UP]
    _keep(state, task, times)


def keep_logged(state: ClusterState, task: Task, body: IterationsLogged) -> None:
    """Fold: the same of a command, by what its log tells.

    A report is the mean of some iterations: it counts as one time for each, but for no more than a
    third of what makes a measurement, so that one that is off does not decide.
    """
    logged = task.logged
    if logged is None or not _counts(state, task) or not batch_counts(task):
        return
    whole = len(task.ranks) == len(task.target) and all(rank.sound for rank in task.ranks.values())
    warm = body.num_iterations > 0 and body.iteration - logged.first >= NUM_WARM_UP
    if whole and warm and not logged.disturbed and not body.skipped:
        _keep(state, task, min(body.num_iterations, -(-_num_times(state) // 3)) * [body.step_s])


def batch_counts(task: Task) -> bool:
    """Whether an iteration of the command has as many samples as its model says."""
    logged, model = task.logged, task.spec.model
    return logged is None or model is None or logged.global_batch in (0, model.global_batch)


def _counts(state: ClusterState, task: Task) -> bool:
    """Whether it is of interest how long an iteration takes now: the task is not disturbed, and
    no rank holds up the others."""
    return (_num_times(state) > 0 and not task.spec.throughput and task.phase == "training"
            and not task.incident and not task.slow)


def _keep(state: ClusterState, task: Task, times: list[float]) -> None:
    num, size = _num_times(state), num_slots(task)
    times = [step_s for step_s in times if step_s > 0]
    if not times:
        return
    task.times_s[size] = [*task.times_s.pop(size, ()), *times][-num:]
    while len(task.times_s) > NUM_SIZES_MAX:
        del task.times_s[next(iter(task.times_s))]


def forget_times(state: ClusterState, task: Task, num: int) -> None:
    """Fold: the last iterations are found to have been slow; the task does not take so long."""
    times = task.times_s.get(num_slots(task), [])
    del times[max(len(times) - max(num, 0), 0):]
    if not times:
        task.times_s.pop(num_slots(task), None)


def calibrate(state: ClusterState, task: Task) -> Iterator[Body]:
    """A new table where the measured rate differs enough from the one that plans are made with.

    What the first measured task tells of one slot goes into all modelled tables. Asked again in
    the same state this tells nothing.
    """
    size, table, rates = num_slots(task), task.throughput, measured(state, task)
    if table is None or task.ending or size not in rates or size not in table.sizes:
        return
    least = state.policy.calibrate_min
    if not differs(rates[size], table.rates_flops[table.sizes.index(size)], least):
        return
    yield throughput.measured_table(task.id, task.spec, rates, task.modelled)
    for other in live_tasks(state):
        old = other.throughput
        if old is not None and old.origin == "modelled" and state.slot_flops:
            new = throughput.table(other.id, other.spec, state.slot_flops,
                                   other.modelled)
            if differs(max(new.rates_flops), max(old.rates_flops), least):
                yield new


def measured(state: ClusterState, task: Task) -> dict[int, float]:
    """Size -> FLOP/s, for each size with enough iterations: FLOP over their median time."""
    num = _num_times(state)
    if not num or task.iteration_flops <= 0:
        return {}
    return {size: min(task.iteration_flops / median(task.times_s[size]), RATE_FLOPS_MAX)
            for size in sorted(task.times_s) if len(task.times_s[size]) >= num}


def learn_slot(state: ClusterState, task: Task, table: ThroughputSet) -> None:
    """Fold: what a measured table tells of one slot, by the smallest size that was measured.

    The first task that was measured keeps the word until it ends. A task with a model of its own
    tells nothing: its shape is not counted in slots.
    """
    known = dict(zip(table.sizes, table.rates_flops, strict=False))
    sizes = [size for size in measured(state, task) if size in known]
    source = state.tasks.get(state.slot_flops_of)
    if not sizes or (source is not None and source.phase != "ended" and source is not task):
        return
    if task.modelled is not None:
        return
    rate = known[sizes[0]] / throughput.shape(task.spec, sizes[0])
    state.slot_flops_of = task.id
    if differs(rate, state.slot_flops, state.policy.calibrate_min):
        state.slot_flops = rate


def differs(new: float, old: float, least: float) -> bool:
    """Whether `new` is off from `old` by more than the share `least`."""
    return abs(new - old) > least * old


def _num_times(state: ClusterState) -> int:
    return min(max(state.policy.calibrate_iterations, 0), NUM_TIMES_MAX)
