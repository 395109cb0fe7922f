"""Exhaustive check of the hot-spare rule: all allocations, with and without a spare, all faults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from msgspec.structs import replace
from unicron.control_plane.planner import constraints, planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand

CLOSE_RATIO = Fraction(1, 10**9)


def plan_by_force(asked: PlanProblem) -> tuple[int, ...]:
    """The plan by exhaustive search. With limits or floors, the planner's own plan: other tests
    check these."""
    if asked.limits is not None or constraints.has_floors(asked):
        return planner.choose_plan(asked).plan.slots
    rows = planner.allowed_candidates(asked)
    flat = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    options = [flat[begin:end] for begin, end in itertools.pairwise(rows.starts.tolist())]
    return max(
        (sum(gain for _, gain in vector), slots)
        for vector in itertools.product(*options)
        for slots in [tuple(size for size, _ in vector)]
        if sum(slots) <= asked.num_slots
    )[1]


def worth(wishes: Sequence[TaskDemand], slots: Sequence[int], span_s: float) -> Fraction:
    """The plan's work in `span_s`, less the cost of its changes."""
    total = Fraction(0)
    for wish, x in zip(wishes, slots, strict=True):
        kind_of = dict(zip(wish.sizes, wish.shapes, strict=False))
        before = [kind for size, kind in kind_of.items() if size <= wish.now]
        wafs = {0: 0.0, **dict(zip(wish.sizes, wish.wafs, strict=True))}
        kinds = wish.transition
        pays_s = (
            0.0
            if not wish.now or (x == wish.now and not wish.faulted)
            else (
                kinds.stop_s
                if not x
                else kinds.reshape_s
                if before and kind_of[x] != before[-1]
                else kinds.same_s
                if x == wish.now
                else kinds.grow_s
                if x > wish.now
                else kinds.shrink_s
            )
        )
        total += Fraction(wafs[x]) * Fraction(span_s)
        total -= Fraction(wafs.get(wish.now, 0.0)) * Fraction(pays_s)
    return total


def then(problem: PlanProblem, slots: Sequence[int]) -> Fraction:
    """Expected work after the next fault under this plan. Every slot is equally likely to fail."""
    left = max(problem.num_slots - problem.spare_slots, 0)
    wishes = [
        replace(wish, now=x, faulted=False) for wish, x in zip(problem.demands, slots, strict=True)
    ]
    span_s = min(problem.repair_s, problem.mtbf_gpu_s / max(left, 1))
    hits = [*slots, problem.num_slots - sum(slots)]
    total = Fraction(0)
    for hit, num in enumerate(hits):
        if num:
            hurt = [replace(one, faulted=i == hit) for i, one in enumerate(wishes)]
            plan = plan_by_force(replace(problem, demands=tuple(hurt), num_slots=left))
            total += num * worth(hurt, plan, span_s)
    return total / max(problem.num_slots, 1)


def may_idle(problem: PlanProblem) -> bool:
    """True if the rules allow the plan with the spare, whatever its objective value."""
    free, kept = both(problem)
    return (
        any(kept)
        and not any(
            wish.now and x and not y for wish, x, y in zip(problem.demands, free, kept, strict=True)
        )
        and set(constraints.below_floor(problem, kept))
        <= set(constraints.below_floor(problem, free))
    )


def both(problem: PlanProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The plans without a spare and with one."""
    idle = min(problem.spare_slots, problem.num_slots)
    return plan_by_force(problem), plan_by_force(
        replace(problem, num_slots=problem.num_slots - idle, kept_slots=idle)
    )


def spare_by_force(problem: PlanProblem) -> tuple[Fraction, Fraction, Fraction]:
    """(cost of a spare until the next fault, its gain after that fault, the tolerance of both)."""
    plans = both(problem)
    now = [worth(problem.demands, slots, problem.running_s) for slots in plans]
    after = [then(problem, slots) for slots in plans]
    most = sum(
        Fraction(max(wish.wafs, default=0.0))
        * Fraction(
            max(
                problem.mtbf_gpu_s,
                wish.transition.same_s,
                wish.transition.shrink_s,
                wish.transition.grow_s,
                wish.transition.stop_s,
                wish.transition.reshape_s,
            )
        )
        for wish in problem.demands
    )
    return now[0] - now[1], after[1] - after[0], CLOSE_RATIO * most + Fraction(1, 10**300)
