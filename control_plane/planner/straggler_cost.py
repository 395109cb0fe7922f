"""Cost of a degraded node, and the gain of draining it. Reported only; no decision uses it."""

import math

from ...events.records.decisions import StragglerCostEstimated
from ..incidents.stragglers import slow_on, slowdown
from ..state.cluster import ClusterState, live_tasks
from ..state.task import Task
from . import hot_spare
from .problem import waf_of
from .problem_of_state import planning_snapshot


def node_cost(state: ClusterState, name: str) -> StragglerCostEstimated:
    """The WAF that the node costs now, and the gain of the best plan without it, both by the
    throughput tables. Takes one plan. A loss that several nodes cause counts fully for each."""
    here = [task for task in live_tasks(state) if slow_on(task, name)]
    now = planning_snapshot(state).problem
    snapshot = planning_snapshot(state, without=name)
    then = hot_spare.with_hot_spare(snapshot.problem).plan.slots if snapshot.problem.demands else ()
    waf_then = math.fsum(
        waf_of(demand, slots) / slowdown(state.tasks[demand.task], without=name)
        for demand, slots in zip(snapshot.problem.demands, then, strict=True)
    )
    cost = math.fsum(
        waf_of(demand, demand.now) * (1 - 1 / _holds_up(state.tasks[demand.task], name))
        for demand in now.demands
    )
    achieved = math.fsum(
        waf_of(demand, demand.now) / slowdown(state.tasks[demand.task]) for demand in now.demands
    )
    return StragglerCostEstimated(
        node=name,
        tasks=tuple(task.id for task in here),
        ratios=tuple(_holds_up(task, name) for task in here),
        cost_waf=cost,
        drain_waf=waf_then - achieved,
        why=_why(state, here, name),
        now_waf=achieved,
    )


def _holds_up(task: Task, name: str) -> float:
    """The factor by which the task's slow ranks on the node lengthen an iteration."""
    return max((task.slow[number].holds_up for number in slow_on(task, name)), default=1.0)


def _why(state: ClusterState, tasks: list[Task], name: str) -> str:
    """The results of the node's checks, then its slow ranks."""
    checks = (
        [
            check.why or check.check
            for check in state.nodes[name].checks
            if check.health == "degraded"
        ]
        if name in state.nodes
        else []
    )
    return "; ".join(
        [*checks, *(in_words(task, number) for task in tasks for number in slow_on(task, name))]
    )


def in_words(task: Task, number: int) -> str:
    """For example: `rank 21 of base-39b (n3/5) holds up 511 others, 1.14 x`."""
    slot, slow = task.ranks[number].slot, task.slow[number]
    num = len(task.members) - len(task.slow)
    others = [str(other) for other in sorted(task.slow) if other != number]
    also = f" with rank{'s' * (len(others) > 1)} {' '.join(others)}" if others else ""
    own = (
        f", its own work {slow.ratio:.3g} x"
        if f"{slow.ratio:.2f}" != f"{slow.holds_up:.2f}"
        else ""
    )
    return (
        f"rank {number} of {task.spec.name} ({slot.node}/{slot.index}) holds up {num} "
        f"other{'s' * (num != 1)}{also}, {slow.holds_up:.3g} x{own}"
    )
