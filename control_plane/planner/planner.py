"""The plan: which task gets how many slots, exactly, and what was beaten.

A multiple-choice knapsack over the candidate sizes of each task, maximising the sum of the
objective (worth.py). The objective is in integers, so every way of computing the optimum gives the
same one. Ties: the first task, by id, gets most.

`choose` solves at most twice: the optimum without limits and floors, which is the plan if it keeps
them; then either the plan that keeps them, or the runner-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ...events.records.decisions import Allocation, Alternative, HotSpare
from . import constraints
from .alternative_names import OTHERS_WAIT_NUM, UNCHANGED, without
from .objective import exact, shift_of
from .problem import Limits, PlanInput, Wish, allocation, waf_of
from .solver.candidates import Found, Rows
from .solver.core import Ints
from .solver.knapsack import Solved, best

NEXT_BEST = "the next best"
NEAREST = "the best found that changes two tasks"
"""Where the next best would take too long to be found."""
RUNNERS_WORK_NUM_MAX = 1 << 22
"""Candidates times states, to find the next best: about a hundredth of a second."""


class Plan(Struct, frozen=True, kw_only=True):
    """Slots per task, in the order of the wishes."""

    slots: tuple[int, ...]
    objective: int
    waf: float


class Choice(Struct, frozen=True, kw_only=True):
    """The plan that was chosen, and what it beat."""

    plan: Plan
    allocations: tuple[Allocation, ...]
    alternatives: tuple[Alternative, ...]
    spare: HotSpare | None = None
    limitless: Plan | None = None
    """The optimum without limits and floors, where they cost something."""
    binding: tuple[str, ...] = ()
    """The limits (LIMIT_NAMES) that `limitless` does not keep."""


def choose(asked: PlanInput) -> Choice:
    """The best plan that keeps limits and floors, beside the unchanged one and the runner-up."""
    made = _Made.of(asked)
    plan, free = made.plan, made.free
    others = [*made.unchanged(), *(made.runner_up() if not made.broken else ())]
    if made.broken:
        free = comparable(asked, plan, free)
        others.insert(0, (without(made.broken), free))
    costs = bool(made.broken) and free.objective > plan.objective
    return Choice(plan=plan, allocations=_allocations(asked.wishes, plan),
                  alternatives=alternatives(asked, plan, others,
                                            made.earned() if asked.alpha else 0),
                  limitless=free if costs else None, binding=made.broken if costs else ())


def planned(asked: PlanInput) -> Plan:
    """The plan of `choose` alone, without those that it beat."""
    return _Made.of(asked).plan


def gains(asked: PlanInput) -> Rows:
    """The objective of each task and each size that its floor leaves, 0 too; integers on one scale.
    """
    every = all_rows(asked)[0]
    return every.only(constraints.kept(asked, every)) if constraints.are_asked(asked) else every


def all_rows(asked: PlanInput) -> tuple[Rows, Ints]:
    """The objective of every candidate, whatever floors leave; and what each earns."""
    found = exact(asked.wishes, asked.running_s, asked.num_slots, alpha=asked.alpha,
                  gain_min=asked.gain_min)
    return found.rows(shift_of(found.most()))


def best_among(asked: PlanInput, allowed: Callable[[Wish, int], bool]) -> Plan | None:
    """The best plan with those sizes of a task alone that are allowed; None: it cannot be."""
    every = all_rows(asked)[0]
    bounds = _Bounds.of(asked, every)
    row_of: list[int] = every.row_of.tolist()
    kept = np.array([allowed(asked.wishes[row], size) for row, size in
                     zip(row_of, every.sizes.tolist(), strict=True)], dtype=np.bool_)
    kept &= bounds.kept if bounds.kept is not None else True
    if (np.bincount(every.row_of[kept], minlength=every.num) == 0).any():
        return None
    rows, limits = every.only(kept), bounds.limits
    found = best(rows, asked.num_slots)
    if found is not None and limits is not None and (
            limits.priorities or not limits.allow(found[0])):
        found = constraints.within(rows, asked.num_slots, limits)
    return None if found is None else plan_of(asked.wishes, found)


def wanted(asked: PlanInput) -> tuple[int, ...]:
    """What would suit each task best, were there slots for all and for all floors, and no
    hysteresis."""
    most = sum(wish.sizes[-1] for wish in asked.wishes if wish.sizes)
    found = exact(asked.wishes, asked.running_s, most, alpha=asked.alpha)
    rows = found.rows(shift_of(found.most()))[0]
    more = replace(asked, num_slots=most)
    if constraints.are_asked(more):
        rows = rows.only(constraints.kept(more, rows))
    return tuple(int(rows.sizes[begin + int(np.argmax(rows.gains[begin:end]))])
                 for begin, end in pairwise(rows.starts.tolist()))


def ideal_waf(wishes: Sequence[Wish], num_slots: int) -> float:
    """What the best plan of all would earn on `num_slots`, were changes free."""
    every = exact(wishes, 1.0 / max(num_slots, 1), num_slots, free=True)
    found = best(every.rows(shift_of(every.most()))[0], num_slots)
    return plan_of(wishes, found).waf if found is not None else 0.0


def plan_of(wishes: Sequence[Wish], found: Found) -> Plan:
    """What was found, with what it earns."""
    slots = found[0]
    waf = math.fsum(waf_of(wish, x) for wish, x in zip(wishes, slots, strict=True))
    return Plan(slots=slots, objective=found[1], waf=waf)


def comparable(asked: PlanInput, plan: Plan, other: Plan) -> Plan:
    """Another plan, with OTHERS_WAIT_NUM for an objective where the two do not compare: from alpha
    1 on, a plan in which other tasks have nothing."""
    if asked.alpha >= 1 and constraints.starved(asked, plan.slots) != constraints.starved(
        asked, other.slots
    ):
        return replace(other, objective=OTHERS_WAIT_NUM)
    return other


def alternatives(asked: PlanInput, plan: Plan, others: Sequence[tuple[str, Plan]],
                 earned: int) -> tuple[Alternative, ...]:
    """The other plans that differ from `plan` and from each other. `earned`: with alpha, by `plan`
    before what its changes cost, on the scale of its objective."""
    found: list[Alternative] = []
    seen = [plan.slots]
    for what, other in others:
        if other.slots in seen:
            continue
        seen.append(other.slots)
        slots = tuple((wish.task, x) for wish, x in zip(asked.wishes, other.slots, strict=True))
        behind = plan.objective - other.objective if other.objective != OTHERS_WAIT_NUM else 0
        found.append(Alternative(what=what, slots=slots, waf=other.waf, objective=other.objective,
                                 behind_share=behind / earned if earned > 0 else 0.0))
    return tuple(found)


def _allocations(wishes: Sequence[Wish], plan: Plan) -> tuple[Allocation, ...]:
    return tuple(allocation(wish, x) for wish, x in zip(wishes, plan.slots, strict=True))


class _Bounds(Struct, frozen=True):
    """The limits and floors of one input."""

    asked: PlanInput
    every: Rows
    """All candidates, whatever floors leave."""
    limits: Limits | None
    kept: NDArray[np.bool_] | None
    """By candidate of `every`: whether the floors leave it. None: there is none."""

    @classmethod
    def of(cls, asked: PlanInput, every: Rows) -> _Bounds:
        return cls(asked, every, asked.limits,
                   constraints.kept(asked, every) if constraints.are_asked(asked) else None)

    def broken(self, slots: Sequence[int]) -> tuple[str, ...]:
        """Those that a plan does not keep, of LIMIT_NAMES. Priorities count as not kept: whether
        the plan keeps them is known only once the best that does is found."""
        limits, names = self.limits, list[str]()
        if limits is not None:
            names += ["moves_max"] * (not limits.allow_moves(slots))
            names += ["quotas"] * (not limits.allow_quotas(slots))
            names += ["priorities"] * bool(limits.priorities)
        if self.kept is not None and not self.kept[self.every.vector(slots)].all():
            names.append("floors")
        return tuple(names)

    def allow(self, slots: Sequence[int]) -> bool:
        """Whether a plan keeps all but the priorities."""
        return not set(self.broken(slots)) - {"priorities"}

    def best(self, broken: Sequence[str]) -> Found:
        """The best plan that keeps all; `broken`: those that the optimum does not keep."""
        num_slots, limits = self.asked.num_slots, self.limits
        rows = self.every if self.kept is None else self.every.only(self.kept)
        found = None
        if limits is None or tuple(broken) == ("floors",):
            found = best(rows, num_slots)
        if limits is not None and (found is None or not limits.allow(found[0])):
            found = constraints.best(rows, num_slots, limits)
        assert found is not None, "0 slots for each, and the floors, are within every quota"
        return found


class _Made(Struct, frozen=True, kw_only=True):
    """The plan of one input, and the optimum without limits and floors."""

    bounds: _Bounds
    every_earned: Ints
    solved: Solved
    """Without limits and floors."""
    free: Plan
    plan: Plan
    broken: tuple[str, ...]
    """The limits that `free` does not keep; empty: it is the plan."""

    @classmethod
    def of(cls, asked: PlanInput) -> _Made:
        every, every_earned = all_rows(asked)
        bounds = _Bounds.of(asked, every)
        rows = every
        if bounds.kept is not None and asked.alpha >= 1:
            rows = every.only(constraints.kept(constraints.without(asked), every))
        solved = Solved.of(rows, asked.num_slots)
        assert solved is not None, "0 slots for each fit, and so do the floors of alpha"
        free = plan = plan_of(asked.wishes, (rows.slots(solved.vector), solved.gain))
        broken = bounds.broken(free.slots)
        if broken:
            plan = plan_of(asked.wishes, bounds.best(broken))
            broken = broken if plan.slots != free.slots else ()
        return cls(bounds=bounds, every_earned=every_earned, solved=solved, free=free,
                   plan=plan, broken=broken)

    def earned(self) -> int:
        """By the plan, before what its changes cost, on the scale of the objective."""
        return int(self.every_earned[self.bounds.every.vector(self.plan.slots)].sum())

    def unchanged(self) -> Iterator[tuple[str, Plan]]:
        """The plan in which every task keeps what it has; nothing where it cannot be."""
        asked, every = self.bounds.asked, self.bounds.every
        slots = tuple(wish.now for wish in asked.wishes)
        vector = every.vector(slots)
        if len(vector) == len(slots) and sum(slots) <= asked.num_slots and (
                self.bounds.allow(slots)):
            yield UNCHANGED, plan_of(asked.wishes, (slots, every.sums(vector)[0]))

    def runner_up(self) -> Iterator[tuple[str, Plan]]:
        """The next best plan, if the limits allow it; one near the plan where the search would take
        too long."""
        what, found = NEXT_BEST, self.solved.next_best(RUNNERS_WORK_NUM_MAX)
        if found is None:
            what, found = NEAREST, next(iter(self.solved.swaps(self.plan.slots)), None)
        if found is not None and self.bounds.allow(found[0]):
            yield what, plan_of(self.bounds.asked.wishes, found)
