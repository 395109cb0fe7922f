"""Choosing a plan: slots per task with the largest objective, and the alternatives to it.

Among tied plans, the plan that gives most slots to the first task is chosen: of the cluster's
tasks those that train come before commands whose rate is nominal (problem_of_state.py).
`choose_plan` solves at most twice, first without limits and floors. If its plan satisfies them, the
second solve finds the runner-up; else it finds the plan under them.
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
from .alternative_names import NOT_COMPARABLE_NUM, UNCHANGED, without
from .objective import fixed_point_shift, objective_values
from .problem import PlanLimits, PlanProblem, TaskDemand, allocation, waf_of
from .solver.candidates import Candidates, SlotsAndGain
from .solver.core import Ints
from .solver.knapsack import Solution, best

NEXT_BEST = "the next best"
NEAREST = "the best found that changes two tasks"
"""The name of the alternative if the search for the next best would take too long."""
RUNNERS_WORK_NUM_MAX = 1 << 22
"""Limit of candidates times states in the search for the next best: about 10 ms."""


class Plan(Struct, frozen=True, kw_only=True):
    """Slots per task, in the order of the problem's demands."""

    slots: tuple[int, ...]
    objective: int
    waf: float


class Choice(Struct, frozen=True, kw_only=True):
    plan: Plan
    allocations: tuple[Allocation, ...]
    alternatives: tuple[Alternative, ...]
    spare: HotSpare | None = None
    unconstrained: Plan | None = None
    """The optimum without limits and floors, if it has a larger objective."""
    binding: tuple[str, ...] = ()
    """The limits (LIMIT_NAMES) that `unconstrained` violates."""


def choose_plan(problem: PlanProblem) -> Choice:
    """The best plan within limits and floors, with the unchanged plan and the runner-up."""
    found = _Solutions.of(problem)
    plan, free = found.plan, found.free
    others = [*found.unchanged(), *(found.runner_up() if not found.violated else ())]
    if found.violated:
        free = comparable(problem, plan, free)
        others.insert(0, (without(found.violated), free))
    costs = bool(found.violated) and free.objective > plan.objective
    allocations = tuple(
        allocation(demand, x) for demand, x in zip(problem.demands, plan.slots, strict=True)
    )
    running = int(found.first_terms[found.every.vector(plan.slots)].sum()) if problem.alpha else 0
    return Choice(
        plan=plan,
        allocations=allocations,
        alternatives=alternatives(problem, plan, others, running),
        unconstrained=free if costs else None,
        binding=found.violated if costs else (),
    )


def solve(problem: PlanProblem) -> Plan:
    """The plan of `choose_plan`, without its alternatives."""
    return _Solutions.of(problem).plan


def allowed_candidates(problem: PlanProblem) -> Candidates:
    """The candidates that the floors allow, size 0 included, with their objective in integers."""
    every = all_rows(problem)[0]
    if not constraints.has_floors(problem):
        return every
    return every.only(constraints.allowed(problem, every))


def all_rows(problem: PlanProblem) -> tuple[Candidates, Ints]:
    """(all candidates, regardless of floors, with their objective; its first term by candidate)."""
    found = objective_values(
        problem.demands,
        problem.running_s,
        problem.num_slots,
        alpha=problem.alpha,
        gain_min=problem.gain_min,
    )
    return found.rows(fixed_point_shift(found.most()))


def best_among(problem: PlanProblem, allowed: Callable[[TaskDemand, int], bool]) -> Plan | None:
    """The best plan in which `allowed` accepts the size of every task; None if there is none."""
    every = all_rows(problem)[0]
    row_of: list[int] = every.row_of.tolist()
    kept = np.array(
        [
            allowed(problem.demands[row], size)
            for row, size in zip(row_of, every.sizes.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )
    if constraints.has_floors(problem):
        kept &= constraints.allowed(problem, every)
    if (np.bincount(every.row_of[kept], minlength=every.num) == 0).any():
        return None
    rows, limits = every.only(kept), problem.limits
    found = best(rows, problem.num_slots)
    if (
        found is not None
        and limits is not None
        and (limits.priorities or not limits.allow(found[0]))
    ):
        found = constraints.within_limits(rows, problem.num_slots, limits)
    return None if found is None else plan_of(problem.demands, found)


def preferred_slots(problem: PlanProblem) -> tuple[int, ...]:
    """By task: the best number of slots if slots were unlimited and hysteresis did not apply."""
    most = sum(demand.sizes[-1] for demand in problem.demands if demand.sizes)
    found = objective_values(problem.demands, problem.running_s, most, alpha=problem.alpha)
    rows = found.rows(fixed_point_shift(found.most()))[0]
    more = replace(problem, num_slots=most)
    if constraints.has_floors(more):
        rows = rows.only(constraints.allowed(more, rows))
    return tuple(
        int(rows.sizes[begin + int(np.argmax(rows.gains[begin:end]))])
        for begin, end in pairwise(rows.starts.tolist())
    )


def ideal_waf(demands: Sequence[TaskDemand], num_slots: int) -> float:
    """The WAF of the best plan on `num_slots` if changes were free."""
    every = objective_values(demands, 1.0 / max(num_slots, 1), num_slots, free=True)
    found = best(every.rows(fixed_point_shift(every.most()))[0], num_slots)
    return plan_of(demands, found).waf if found is not None else 0.0


def plan_of(demands: Sequence[TaskDemand], found: SlotsAndGain) -> Plan:
    slots = found[0]
    waf = math.fsum(waf_of(demand, x) for demand, x in zip(demands, slots, strict=True))
    return Plan(slots=slots, objective=found[1], waf=waf)


def comparable(problem: PlanProblem, plan: Plan, other: Plan) -> Plan:
    """`other`; marked NOT_COMPARABLE_NUM if alpha >= 1 and not the same tasks have a WAF of 0."""
    if problem.alpha >= 1 and (
        constraints.unserved_tasks(problem, plan.slots)
        != constraints.unserved_tasks(problem, other.slots)
    ):
        return replace(other, objective=NOT_COMPARABLE_NUM)
    return other


def alternatives(
    problem: PlanProblem, plan: Plan, others: Sequence[tuple[str, Plan]], running: int
) -> tuple[Alternative, ...]:
    """The other plans that differ from `plan` and from each other. `running`: with alpha, the first
    term of the objective of `plan`, on the scale of this objective."""
    found: list[Alternative] = []
    seen = [plan.slots]
    for what, other in others:
        if other.slots in seen:
            continue
        seen.append(other.slots)
        slots = tuple((one.task, x) for one, x in zip(problem.demands, other.slots, strict=True))
        behind = plan.objective - other.objective if other.objective != NOT_COMPARABLE_NUM else 0
        found.append(
            Alternative(
                what=what,
                slots=slots,
                waf=other.waf,
                objective=other.objective,
                behind_share=behind / running if running > 0 else 0.0,
            )
        )
    return tuple(found)


class _Solutions(Struct, frozen=True, kw_only=True):
    """The plan of one problem, and the optimum without limits and floors."""

    problem: PlanProblem
    limits: PlanLimits | None
    every: Candidates
    """All candidates, without floors."""
    kept: NDArray[np.bool_] | None
    """By candidate of `every`: True if the floors allow it. None: there are no floors."""
    first_terms: Ints
    """The first term of the objective, by candidate."""
    solved: Solution
    """The solver's result without limits and floors."""
    free: Plan
    plan: Plan
    violated: tuple[str, ...] = ()
    """The limits that `free` violates. If empty, `free` is the plan."""

    @classmethod
    def of(cls, problem: PlanProblem) -> _Solutions:
        every, first_terms = all_rows(problem)
        kept = constraints.allowed(problem, every) if constraints.has_floors(problem) else None
        rows = every
        if kept is not None and problem.alpha >= 1:
            rows = every.only(constraints.allowed(constraints.without_floors(problem), every))
        solved = Solution.of(rows, problem.num_slots)
        assert solved is not None, "the floors alone fit"
        free = plan_of(problem.demands, (rows.slots(solved.vector), solved.gain))
        found = cls(
            problem=problem,
            limits=problem.limits,
            every=every,
            kept=kept,
            first_terms=first_terms,
            solved=solved,
            free=free,
            plan=free,
        )
        violated = found._violated(free.slots)
        if not violated:
            return found
        plan = plan_of(problem.demands, found._best(violated))
        return replace(found, plan=plan, violated=violated if plan.slots != free.slots else ())

    def _violated(self, slots: Sequence[int]) -> tuple[str, ...]:
        """The LIMIT_NAMES that a plan violates. Priorities count: only a solve can check them."""
        limits, names = self.limits, list[str]()
        if limits is not None:
            names += ["moves_max"] * (not limits.allow_moves(slots))
            names += ["quotas"] * (not limits.allow_quotas(slots))
            names += ["priorities"] * bool(limits.priorities)
        if self.kept is not None and not self.kept[self.every.vector(slots)].all():
            names.append("floors")
        return tuple(names)

    def _allow(self, slots: Sequence[int]) -> bool:
        """True if a plan satisfies all limits and floors, priorities not considered."""
        return not set(self._violated(slots)) - {"priorities"}

    def _best(self, violated: Sequence[str]) -> SlotsAndGain:
        """The best plan under all limits and floors. `violated`: what the free optimum violates."""
        num_slots, limits = self.problem.num_slots, self.limits
        rows = self.every if self.kept is None else self.every.only(self.kept)
        found = None
        if limits is None or tuple(violated) == ("floors",):
            found = best(rows, num_slots)
        if limits is not None and (found is None or not limits.allow(found[0])):
            found = constraints.best(rows, num_slots, limits)
        assert found is not None, "the floors alone are within every quota"
        return found

    def unchanged(self) -> Iterator[tuple[str, Plan]]:
        """The plan in which every task keeps its slots; nothing if it is not allowed."""
        slots = tuple(demand.now for demand in self.problem.demands)
        vector = self.every.vector(slots)
        if (
            len(vector) == len(slots)
            and sum(slots) <= self.problem.num_slots
            and (self._allow(slots))
        ):
            yield UNCHANGED, plan_of(self.problem.demands, (slots, self.every.sums(vector)[0]))

    def runner_up(self) -> Iterator[tuple[str, Plan]]:
        """The next best plan. If the search would take too long: a plan that changes two tasks."""
        what, found = NEXT_BEST, self.solved.next_best(RUNNERS_WORK_NUM_MAX)
        if found is None:
            what, found = NEAREST, self.solved.swap()
        if found is not None and self._allow(found[0]):
            yield what, plan_of(self.problem.demands, found)
