"""Hot spare: decides whether the slots of one node stay idle for the next fault.

docs/decisions/hot-spares.md has the value that each plan is compared by.
"""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...events.records.decisions import Alternative, HotSpare
from . import constraints, objective, planner
from .alternative_names import SPARELESS
from .objective import Floats, Objective
from .planner import Choice
from .problem import PlanProblem, waf_of

WORK_NUM_MAX = 1 << 18
"""Limit of tasks times all their sizes, below 200 ms. Above the limit no spare is priced."""
LIMITED_WORK_NUM_MAX = 1 << 21
"""The limit if plans have limits. The product then includes the slots and moves of a search."""


def with_hot_spare(problem: PlanProblem) -> Choice:
    """The plan. It keeps one node's slots idle if and only if this has a larger expected value: G
    of the plan plus the expected G of the plan after the next fault. A spare stops no running task
    and puts no task below its floor."""
    free, num = planner.choose_plan(problem), problem.spare_slots
    if not num or not problem.demands:
        return free
    if problem.num_slots - sum(free.plan.slots) >= num:
        return replace(free, spare=HotSpare(num_slots=num, verdict="idle anyway"))
    if exceeds_work_limit(problem):
        return replace(free, spare=HotSpare(num_slots=num, verdict="not priced"))
    idle = min(num, problem.num_slots)
    fewer = replace(problem, num_slots=problem.num_slots - idle, kept_slots=idle)
    spare = _compared(problem, free.plan.slots, planner.solve(fewer).slots)
    if spare.verdict != "kept":
        return replace(free, spare=spare)
    kept = planner.choose_plan(fewer)
    slots = tuple((one.task, x) for one, x in zip(problem.demands, free.plan.slots, strict=True))
    beaten = Alternative(
        what=SPARELESS, slots=slots, waf=free.plan.waf, objective=free.plan.objective
    )
    return replace(
        kept,
        spare=spare,
        alternatives=(beaten, *(other for other in kept.alternatives if other.slots != slots)),
    )


def exceeds_work_limit(problem: PlanProblem) -> bool:
    """True if pricing a spare would delay the decision too long."""
    work = len(problem.demands) * sum(len(demand.sizes) + 1 for demand in problem.demands)
    if problem.limits is not None:
        work *= (problem.num_slots + 1) * (1 + (problem.moves_max or 0))
        return work > LIMITED_WORK_NUM_MAX
    return work > WORK_NUM_MAX


class _AfterFault(Struct, frozen=True):
    """The problem at the next fault. Before it the plan is in force and every task is healthy."""

    problem: PlanProblem
    """Its slots are those left after the fault. No task is marked as faulted yet."""
    values: Objective
    """G until the node is back or the next fault comes."""
    restart_flop: Floats
    """By task: the transition cost if the task loses the node and keeps its number of slots."""

    @property
    def most(self) -> list[float]:
        """By task: an upper bound of |G| and of the restart cost."""
        return [*map(max, self.values.most(), self.restart_flop.tolist())]

    def total(self, num_slots: int, shift: int) -> int:
        """The expected value times 2^shift and `num_slots`. All slots fail equally often."""
        demands, rows = self.problem.demands, self.values.rows(shift)[0]
        restarts = objective.to_fixed_point(self.restart_flop, shift).tolist()
        num_idle = num_slots - sum(demand.now for demand in demands)
        total = num_idle * rows.sums(rows.vector(planner.solve(self.problem).slots))[0]
        for i, demand in enumerate(demands):
            if demand.now:  # the task loses a node, and `problem` has only the slots left
                lost = (*demands[:i], replace(demand, faulted=True), *demands[i + 1 :])
                slots = planner.solve(replace(self.problem, demands=lost)).slots
                value = rows.sums(rows.vector(slots))[0]
                value -= restarts[i] if slots[i] == demand.now else 0
                total += demand.now * value
        return total


def _after_fault(problem: PlanProblem, slots: Sequence[int]) -> _AfterFault:
    num_left = max(problem.num_slots - problem.spare_slots, 0)
    then = replace(
        problem,
        num_slots=num_left,
        demands=tuple(
            replace(one, now=x, faulted=False)
            for one, x in zip(problem.demands, slots, strict=True)
        ),
    )
    lasts_s = min(problem.repair_s, then.running_s)
    return _AfterFault(
        then,
        objective.objective_values(then.demands, lasts_s, then.num_slots),
        np.array(
            [
                waf_of(one, one.now) * one.transition.same_s if one.now <= then.num_slots else 0.0
                for one in then.demands
            ]
        ),
    )


def _compared(problem: PlanProblem, free: Sequence[int], kept: Sequence[int]) -> HotSpare:
    """Whether `kept`, the plan with the spare, is worth more, in integers."""
    num = problem.num_slots
    values = objective.objective_values(problem.demands, problem.running_s, num)
    thens = [_after_fault(problem, slots) for slots in (free, kept)]
    most = [bounds for bounds in (values.most(), *(one.most for one in thens)) if any(bounds)]
    shift = min(map(objective.fixed_point_shift, most), default=0)
    rows = values.rows(shift)[0]
    cost = rows.sums(rows.vector(free))[0] - rows.sums(rows.vector(kept))[0]
    without, with_it = (one.total(num, shift) for one in thens)
    stops = any(
        demand.now and x and not y for demand, x, y in zip(problem.demands, free, kept, strict=True)
    )
    starves = (
        constraints.below_floor(problem, kept).keys()
        - constraints.below_floor(problem, free).keys()
    )
    pays = any(kept) and not stops and not starves and with_it - without > cost * num
    return HotSpare(
        num_slots=problem.spare_slots,
        verdict="kept" if pays else "not kept",
        cost_flop=math.ldexp(cost, -shift),
        saves_flop=math.ldexp((with_it - without) / max(num, 1), -shift),
    )
