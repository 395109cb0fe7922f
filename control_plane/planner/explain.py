"""Explains a plan: its value and costs, its distance to the alternatives, the binding constraint.

`plan_record` makes the record in the log. `without_each_limit` and `paid_back_s` are computed from
the problem when they are requested.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from ...events.records.decisions import Allocation, Alternative, Binding, PlanChosen
from ...events.words import listed
from ..state.cluster import ClusterState
from . import constraints
from .alternative_names import (
    ALPHALESS,
    FLOORLESS,
    LIMIT_NAMES,
    LIMITS_BY_NAME,
    SPARELESS,
    percent,
    slots_in_words,
    without,
)
from .objective import hysteresis_flop, objective_flop, transition_flop
from .planner import (
    Choice,
    Plan,
    all_rows,
    alternatives,
    best_among,
    comparable,
    ideal_waf,
    plan_of,
    preferred_slots,
    solve,
)
from .problem import PlanProblem, TaskDemand, waf_of
from .problem_of_state import PlanningSnapshot, digest

UNBOUND = (*LIMITS_BY_NAME, FLOORLESS, SPARELESS, ALPHALESS)
"""Names of plans that violate a limit of the problem, or that solve another problem."""

TRIGGER_CHARS_MAX = 1000
"""A node may have many failed checks."""


def plan_record(state: ClusterState, snapshot: PlanningSnapshot, choice: Choice) -> PlanChosen:
    """The record of a plan of the cluster `state`."""
    problem = snapshot.problem
    most = {demand.task: state.tasks[demand.task].spec.slots.max for demand in problem.demands}
    return replace(
        record_of(problem, choice, most),
        trigger=state.replan[:TRIGGER_CHARS_MAX],
        kept=kept(snapshot),
        input=digest(state, snapshot),
        ideal_waf=ideal_waf(snapshot.all_demands, snapshot.num_slots_all),
    )


def record_of(problem: PlanProblem, choice: Choice, most: Mapping[int, int]) -> PlanChosen:
    """The record without the fields that need a cluster's state. `most`: slots.max by task."""
    plan = choice.plan
    objective = objective_flop(problem, plan.slots)
    others = with_distances(problem, choice.alternatives, objective)
    bound, bound_tasks = binding_constraint(problem, choice, most)
    return PlanChosen(
        trigger="",
        num_slots=problem.num_slots,
        allocations=choice.allocations,
        waf=plan.waf,
        objective=plan.objective,
        alternatives=others,
        objective_flop=objective,
        transition_flop=transition_flop(problem, plan.slots),
        running_s=problem.running_s,
        binding=bound,
        bound_tasks=bound_tasks,
        why=why(problem, choice, others, bound),
        below_floor=tuple(constraints.below_floor(problem, plan.slots)),
        hot_spare=choice.spare,
        alpha=problem.alpha,
    )


def kept(snapshot: PlanningSnapshot) -> tuple[Allocation, ...]:
    """The slots and the WAF of tasks that the plan may not change."""
    planned = {demand.task for demand in snapshot.problem.demands}
    return tuple(
        Allocation(
            task=demand.task,
            slots_before=demand.now,
            slots=demand.now,
            waf=waf_of(demand, demand.now),
            waf_before=waf_of(demand, demand.now),
        )
        for demand in snapshot.all_demands
        if demand.task not in planned and demand.now
    )


def with_distances(
    problem: PlanProblem, others: Sequence[Alternative], objective: float
) -> tuple[Alternative, ...]:
    """The other plans with their distance from `objective`, the chosen plan's objective."""
    return tuple(
        replace(
            other,
            behind_flop=objective - objective_flop(problem, slots),
            transition_flop=transition_flop(problem, slots),
        )
        for other in others
        for slots in [tuple(num for _, num in other.slots)]
    )


def binding_constraint(
    problem: PlanProblem, choice: Choice, most: Mapping[int, int]
) -> tuple[Binding, tuple[int, ...]]:
    """(the constraint that binds the plan, the tasks that it concerns). `most`: slots.max by task.

    `slots`, `limits`, `floor`: the objective would be larger with more slots, without limits,
    without the floors of these tasks. `min`: slots are left, but fewer than the smallest size of a
    waiting task. `max`: every task has its preferred number of slots, for these their slots.max.
    `spare`: the slots of one node are kept idle. `nothing`: none of these.
    """
    plan = choice.plan
    if choice.spare is not None and choice.spare.verdict == "kept":
        return "spare", ()
    if choice.unconstrained is not None and choice.binding != ("floors",):
        return "limits", ()
    if choice.unconstrained is not None:
        least = constraints.granted_floors(problem)
        return "floor", tuple(
            demand.task
            for demand, x, floor in zip(
                problem.demands, choice.unconstrained.slots, least, strict=True
            )
            if x < floor
        )
    if sum(preferred_slots(problem)) > problem.num_slots:
        left_over = problem.num_slots - sum(plan.slots)
        tasks = [
            demand.task
            for demand, x in zip(problem.demands, plan.slots, strict=True)
            if x == 0 and demand.sizes and demand.sizes[0] > left_over > 0
        ]
        return ("min", tuple(tasks)) if tasks else ("slots", ())
    full = [
        demand.task
        for demand, x in zip(problem.demands, plan.slots, strict=True)
        if x > 0 and x == most.get(demand.task)
    ]
    return ("max", tuple(full)) if full else ("nothing", ())


# --- on request ---
def without_each_limit(problem: PlanProblem, slots: Sequence[int]) -> tuple[Alternative, ...]:
    """Other plans, each compared with the plan `slots`: without one of the limits, floors included,
    without gain_min, without alpha, without and with a hot spare, and the plan in which only
    faulted tasks shrink. Each takes one solve. A plan that is not new is left out."""
    every, first_terms = all_rows(problem)

    def valued(counts: Sequence[int]) -> Plan:
        return plan_of(problem.demands, (tuple(counts), every.sums(every.vector(counts))[0]))

    plan = valued(slots)
    others = [
        (what, comparable(problem, plan, valued(solve(other).slots)))
        for what, other in _problems_without(problem)
    ]
    faulted = [demand.name for demand in problem.demands if demand.faulted]
    shrunk = best_among(problem, lambda one, x: x == one.now or (one.faulted and x < one.now))
    if faulted and shrunk is not None:
        others.append((f"shrink only the faulted ({listed(faulted)})", shrunk))
    share = int(first_terms[every.vector(slots)].sum()) if problem.alpha else 0
    return with_distances(
        problem, alternatives(problem, plan, others, share), objective_flop(problem, plan.slots)
    )


def _problems_without(problem: PlanProblem) -> Iterator[tuple[str, PlanProblem]]:
    """(the plan's name, the problem that it solves)."""
    kinds = constraints.kinds_of_limits(problem)
    for kind, name in zip(("moves_max", "quota", "priority", "floor"), LIMIT_NAMES, strict=True):
        if kind in kinds:
            yield without((name,)), constraints.without_limits(problem, [kind])
    if problem.gain_min:
        yield "without gain_min", replace(problem, gain_min=0.0)
    if problem.alpha:
        yield ALPHALESS, replace(problem, alpha=0.0)
    if problem.spare_slots:
        idle = min(problem.spare_slots, problem.num_slots)
        yield SPARELESS, problem
        yield (
            "with a hot spare",
            replace(problem, num_slots=problem.num_slots - idle, kept_slots=idle),
        )


def paid_back_s(problem: PlanProblem, slots: Sequence[int]) -> float:
    """Time until changes of healthy tasks have earned their transitions; 0: no cost, or alpha."""

    def is_kept(demand: TaskDemand, x: int) -> bool:
        return demand.faulted or x == demand.now or demand.now not in demand.sizes

    if problem.alpha or all(map(is_kept, problem.demands, slots)):
        return 0.0
    unchanged = best_among(problem, is_kept)
    if unchanged is None:
        return 0.0
    waf = math.fsum(waf_of(demand, x) for demand, x in zip(problem.demands, slots, strict=True))
    gain = waf - unchanged.waf
    cost = transition_flop(problem, slots) - transition_flop(problem, unchanged.slots)
    return cost / gain if gain > 0 and cost > 0 else 0.0


# --- one sentence ---
def why(problem: PlanProblem, choice: Choice, others: Sequence[Alternative], bound: Binding) -> str:
    """One sentence: the changes, and why the nearest alternative is worse."""
    names = {demand.task: demand.name for demand in problem.demands}
    short = [names[task] for task in constraints.below_floor(problem, choice.plan.slots)]
    room = f"; no room for the floor of {listed(short)}" if short else ""
    reason = f"{_reason(problem, choice, others, bound)}{room}"
    return f"{moves(choice.allocations, names)}: {reason}"


def moves(given: Sequence[Allocation], names: Mapping[int, str]) -> str:
    changes = [
        f"{names[x.task]} "
        + (
            f"begins on {x.slots}"
            if not x.slots_before
            else f"gives up its {x.slots_before}"
            if not x.slots
            else f"{x.slots_before} -> {x.slots}"
        )
        for x in given
        if x.slots != x.slots_before
    ]
    if not changes:
        same = [names[x.task] for x in given if x.transition_s]
        return (
            f"{listed(same)} go{'es' * (len(same) == 1)} on with as many"
            if same
            else ("no task moves")
        )
    return listed(changes)


def _reason(
    problem: PlanProblem, choice: Choice, others: Sequence[Alternative], bound: Binding
) -> str:
    plan, by = choice.plan, f" by alpha-fairness {problem.alpha:g}" if problem.alpha else ""
    if not problem.demands or not any(demand.sizes for demand in problem.demands):
        return "there is nothing that could earn anything"
    if bound == "spare" and choice.spare is not None:
        spare = choice.spare
        return (
            f"{slots_in_words(spare.num_slots)} idle as a hot spare, which costs "
            f"{_share(spare.cost_flop, problem, plan)} until the next fault and saves "
            f"{_share(spare.saves_flop, problem, plan)} then"
        )
    if bound in ("limits", "floor"):
        most = next(
            other
            for other in others
            if (other.what in LIMITS_BY_NAME if bound == "limits" else other.what == FLOORLESS)
        )
        first = _by_priority(problem, plan, most) if most.what == "without priorities" else ""
        return f"{first}{most.what} it would be worth {_distance(most, problem, plan)} more{by}"
    others = [other for other in others if other.what not in UNBOUND]
    if not others:
        return "there is no other plan"
    nearest = max(others, key=lambda other: other.objective)
    runner_up = "the runner-up" + (f" ({nearest.what})" if nearest.what != "the next best" else "")
    if nearest.objective == plan.objective:
        return f"{runner_up} is worth as much, and a tie goes to the first task"
    less = f"{runner_up} is worth {_distance(nearest, problem, plan)} less{by}"
    if nearest.waf <= plan.waf or problem.alpha:
        return less
    slots = [x for _, x in nearest.slots]
    held = math.fsum(
        hysteresis_flop(problem, demand, x) - hysteresis_flop(problem, demand, y)
        for demand, x, y in zip(problem.demands, slots, plan.slots, strict=True)
    )
    return (
        f"{less}: its changes earn less than gain_min asks for"
        if held >= nearest.behind_flop
        else f"{less}: its changes cost more than they earn"
    )


def _by_priority(problem: PlanProblem, plan: Plan, most: Alternative) -> str:
    """The tasks that gain or lose slots by priority: `priority: a (1) comes before b (0); `."""
    changes = [
        (demand, x - y)
        for demand, x, (_, y) in zip(problem.demands, plan.slots, most.slots, strict=True)
    ]
    gives = [demand for demand, more in changes if more < 0]
    least = min((demand.priority for demand in gives), default=0)
    takes = [demand for demand, more in changes if more > 0 and demand.priority > least]
    if not takes:
        return ""
    first, last = (
        listed([f"{demand.name} ({demand.priority})" for demand in some]) for some in (takes, gives)
    )
    return f"priority: {first} come{'s' * (len(takes) == 1)} before {last}; "


def _distance(other: Alternative, problem: PlanProblem, plan: Plan) -> str:
    """The distance to another plan's objective, as a share of the chosen plan's objective."""
    return (
        percent(abs(other.behind_share))
        if problem.alpha
        else _share(abs(other.behind_flop), problem, plan)
    )


def _share(flop: float, problem: PlanProblem, plan: Plan) -> str:
    """A difference of objectives as a share of the plan's objective."""
    total = objective_flop(problem, plan.slots)
    return percent(flop / total) if total > 0 else f"{flop:.3g} weighted FLOP"
