"""The fold of step times: stragglers, and those slow enough to be a fault."""

from msgspec.structs import replace

from ...events.records import reports as r
from ...events.records.decisions import StragglerCostEstimated
from ...events.records.envelope import Record
from ...events.records.statuses import TASK_HANG
from ...events.spec.parallelism import coordinates, num_positions
from ..incidents.stragglers import FAULT_RATIO, SLOW_RATIO, at_fault, slow_ranks
from ..state.cluster import ClusterState
from ..state.task import Rank, StepTime, StragglerCost, Task
from ..throughput.calibration import forget_times
from .edits import record_fault, schedule_estimate
from .hangs import record_slow_iteration

SLOWED = f"is more than {FAULT_RATIO:g} times too slow"
"""Timeout reason of a persistent straggler (`at_fault`)."""
NUM_ITERATIONS_MIN = 5
"""Iterations that a step time must cover to count."""
CHANGED_RATIO = 1.05
"""Relative change of a straggler's delay that triggers a new cost estimate."""


def step_time_changed(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.StepTimeChanged
) -> None:
    if body.own_s <= 0 or body.iteration_s <= 0:
        return
    if body.num_iterations == 1:
        record_slow_iteration(state, record, task, body)
    if body.num_iterations < NUM_ITERATIONS_MIN:
        return  # too few iterations for a step time
    task.step_times[body.rank] = _pace(task, record.seq, body, task.step_times.get(body.rank))
    before, task.slow = task.slow, slow_ranks(task, record.at_s)
    for number in sorted(before.keys() | task.slow.keys()):
        was, now = before.get(number), task.slow.get(number)
        if (
            was is None
            or now is None
            or before.keys() != task.slow.keys()
            or not (1 / CHANGED_RATIO <= now.holds_up / was.holds_up <= CHANGED_RATIO)
        ):
            schedule_estimate(state, task.ranks[number].slot.node)
    if task.slow and not before:
        forget_times(state, task, body.num_iterations)
    if body.rank not in task.slow and body.own_s < SLOW_RATIO * body.normal_s:
        task.slow_restarts.pop(f"{rank.slot.node}/{rank.slot.index}", None)
        if rank.timeout_reason == SLOWED and not rank.stopping:
            rank.timeout_reason = ""  # set while healing was paused
    restart_stragglers(state, record, task)


def _pace(task: Task, seq: int, body: r.StepTimeChanged, old: StepTime | None) -> StepTime:
    """The new step time. The old reference stays if it is no slower, for as many micro-batches."""
    num = _num_micro_batches(task, body.rank)
    new = StepTime(
        generation=body.generation,
        num_micro_batches=num,
        iteration_s=body.iteration_s,
        own_s=body.own_s,
        normal_s=body.normal_s,
        normal_num=num,
        normal_iteration_s=body.iteration_s,
        seq=seq,
    )
    if old is None or old.normal_num != num or not 0 < old.normal_s <= body.own_s:
        return new
    return replace(
        new, normal_s=old.normal_s, normal_iteration_s=min(old.normal_iteration_s, body.iteration_s)
    )


def _num_micro_batches(task: Task, number: int) -> int:
    """The number of micro-batches per iteration that the generation assigns to the member."""
    train = task.spec.training
    position = next(i for i, member in enumerate(task.members) if member.rank == number)
    if train is None:
        return 0
    if task.axes is None:
        return len(range(position, train.num_micro_batches, len(task.members)))
    if position >= num_positions(task.axes):
        return 0
    return len(range(coordinates(task.axes, position).dp, train.num_micro_batches, task.axes.dp))


def restart_stragglers(state: ClusterState, record: Record, task: Task) -> None:
    """Restart persistent stragglers; the others finish the iteration. A slot with repeated restarts
    is disabled. Progress does not reset `slow_restarts`, since a straggler progresses too."""
    if (
        not task.slow
        or task.phase != "training"
        or task.incident
        or task.ending
        or (len(task.living_members()) < len(task.members))
    ):
        return
    for rank in at_fault(task):
        pace, slow = task.step_times[rank.rank], task.slow[rank.rank]
        key = f"{rank.slot.node}/{rank.slot.index}"
        task.slow_restarts[key] = task.slow_restarts.get(key, 0) + 1
        rank.timeout_reason = SLOWED
        record_fault(
            task,
            record,
            [rank],
            TASK_HANG,
            f"rank {rank.rank} on {rank.slot.node} works {slow.ratio:.3g} x as long as is "
            f"usual, iterations take {slow.holds_up:.3g} x",
            evidence=(pace.seq,),
        )
        task.restarts[rank.rank] = max(task.restarts[rank.rank], task.slow_restarts[key])


def straggler_cost_estimated(
    state: ClusterState, record: Record, body: StragglerCostEstimated
) -> None:
    state.to_price = [name for name in state.to_price if name != body.node]
    state.degraded[body.node] = StragglerCost(
        tasks=body.tasks,
        ratios=body.ratios,
        cost_waf=body.cost_waf,
        drain_waf=body.drain_waf,
        why=body.why,
        now_waf=body.now_waf,
        seq=record.seq,
        at_s=record.at_s,
    )
