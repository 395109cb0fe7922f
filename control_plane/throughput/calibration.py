"""Calibration: times of undisturbed iterations correct the modelled T(t, x)."""

from collections.abc import Iterator, Sequence
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
"""Iterations after a Resume that do not count: the interrupted one, and one to warm up."""
NUM_TIMES_MAX = 256
"""How many times the state keeps per task and size, whatever the policy sets."""
NUM_SIZES_MAX = 16
"""How many sizes the state keeps per task; the size measured longest ago is dropped first."""


NOISE_SHARE_MAX = 0.5
"""The largest noise of a rate (our choice): a task that is half as fast again is planned anew."""


def keep_times(state: ClusterState, task: Task, body: TaskProgressed) -> None:
    """Fold: store the times of undisturbed iterations at this number of members. Times during a
    transition do not count: a rank that restarts on the same machine slows the others."""
    if not _counts(state, task) or task.failed_s >= 0 or len(task.members) != len(task.target):
        return
    _keep(
        state,
        task,
        [
            step_s
            for iteration, step_s in enumerate(body.step_s, body.first_iteration)
            if iteration >= task.settled + NUM_WARM_UP
        ],
    )


def keep_logged(state: ClusterState, task: Task, body: IterationsLogged) -> None:
    """Fold: store the mean iteration times that a command logged: once for each iteration, at most
    a third of a measurement, so that no outlier decides."""
    logged = task.logged
    if logged is None or not _counts(state, task) or not batch_counts(task):
        return
    whole = len(task.ranks) == len(task.target) and all(
        rank.is_healthy for rank in task.ranks.values()
    )
    warm = body.num_iterations > 0 and body.iteration - logged.first >= NUM_WARM_UP
    if whole and warm and not logged.disturbed and not body.skipped:
        _keep(state, task, min(body.num_iterations, -(-_num_times(state) // 3)) * [body.step_s])


def batch_counts(task: Task) -> bool:
    """Whether a logged iteration has as many samples as the model of the command says."""
    logged, model = task.logged, task.spec.model
    return logged is None or model is None or logged.global_batch in (0, model.global_batch)


def _counts(state: ClusterState, task: Task) -> bool:
    """Whether times count now: the task trains without an incident and without stragglers."""
    return (
        _num_times(state) > 0
        and not task.spec.throughput
        and task.phase == "training"
        and not task.incident
        and not task.slow
    )


def _keep(state: ClusterState, task: Task, times: list[float]) -> None:
    num, size = _num_times(state), num_slots(task)
    times = [step_s for step_s in times if step_s > 0]
    if not times:
        return
    task.times_s[size] = [*task.times_s.pop(size, ()), *times][-num:]
    while len(task.times_s) > NUM_SIZES_MAX:
        del task.times_s[next(iter(task.times_s))]


def forget_times(state: ClusterState, task: Task, num: int) -> None:
    """Fold: drop the times of the last iterations, which were slowed by a straggler."""
    times = task.times_s.get(num_slots(task), [])
    del times[max(len(times) - max(num, 0), 0) :]
    if not times:
        task.times_s.pop(num_slots(task), None)


def calibrate(state: ClusterState, task: Task) -> Iterator[Body]:
    """Yield a new table if the measured rate differs enough from the rate in the present table, and
    by more than its noise: else a busy machine would change the plan all the time. The FLOP/s of a
    slot, which the first measured task sets, update all modelled tables."""
    size, table, rates = num_slots(task), task.throughput, measured(state, task)
    if table is None or task.ending or size not in rates or size not in table.sizes:
        return
    least, at = state.policy.calibrate_min, table.sizes.index(size)
    own = table.noise[at] if table.noise else 0.0
    if not differs(rates[size], table.rates_flops[at], max(least, own)):
        return
    spread = {size: noise(task.times_s[size]) for size in rates}
    jump = rates[size] / table.rates_flops[at] - 1 if table.rates_flops[at] else 0.0
    if _is_former(task, size, rates[size], max(least, spread[size])):
        spread[size] = max(spread[size], min(abs(jump), NOISE_SHARE_MAX))
    yield throughput.table_through(task.id, "measured", task.spec, rates, task.modelled, spread)
    for other in live_tasks(state):
        old = other.throughput
        if old is not None and old.origin == "modelled" and state.slot_flops:
            new = throughput.table(other.id, other.spec, state.slot_flops, other.modelled)
            if differs(max(new.rates_flops), max(old.rates_flops), least):
                yield new


def measured(state: ClusterState, task: Task) -> dict[int, float]:
    """Size -> FLOP/s of each size with enough times: FLOP of an iteration / the median time."""
    num = _num_times(state)
    if not num or task.iteration_flops <= 0:
        return {}
    return {
        size: min(task.iteration_flops / median(task.times_s[size]), RATE_FLOPS_MAX)
        for size in sorted(task.times_s)
        if len(task.times_s[size]) >= num
    }


def noise(times_s: Sequence[float]) -> float:
    """The share by which medians of such times differ: twice their median absolute deviation. Times
    before a lasting change, as long as they are fewer, do not count."""
    middle = median(times_s)
    return min(2 * median(abs(one_s - middle) for one_s in times_s) / middle, NOISE_SHARE_MAX)


def _is_former(task: Task, size: int, rate: float, least: float) -> bool:
    """Whether the rate is back at what it was before the present table: a machine that is busy at
    times goes to and fro, and that is noise too."""
    former = task.former_throughput
    if former is None or size not in former.sizes:
        return False
    return not differs(rate, former.rates_flops[former.sizes.index(size)], least)


def learn_slot(state: ClusterState, task: Task, table: ThroughputSet) -> None:
    """Fold: set the FLOP/s of one slot from the smallest measured size of the first measured task,
    until it ends; never of a task with a `model`, whose shape is not relative to one slot."""
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
    """Whether `new` differs from `old` by more than the share `least`."""
    return abs(new - old) > least * old


def _num_times(state: ClusterState) -> int:
    return min(max(state.policy.calibrate_iterations, 0), NUM_TIMES_MAX)
