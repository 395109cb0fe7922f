"""Why a task waits, which limit keeps it waiting, and at what price it would run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from itertools import islice, pairwise
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from ...events.records.decisions import TaskWaiting
from ...events.records.types import Body
from ...events.spec.job import WEIGHT_RATIO_MAX
from ..state.cluster import ClusterState, live_tasks
from ..state.task import Task
from . import constraints
from .alternative_names import slots_told
from .planner import Plan, gains, plan_of, planned
from .problem import Limits, PlanInput, Wish, waf_of
from .problem_of_state import plan_input
from .solver.candidates import Found, Rows
from .solver.dynamic_program import IMPOSSIBLE, Others

# --- The price of a task that waits: what it would cost the others, and from which weight it runs.
# ---

WORK_NUM_MAX = 5 << 22
"""Candidates times slots, as `prices` counts them: about a tenth of a second, and 100 MB."""
_SLOTS_NUM, _SIZES_NUM = 1 << 12, 4
"""What a candidate takes beside its slots, in slots; what a row's memory takes, in candidates."""
VECTORS_NUM_MAX = 1 << 13
"""Tasks that are told a price times all tasks: half as long again."""

LIMITED_WORK_NUM_MAX = 1 << 24
"""States times candidates of all searches under limits that prices may take: some 30 ms."""
CANDIDATE_NUM = 8192
"""States that take as long as all else that a search does with a candidate."""


class Price(Struct, frozen=True, kw_only=True):
    """Of one task without slots, beside the plan that was chosen."""

    cost_waf: float
    """What all would earn less if it ran, at least 0."""
    times: float
    """At more than so many times its weight the next plan gives it slots; it may be below 1."""
    plan: Plan
    """The best plan in which it runs."""


def prices(asked: PlanInput, plan: Plan) -> dict[int, Price]:
    """By task: the price of each that `plan` gives nothing, where its smallest size would fit.

    It is the price once the plan is carried out, when every task is healthy on what it was given:
    then `choose` gives the task slots if its weight is more than `times` what it is, and none if
    it is less, all else equal. That counts `gain_min`: it is part of what a change costs.
    O(num_slots) for each size of each task: none where that is more than WORK_NUM_MAX; and where
    very many wait, only the first of them, by VECTORS_NUM_MAX; under limits those for which
    LIMITED_WORK_NUM_MAX is enough. None under floors or alpha, where priorities differ, nor where a
    hot spare may be kept: there no single weight says it.
    """
    if not has_prices(asked) or _is_too_large(asked):
        return {}
    after = tuple(replace(wish, now=slots, hurt=False)
                  for wish, slots in zip(asked.wishes, plan.slots, strict=True))
    num_slots, rows = asked.num_slots, gains(replace(asked, wishes=after))
    pairs = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    options = {i: sizes for i, (begin, end) in enumerate(pairwise(rows.starts.tolist()))
               if plan.slots[i] == 0
               and (sizes := [x for x in pairs[begin:end] if 0 < x[0] <= num_slots and x[1] > 0])}
    if not options:
        return {}
    if asked.limits is not None:
        return _limited(replace(asked, wishes=after), rows, plan, options)
    options = dict(islice(options.items(), VECTORS_NUM_MAX // rows.num))
    free = Others(rows, num_slots)
    found: dict[int, Price] = {}
    for i, sizes in options.items():
        best: list[tuple[int, int, int]] = []
        for size, gain in sizes:
            value, at = free.without(i, num_slots - size)
            best.append((value + gain, size, at))
        value, size, at = max(best)
        runs = plan_of(after, (free.vector(i, size, num_slots - size, at), value))
        found[asked.wishes[i].task] = Price(
            cost_waf=max(plan.waf - runs.waf, 0.0), plan=runs,
            times=_times(sizes, num_slots, free.beside(i)))
    return found


def has_prices(asked: PlanInput) -> bool:
    """Whether a single weight says from when on a waiting task runs."""
    return not asked.spare_slots and constraints.is_plain(asked) and not (
        asked.limits is not None and asked.limits.priorities)


def is_too_much(asked: PlanInput) -> bool:
    """Whether `prices` leaves out tasks because all would take too long."""
    if not has_prices(asked):
        return False
    num = len(asked.wishes)
    work = 0 if asked.limits is None else limited_work(asked) * sum(
        len(wish.sizes) + 1 for wish in asked.wishes if not wish.now)
    return (_is_too_large(asked) or num > VECTORS_NUM_MAX // max(num, 1)
            or work > LIMITED_WORK_NUM_MAX)


def _is_too_large(asked: PlanInput) -> bool:
    """Whether not even one price is computed."""
    num_sizes = sum(len(wish.sizes) + 1 for wish in asked.wishes)
    return (num_sizes * (asked.num_slots + _SLOTS_NUM)
            + _SIZES_NUM * len(asked.wishes) * asked.num_slots) > WORK_NUM_MAX


def _limited(after: PlanInput, rows: Rows, plan: Plan,
             options: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, Price]:
    """The same under limits: the best of all others beside each size, by a search for each.

    None of a task that no weight lets run.
    """
    limits, left, found = after.limits, LIMITED_WORK_NUM_MAX, dict[int, Price]()
    assert limits is not None
    for i, sizes in options.items():
        left -= (len(sizes) + 1) * limited_work(after)
        if left < 0:
            break
        free = _beside(rows, i, sizes, after.num_slots, limits)
        runs = [(one[1], one[0]) for size, _ in sizes if (one := free[size]) is not None]
        if not runs:
            continue
        value, slots = max(runs)
        best, num = plan_of(after.wishes, (slots, value)), after.num_slots
        gain_of = {0: 0, **dict(sizes)}
        rest = {num - size: one[1] - gain_of[size] if one is not None else IMPOSSIBLE
                for size, one in free.items()}
        found[after.wishes[i].task] = Price(
            cost_waf=max(plan.waf - best.waf, 0.0), plan=best,
            times=_times(sizes, num, rest.__getitem__))
    return found


def _beside(rows: Rows, row: int, sizes: Sequence[tuple[int, int]], num_slots: int,
            limits: Limits) -> dict[int, Found | None]:
    """By size of a row, 0 too: the best plan that gives it so many."""
    return {size: constraints.within(
        rows.only((rows.row_of != row) | (rows.sizes == size)), num_slots, limits)
        for size in (0, *(size for size, _ in sizes))}


def limited_work(asked: PlanInput) -> int:
    """States times candidates of one search under limits, with what a candidate costs besides."""
    num = sum(len(wish.sizes) + 1 for wish in asked.wishes)
    num_moves = min(asked.moves_max or 0, len(asked.wishes)) + 1
    num_priorities = len({wish.priority for wish in asked.wishes})
    return num * (CANDIDATE_NUM + (asked.num_slots + 1) * num_moves * num_priorities)


def _times(sizes: Sequence[tuple[int, int]], num_slots: int, rest: Callable[[int], int]) -> float:
    """From which factor on the gains of `sizes` `choose` gives the task slots. `rest`: the best of
    all others, by the slots that are left for them.

    With factor f the best plan with size x is worth rest(n - x) + f g(x), without it rest(n).
    """
    return min(((rest(num_slots) - value) / gain for size, gain in sizes
                if (value := rest(num_slots - size)) > IMPOSSIBLE // 2), default=float("inf"))


# --- What bars a task that waits: the limit without which the plan would give it slots. ---

NUM_SOLVES = 3
"""That a plan takes under limits."""


class Bar(Struct, frozen=True, kw_only=True):
    """Of one task without slots; all empty where no limit is the cause."""

    why: str = ""
    needs: str = ""
    within: str = ""
    """Free slots would let it run within this alone: its team's quota."""


def barred(asked: PlanInput, slots: Sequence[int], num_idle: int = 0) -> dict[int, Bar]:
    """By task that the plan `slots` gives nothing: what bars it. Empty without limits. `num_idle`:
    slots that are kept idle as a hot spare.

    The plan without any limit is made in any case. Where that would run a task and several limits
    bind the plan, each is lifted by itself; beyond LIMITED_WORK_NUM_MAX all of them are named.
    """
    lifted = _lifted(asked)
    if not lifted:
        return {}
    if num_idle:
        asked = replace(asked, num_slots=asked.num_slots - num_idle, kept_slots=num_idle)
    waits = [i for i, x in enumerate(slots) if x == 0 and asked.wishes[i].sizes]
    if not waits:
        return {}
    without = planned(_without(asked, lifted)).slots
    work = limited_work(asked) * NUM_SOLVES
    most = LIMITED_WORK_NUM_MAX // max(work, 1)
    plans: dict[str, Sequence[int]] = {}
    found: dict[int, Bar] = {}
    for i in waits:
        wish = asked.wishes[i]
        mine = [what for what in lifted if what != "quota" or wish.team in dict(asked.quotas)]
        quota = dict(asked.quotas).get(wish.team)
        if quota is not None and quota < wish.sizes[0]:
            found[wish.task] = Bar(why=_quota(wish.team, quota),
                                   needs=f"a quota of {slots_told(wish.sizes[0])} or more")
        elif not without[i]:
            found[wish.task] = Bar(within=_within(asked, wish, slots))
        else:
            one = _alone(asked, i, mine, plans, most) if len(mine) > 1 else mine
            peers = any(x and other.priority == wish.priority
                        for x, other in zip(slots, asked.wishes, strict=True))
            found[wish.task] = _bar(asked, wish, one or mine or lifted, alone=bool(one),
                                    peers=peers)
    return found


def _lifted(asked: PlanInput) -> list[str]:
    """The kinds of limits that there are."""
    limits = asked.limits
    kinds = {"floor": constraints.are_set(asked)}
    if limits is not None:
        kinds |= {"moves_max": limits.moves_max is not None, "quota": bool(limits.teams),
                  "priority": bool(limits.priorities)}
    return [kind for kind, is_there in kinds.items() if is_there]


def _without(asked: PlanInput, kinds: Sequence[str], team: str = "") -> PlanInput:
    """`team`: whose quota is lifted; empty: of all."""
    if "moves_max" in kinds:
        asked = replace(asked, moves_max=None)
    if "quota" in kinds:
        asked = replace(asked, quotas=tuple(x for x in asked.quotas if team and x[0] != team))
    if "floor" in kinds:
        asked = constraints.without(asked)
    if "priority" in kinds:
        asked = replace(asked, wishes=tuple(replace(wish, priority=0) for wish in asked.wishes))
    return asked


def _alone(asked: PlanInput, row: int, kinds: Sequence[str], plans: dict[str, Sequence[int]],
           most: int) -> list[str]:
    """Kinds each of which bars it by itself: without that one limit the plan runs it.

    `plans`: those made already, of which there are at most `most`.
    """
    found: list[str] = []
    for kind in kinds:
        team = asked.wishes[row].team if kind == "quota" else ""
        key = f"{kind} {team}"
        if key not in plans and len(plans) < most:
            plans[key] = planned(_without(asked, [kind], team)).slots
        if key in plans and plans[key][row]:
            found.append(kind)
    return found


def _bar(asked: PlanInput, wish: Wish, kinds: Sequence[str], *, alone: bool,
         peers: bool) -> Bar:
    """`alone`: each of these limits bars it by itself; else all of them, or one that is not known.

    `peers`: some of its own priority have slots, which a weight may win.
    """
    quota = dict(asked.quotas).get(wish.team)
    said = {"moves_max": (f"moves_max {asked.moves_max}", "a larger moves_max"),
            "quota": (_quota(wish.team, quota) if quota is not None else "quotas of teams",
                      "a larger quota"),
            "floor": ("the floors of others", "smaller floors"),
            "priority": (f"priority {wish.priority}, where others have more",
                         "a higher priority" + " (a higher weight may do)" * peers)}
    whys, needs = [said[kind][0] for kind in kinds], [said[kind][1] for kind in kinds]
    if alone or len(kinds) == 1:
        return Bar(why=f"held back by {', and by '.join(whys)}", needs=", or ".join(needs))
    return Bar(why=f"held back by the limits of the plan: {', '.join(whys)}",
               needs=f"fewer limits: {', '.join(needs)}")


def _quota(team: str, quota: int) -> str:
    return f"the quota of team {team}, {slots_told(quota)}"


def _within(asked: PlanInput, wish: Wish, slots: Sequence[int]) -> str:
    """Its team's quota, where that has no room for it."""
    quota = dict(asked.quotas).get(wish.team)
    used = sum(x for x, one in zip(slots, asked.wishes, strict=True) if one.team == wish.team)
    return _quota(wish.team, quota) if quota is not None and used + wish.sizes[0] > quota else ""

NOT_CHOSEN = "the plan gives it no slots"
"""What the log says of a task for which there would be slots."""
NOT_PRICED = "; the weight is not computed: too many tasks and sizes"
_SHOWN = Context(prec=3, rounding=ROUND_CEILING)


class Waits(Struct, frozen=True, kw_only=True):
    """Why one task has no slots, computed from the state."""

    why: str
    needs: str
    cost_waf: float = 0.0
    """What the other tasks would earn less if it ran, beyond what it earns itself."""
    weight_from: float = 0.0
    """From this weight on the plan gives it slots; 0: slots are missing, or it is not known."""


def wait(state: ClusterState, task: Task, num_slots: int, floor: int = 0, *,
         by_quota: bool = False) -> Iterator[Body]:
    """Record that the plan gives a task nothing; nothing if the log says so already.

    `num_slots`: what the plan had to give. `floor`: of a task that asks for one, and for which
    there was no room; `by_quota`: there would be if its team had no quota.
    """
    why = _missing(state, task, num_slots, floor, by_quota=by_quota)[0] or NOT_CHOSEN
    if task.why != why:
        yield TaskWaiting(task=task.id, why=why)


def wait_for_healing(state: ClusterState, task: Task) -> Iterator[Body]:
    """The plan has slots for the task, but nothing is ordered at the moment."""
    if task.why != state.held:
        yield TaskWaiting(task=task.id, why=state.held)


def explained(state: ClusterState) -> dict[int, Waits]:
    """By task that waits: why, what would let it run, and what that would cost the others.

    This compares the plan in force with other plans of the present input. It takes as long as a
    few plans; `pricing` and `barring` say what is left out where there are too many tasks.
    """
    if not is_any_waiting(state) or state.plan is None:
        return {}
    ground = plan_input(state)
    asked, given = ground.asked, {x.task: x.slots for x in state.plan.allocations}
    slots = tuple(given.get(wish.task, wish.now) for wish in asked.wishes)
    plan = Plan(slots=slots, objective=0, waf=fsum(
        waf_of(wish, x) for wish, x in zip(asked.wishes, slots, strict=True)))
    short = constraints.short(asked, slots)
    by_quota = constraints.barred_by_quota(asked, short)
    is_spare = state.plan.binding == "spare"
    bars = barred(asked, slots, min(asked.spare_slots, asked.num_slots) * is_spare)
    price_of = prices(asked, plan)
    spared = planned(replace(asked, spare_slots=0)).slots if is_spare else slots
    found: dict[int, Waits] = {}
    for wish, x, without in zip(asked.wishes, slots, spared, strict=True):
        task = state.tasks[wish.task]
        if wish.task not in given or not is_waiting(task):
            continue
        if x:
            if state.held:  # else its seats follow at once
                found[task.id] = Waits(why=state.held, needs="healing to be on")
            continue
        why, needs = _missing(state, task, len(ground.slots), short.get(task.id, 0),
                              by_quota=task.id in by_quota)
        if why:
            found[task.id] = Waits(why=why, needs=needs)
        elif without:
            found[task.id] = Waits(why="its slots are kept idle as a hot spare",
                                   needs="more slots, or a policy without hot_spare")
        else:
            found[task.id] = _not_chosen(state, asked, task, slots, price_of.get(task.id),
                                         bars.get(task.id, Bar()))
    return found


def is_any_waiting(state: ClusterState) -> bool:
    """Whether `explained` has anything to explain."""
    return state.plan is not None and any(is_waiting(task) for task in live_tasks(state))


def is_waiting(task: Task) -> bool:
    """Whether a plan has left the task without seats."""
    return not task.target and not task.ending and task.phase != "ended"


def _missing(state: ClusterState, task: Task, num_slots: int, floor: int, *,
             by_quota: bool) -> tuple[str, str]:
    """Why the task could not run whatever the plan prefers, and what it needs; empty if it could.
    """
    low = _smallest(task)
    if low > state.num_slots_max:
        return "too large", f"{slots_told(low)}; the cluster has had at most {state.num_slots_max}"
    if task.modelled is not None and task.modelled.refused and not any(
            task.throughput.rates_flops if task.throughput is not None else ()):
        return task.modelled.refused, "a larger slots.max, or a smaller model"
    if task.throughput is not None and not any(task.throughput.rates_flops):
        return "its throughput is 0 for every size", "a declared throughput above 0"
    if 0 < floor <= num_slots:
        return _no_room(state, task, floor, by_quota=by_quota)
    if low <= num_slots:
        return "", ""
    num_out = sum(node.is_out(index) for node in state.nodes.values()
                  for index in range(node.num_slots))
    away = [f"{num_out} out"] if num_out else []
    drained = [name for name in sorted(state.nodes) if state.nodes[name].drained]
    away += [f"{' '.join(drained)} drained"] if drained else []
    kept = [name for name in sorted(state.nodes) if state.nodes[name].quarantine is not None]
    away += [f"{' '.join(kept)} quarantined"] if kept else []
    out = f" ({', '.join(away)}: unicron status nodes)" if away else ""
    return "not enough slots", f"{slots_told(low)}; there are {num_slots}{out}"


def _not_chosen(state: ClusterState, asked: PlanInput, task: Task, slots: Sequence[int],
                price: Price | None, bar: Bar) -> Waits:
    """Why the plan gives its slots to others, and what would let the task run."""
    why, needs = bar.why, bar.needs
    if not why:
        why = ("the plan has better use for the slots" if price is None
               else _who_earns_more(state, asked, slots, price))
        # How many is not known: of more slots, others may be given the first.
        needs = f"more slots within {bar.within}" if bar.within else "more slots"
        needs += ", or more weight" * state.policy.hot_spare  # which has no prices
    if price is None:
        return Waits(why=why, needs=needs + NOT_PRICED * is_too_much(asked))
    weight = _weight_from(task, price)
    if weight:
        needs += f", or weight {_SHOWN.create_decimal(Decimal(weight)).normalize():f}"
    return Waits(why=why, needs=needs, cost_waf=price.cost_waf, weight_from=weight)


def _weight_from(task: Task, price: Price) -> float:
    """The weight above which it runs, 0 where there is none that a task may have."""
    weight = task.weight * price.times
    return weight if weight <= WEIGHT_RATIO_MAX else 0.0


def _no_room(state: ClusterState, task: Task, floor: int, *, by_quota: bool) -> tuple[str, str]:
    """Why it is not given its floor, and what would give it that."""
    team = task.spec.team
    quota = state.policy.quotas.get(team, floor)
    if quota < floor:
        return (f"the quota of team {team} is {slots_told(quota)}",
                f"a quota of {slots_told(floor)}, its floor")
    first = "or a higher priority (a higher weight may do)"  # it goes first of its priority alone
    if by_quota:
        return (f"its floor does not fit the quota of team {team}, {slots_told(quota)}, beside "
                "those before it", f"a larger quota, {first}")
    more = "more slots (and maybe a larger quota)" if team in state.policy.quotas else "more slots"
    return "there is no room for its floor beside those before it", f"{more}, {first}"


def _smallest(task: Task) -> int:
    """The fewest slots that it may have and earns something with."""
    table = task.throughput
    pairs = zip(table.sizes, table.rates_flops, strict=True) if table is not None else ()
    return min((size for size, rate in pairs if rate > 0), default=task.spec.slots.min)


def _who_earns_more(state: ClusterState, asked: PlanInput, slots: Sequence[int],
                    price: Price) -> str:
    """Which tasks hold the slots that it would run on."""
    names = [wish.name for wish, x, then in
             zip(asked.wishes, slots, price.plan.slots, strict=True) if then < x]
    if not names:
        return "the plan has better use for the slots"
    if price.cost_waf == 0.0:
        return (f"{', '.join(names)}: changed only for {100 * state.policy.gain_min:g} % "
                "of the WAF")
    return f"{', '.join(names)} earn{'s' * (len(names) == 1)} more with the slots"
