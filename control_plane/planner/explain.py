"""Why this plan: what it earns and costs, how far behind the beaten ones are, what binds it.

`chosen` is what the log keeps. What is asked for later (`lifted`, `paid_back_s`) is computed on
request, from the plan's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from ...events.records.decisions import Allocation, Alternative, Binding, PlanChosen
from ..state.cluster import ClusterState
from . import constraints
from .alternative_names import ALPHALESS, FLOORLESS, LIMITS, SPARELESS, percent, slots_told, without
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
    planned,
    wanted,
)
from .problem import PlanInput, waf_of
from .problem_of_state import Ground, digest

NUM_NAMED_MAX = 3
"""Tasks that the sentence names of those that move."""
UNBOUND = (*LIMITS, FLOORLESS, SPARELESS, ALPHALESS)
"""Plans that were not to be had, whatever they are worth, or not looked for."""


def chosen(state: ClusterState, ground: Ground, choice: Choice) -> PlanChosen:
    """The choice as the record that the log keeps of it, with what explains it."""
    most = {wish.task: state.tasks[wish.task].spec.slots.max for wish in ground.asked.wishes}
    return replace(of_input(ground.asked, choice, most), trigger=state.replan, kept=_kept(ground),
                   ideal_waf=ideal_waf(ground.every, ground.num_slots_all),
                   input=digest(state, ground))


def of_input(asked: PlanInput, choice: Choice, most: Mapping[int, int]) -> PlanChosen:
    """The choice as a record, without what only a state knows. `most`: the most slots that each
    task allows."""
    plan = choice.plan
    objective = objective_flop(asked, plan.slots)
    others = beaten(asked, choice.alternatives, objective)
    bound, bound_tasks = binding(asked, choice, most)
    return PlanChosen(
        trigger="", num_slots=asked.num_slots, allocations=choice.allocations,
        waf=plan.waf, objective=plan.objective, alternatives=others, objective_flop=objective,
        transition_flop=transition_flop(asked, plan.slots), running_s=asked.running_s,
        binding=bound, bound_tasks=bound_tasks, why=why(asked, choice, others, bound),
        below_floor=tuple(constraints.short(asked, plan.slots)), hot_spare=choice.spare,
        alpha=asked.alpha)


def _kept(ground: Ground) -> tuple[Allocation, ...]:
    """What tasks hold and earn that the plan leaves alone."""
    planned = {wish.task for wish in ground.asked.wishes}
    return tuple(Allocation(task=wish.task, slots_before=wish.now, slots=wish.now,
                            waf=waf_of(wish, wish.now), waf_before=waf_of(wish, wish.now))
                 for wish in ground.every if wish.task not in planned and wish.now)


def beaten(asked: PlanInput, others: Sequence[Alternative], objective: float
           ) -> tuple[Alternative, ...]:
    """Other plans, with their distance from `objective`, the chosen one's."""
    return tuple(replace(other, behind_flop=objective - objective_flop(asked, slots),
                         transition_flop=transition_flop(asked, slots))
                 for other in others for slots in [tuple(num for _, num in other.slots)])


def binding(asked: PlanInput, choice: Choice,
            most: Mapping[int, int]) -> tuple[Binding, tuple[int, ...]]:
    """What keeps the plan from earning more, and whose it is.

    `most`: the most slots that each task allows. `slots`: with more of them it would earn more.
    `min`: there are some left, fewer than the smallest size of a task that waits. `max`: every task
    has what suits it best, some the most that they allow. `limits`, `floor`: without limits, or
    without the floors of these tasks, it would be worth more. `spare`: a node's slots are kept
    idle.
    """
    plan = choice.plan
    if choice.spare is not None and choice.spare.verdict == "kept":
        return "spare", ()
    if choice.limitless is not None and choice.binding != ("floors",):
        return "limits", ()
    if choice.limitless is not None:
        least = constraints.given(asked)
        return "floor", tuple(wish.task for wish, x, floor in zip(
            asked.wishes, choice.limitless.slots, least, strict=True) if x < floor)
    if sum(wanted(asked)) > asked.num_slots:
        left_over = asked.num_slots - sum(plan.slots)
        tasks = [wish.task for wish, x in zip(asked.wishes, plan.slots, strict=True)
                 if x == 0 and wish.sizes and wish.sizes[0] > left_over > 0]
        return ("min", tuple(tasks)) if tasks else ("slots", ())
    full = [wish.task for wish, x in zip(asked.wishes, plan.slots, strict=True)
            if x > 0 and x == most.get(wish.task)]
    return ("max", tuple(full)) if full else ("nothing", ())


# --- on request ---------------------------------------------------------------------------------
def lifted(asked: PlanInput, slots: Sequence[int]) -> tuple[Alternative, ...]:
    """What would be planned without each limit by itself, without floors, without alpha, without a
    hot spare or with one, and if only the hurt shrink: each beside the plan `slots`.

    A solve for each. Plans that are the same as an earlier one, or as `slots`, are left out.
    """
    every, earned = all_rows(asked)

    def valued(found: Sequence[int]) -> Plan:
        return plan_of(asked.wishes, (tuple(found), every.sums(every.vector(found))[0]))

    plan = valued(slots)
    others = [(what, comparable(asked, plan, valued(planned(other).slots)))
              for what, other in _lifted(asked)]
    hurt = [wish.name for wish in asked.wishes if wish.hurt]
    shrunk = best_among(asked, lambda wish, x: x == wish.now or (wish.hurt and x < wish.now))
    if hurt and shrunk is not None:
        others.append((f"shrink only the hurt ({_listed(hurt)})", shrunk))
    share = int(earned[every.vector(slots)].sum()) if asked.alpha else 0
    return beaten(asked, alternatives(asked, plan, others, share),
                  objective_flop(asked, plan.slots))


def _lifted(asked: PlanInput) -> Iterator[tuple[str, PlanInput]]:
    """By the name of the plan: the input without one of what binds it."""
    limits = asked.limits
    if limits is not None and limits.moves_max is not None:
        yield without(("moves_max",)), replace(asked, moves_max=None)
    if limits is not None and limits.teams:
        yield without(("quotas",)), replace(asked, quotas=())
    if limits is not None and limits.priorities:
        yield without(("priorities",)), replace(asked, wishes=tuple(
            replace(wish, priority=0) for wish in asked.wishes))
    if constraints.are_set(asked):
        yield FLOORLESS, constraints.without(asked)
    if asked.gain_min:
        yield "without gain_min", replace(asked, gain_min=0.0)
    if asked.alpha:
        yield ALPHALESS, replace(asked, alpha=0.0)
    if asked.spare_slots:
        idle = min(asked.spare_slots, asked.num_slots)
        yield SPARELESS, asked
        yield "with a hot spare", replace(asked, num_slots=asked.num_slots - idle, kept_slots=idle)


def paid_back_s(asked: PlanInput, slots: Sequence[int]) -> float:
    """How long until what the changes of healthy tasks earn has paid for them, against the best
    plan that leaves the healthy as they are (one solve). 0 where nothing is to be paid, and with
    alpha: its changes are not made to earn more."""
    if asked.alpha or leaves_healthy(asked, slots):
        return 0.0
    steady = best_among(asked, lambda wish, x: (
        wish.hurt or x == wish.now or wish.now not in wish.sizes))
    if steady is None:
        return 0.0
    waf = math.fsum(waf_of(wish, x) for wish, x in zip(asked.wishes, slots, strict=True))
    gain = waf - steady.waf
    cost = transition_flop(asked, slots) - transition_flop(asked, steady.slots)
    return cost / gain if gain > 0 and cost > 0 else 0.0


def leaves_healthy(asked: PlanInput, slots: Sequence[int]) -> bool:
    """Whether every healthy task that has slots keeps them, where it may have so many."""
    return all(wish.hurt or x == wish.now or wish.now not in wish.sizes
               for wish, x in zip(asked.wishes, slots, strict=True))


# --- one sentence -------------------------------------------------------------------------------
def why(asked: PlanInput, choice: Choice, others: Sequence[Alternative], bound: Binding) -> str:
    """One sentence: what moves, and what the nearest other plan lacks."""
    names = {wish.task: wish.name for wish in asked.wishes}
    short = [names[task] for task in constraints.short(asked, choice.plan.slots)]
    room = f"; no room for the floor of {_listed(short)}" if short else ""
    reason = f"{_reason(asked, choice, others, bound)}{room}"
    return f"{moves(choice.allocations, names)}: {reason}"


def moves(given: Sequence[Allocation], names: Mapping[int, str]) -> str:
    """Which tasks change, and to how many slots."""
    told = [f"{names[x.task]} " + (
        f"begins on {x.slots}" if not x.slots_before else
        f"gives up its {x.slots_before}" if not x.slots else f"{x.slots_before} -> {x.slots}")
        for x in given if x.slots != x.slots_before]
    if not told:
        hurt = [names[x.task] for x in given if x.transition_s]
        return f"{_listed(hurt)} go{'es' * (len(hurt) == 1)} on with as many" if hurt else (
            "no task moves")
    return _listed(told)


def _listed(told: Sequence[str]) -> str:
    more = len(told) - NUM_NAMED_MAX
    return ", ".join(told[:NUM_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _reason(asked: PlanInput, choice: Choice, others: Sequence[Alternative],
            bound: Binding) -> str:
    plan, by = choice.plan, f" by alpha-fairness {asked.alpha:g}" if asked.alpha else ""
    if not asked.wishes or not any(wish.sizes for wish in asked.wishes):
        return "there is nothing that could earn anything"
    if bound == "spare" and choice.spare is not None:
        spare = choice.spare
        return (f"{slots_told(spare.num_slots)} idle as a hot spare, which costs "
                f"{_share(spare.cost_flop, asked, plan)} until the next fault and saves "
                f"{_share(spare.saves_flop, asked, plan)} then")
    if bound in ("limits", "floor"):
        most = next(other for other in others if (
            other.what in LIMITS if bound == "limits" else other.what == FLOORLESS))
        first = _first_come(asked, plan, most) if most.what == "without priorities" else ""
        return f"{first}{most.what} it would be worth {_apart(most, asked, plan)} more{by}"
    others = [other for other in others if other.what not in UNBOUND]
    if not others:
        return "there is no other plan"
    nearest = max(others, key=lambda other: other.objective)
    runner_up = "the runner-up" + (
        f" ({nearest.what})" if nearest.what != "the next best" else "")
    if nearest.objective == plan.objective:
        return f"{runner_up} is worth as much, and a tie goes to the first task"
    less = f"{runner_up} is worth {_apart(nearest, asked, plan)} less{by}"
    if nearest.waf <= plan.waf or asked.alpha:
        return less
    slots = [x for _, x in nearest.slots]
    held = math.fsum(hysteresis_flop(asked, wish, x) - hysteresis_flop(asked, wish, y)
                     for wish, x, y in zip(asked.wishes, slots, plan.slots, strict=True))
    return (f"{less}: its changes earn less than gain_min asks for" if held >= nearest.behind_flop
            else f"{less}: its changes cost more than they earn")


def _first_come(asked: PlanInput, plan: Plan, most: Alternative) -> str:
    """Who has more by its priority, and who less: `priority: a (1) comes before b (0); `."""
    theirs = [(wish, x - y) for wish, x, (_, y) in
              zip(asked.wishes, plan.slots, most.slots, strict=True)]
    gives = [wish for wish, more in theirs if more < 0]
    least = min((wish.priority for wish in gives), default=0)
    takes = [wish for wish, more in theirs if more > 0 and wish.priority > least]
    if not takes:
        return ""
    first, last = (_listed([f"{wish.name} ({wish.priority})" for wish in some])
                   for some in (takes, gives))
    return f"priority: {first} come{'s' * (len(takes) == 1)} before {last}; "


def _apart(other: Alternative, asked: PlanInput, plan: Plan) -> str:
    """How far another plan's objective is from the chosen one's, as a share of that."""
    return (percent(abs(other.behind_share)) if asked.alpha
            else _share(abs(other.behind_flop), asked, plan))


def _share(flop: float, asked: PlanInput, plan: Plan) -> str:
    """A difference of objectives as a share of the plan's."""
    worth = objective_flop(asked, plan.slots)
    return percent(flop / worth) if worth > 0 else f"{flop:.3g} weighted FLOP"
