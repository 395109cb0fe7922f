"""What a degraded node costs, and what it would earn to drain it: told, never acted upon."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...events.records.decisions import StragglerCostEstimated
from ..incidents.stragglers import slowdown
from ..state.cluster import ClusterState, live_tasks
from ..state.task import Task
from . import hot_spare
from .problem import Wish, waf_of
from .problem_of_state import plan_input


def priced(state: ClusterState) -> Iterator[StragglerCostEstimated]:
    """A price for each node of which something has changed: one plan for each."""
    for name in list(state.to_price):
        yield price(state, name)


def price(state: ClusterState, name: str) -> StragglerCostEstimated:
    """What is lost for the node now, and what the best plan without it earns more than now.

    Both by the tables that plans are made with. Slow ranks on other nodes stay where they are; what
    is lost for several nodes together is lost for each.
    """
    here = [task for task in live_tasks(state) if _slow_there(task, name)]
    now = plan_input(state).asked
    ground = plan_input(state, without=name)
    then = hot_spare.choose(ground.asked).plan.slots if ground.asked.wishes else ()
    earned_then = math.fsum(
        waf_of(wish, slots) / slowdown(state.tasks[wish.task], without=name)
        for wish, slots in zip(ground.asked.wishes, then, strict=True))
    cost = math.fsum(
        waf_of(wish, wish.now) * (1 - 1 / _holds_up(state.tasks[wish.task], name))
        for wish in now.wishes)
    achieved = achieved_waf(state, now.wishes)
    return StragglerCostEstimated(
        node=name, tasks=tuple(task.id for task in here),
        ratios=tuple(_holds_up(task, name) for task in here),
        cost_waf=cost, drain_waf=earned_then - achieved,
        why=_why(state, here, name), now_waf=achieved)


def achieved_waf(state: ClusterState, wishes: tuple[Wish, ...]) -> float:
    """What tasks earn now, by their tables and their slow ranks."""
    return math.fsum(waf_of(wish, wish.now) / slowdown(state.tasks[wish.task])
                     for wish in wishes)


def _slow_there(task: Task, name: str) -> list[int]:
    """Its slow ranks on the node."""
    return [number for number in sorted(task.slow)
            if number in task.ranks and task.ranks[number].slot.node == name]


def _holds_up(task: Task, name: str) -> float:
    """So many times longer an iteration takes for its slow ranks there."""
    return max((task.slow[number].holds_up for number in _slow_there(task, name)), default=1.0)


def _why(state: ClusterState, tasks: list[Task], name: str) -> str:
    """What its checks say, then which ranks are slow there."""
    checks = [check.why or check.check for check in state.nodes[name].checks
              if check.health == "degraded"] if name in state.nodes else []
    return "; ".join([*checks, *(in_words(task, number) for task in tasks
                                 for number in _slow_there(task, name))])


def in_words(task: Task, number: int) -> str:
    """For example `rank 21 of base-39b (n3/5) holds up 511 others, 1.14 x`."""
    slot, slow = task.ranks[number].slot, task.slow[number]
    num = len(task.members) - len(task.slow)
    beside = [str(other) for other in sorted(task.slow) if other != number]
    also = f" with rank{'s' * (len(beside) > 1)} {' '.join(beside)}" if beside else ""
    own = (f", its own work {slow.ratio:.3g} x"
           if f"{slow.ratio:.2f}" != f"{slow.holds_up:.2f}" else "")
    return (f"rank {number} of {task.spec.name} ({slot.node}/{slot.index}) holds up {num} "
            f"other{'s' * (num != 1)}{also}, {slow.holds_up:.3g} x{own}")
