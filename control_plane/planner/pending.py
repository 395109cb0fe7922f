"""Explains waiting tasks: the reason, the blocking limit, and the weight that would run them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from functools import partial
from itertools import pairwise
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from ...events.records.decisions import TaskWaiting
from ...events.records.order_format import needed_format
from ...events.records.types import Body
from ...events.spec.job import WEIGHT_RATIO_MAX
from ..state.cluster import ClusterState, live_tasks
from ..state.task import Task
from . import constraints
from .alternative_names import slots_in_words
from .planner import Plan, allowed_candidates, plan_of, solve
from .problem import PlanProblem, TaskDemand, waf_of
from .problem_of_state import PlanningSnapshot, planning_snapshot
from .solver import knapsack
from .solver.candidates import IMPOSSIBLE

# --- Price of a waiting task: what the others would lose, and the weight from which it runs ---

LIMITED_WORK_NUM_MAX = 1 << 24
"""Limit of states times candidates, summed over all searches under limits: about 30 ms."""
SOLVES_WORK_NUM_MAX = 1 << 17
"""Limit of candidates of `prices`, summed over its solves, one for each size of a waiting task:
up to 0.6 s where all candidates tie."""
_ROW_NUM = 1 << 10
"""Fixed cost of a solve, in candidates."""
CANDIDATE_NUM = 8192
"""Fixed cost of a candidate in a search, in states."""


class Price(Struct, frozen=True, kw_only=True):
    """The price of running one task to which the chosen plan gives no slots."""

    cost_waf: float
    """The total WAF that would be lost if the task ran, at least 0."""
    times: float
    """Above this multiple of its weight the next plan gives the task slots. May be below 1."""
    plan: Plan
    """The best plan in which the task runs."""


def prices(problem: PlanProblem, plan: Plan) -> dict[int, Price]:
    """The price of each task to which `plan` gives no slots, if one of its sizes fits; by task.

    It holds once the plan is carried out and every task is healthy: then `choose_plan` gives the
    task slots from `times` its present weight on. Hysteresis (`gain_min`) is a cost of change.

    If there are too many, the first tasks are priced. There are no prices under floors, alpha,
    different priorities or a possible hot spare: no single weight decides there. A task that no
    weight can run has no price.
    """
    if not has_prices(problem):
        return {}
    after = replace(
        problem,
        demands=tuple(
            replace(demand, now=slots, faulted=False)
            for demand, slots in zip(problem.demands, plan.slots, strict=True)
        ),
    )
    num, rows, limits = problem.num_slots, allowed_candidates(after), after.limits
    solve_rows = (
        knapsack.best if limits is None else partial(constraints.within_limits, limits=limits)
    )
    (work, left), found = _price_work(after), dict[int, Price]()
    for i, (begin, end) in enumerate(pairwise(rows.starts.tolist())):
        gain_of = {
            0: 0,
            **{
                size: gain
                for size, gain in zip(
                    rows.sizes[begin:end].tolist(), rows.gains[begin:end].tolist(), strict=True
                )
                if 0 < size <= num and gain > 0
            },
        }
        if plan.slots[i] or len(gain_of) == 1:
            continue
        left -= len(gain_of) * work
        if left < 0:
            break
        # By size of the row, 0 included: the best plan in which the row has that size.
        free = {
            size: solve_rows(rows.only((rows.row_of != i) | (rows.sizes == size)), num)
            for size in gain_of
        }
        runs = [(one[1], size, one[0]) for size, one in free.items() if size and one is not None]
        if not runs:
            continue
        value, _, slots = max(runs)
        best = plan_of(after.demands, (slots, value))
        rest = {
            num - size: one[1] - gain_of[size] if one is not None else IMPOSSIBLE
            for size, one in free.items()
        }
        found[problem.demands[i].task] = Price(
            cost_waf=max(plan.waf - best.waf, 0.0),
            plan=best,
            times=_times(list(gain_of.items())[1:], num, rest.__getitem__),
        )
    return found


def _price_work(problem: PlanProblem) -> tuple[int, int]:
    """(the work of one solve, its limit over all of them)."""
    if problem.limits is not None:
        return work_under_limits(problem), LIMITED_WORK_NUM_MAX
    return (
        _ROW_NUM + sum(len(demand.sizes) + 1 for demand in problem.demands),
        SOLVES_WORK_NUM_MAX,
    )


def has_prices(problem: PlanProblem) -> bool:
    """True if a single weight decides whether a waiting task runs."""
    return not (problem.spare_slots or problem.alpha or constraints.has_floors(problem)) and not (
        problem.limits is not None and problem.limits.priorities
    )


def exceeds_work_limit(problem: PlanProblem) -> bool:
    """True if `prices` leaves out tasks, since pricing all tasks would take too long."""
    if not has_prices(problem):
        return False
    work, most = _price_work(problem)
    return work * sum(len(demand.sizes) + 1 for demand in problem.demands if not demand.now) > most


def work_under_limits(problem: PlanProblem) -> int:
    """Work of one search under limits: each candidate costs the states and a fixed amount."""
    num = sum(len(demand.sizes) + 1 for demand in problem.demands)
    num_moves = min(problem.moves_max or 0, len(problem.demands)) + 1
    num_priorities = len({demand.priority for demand in problem.demands})
    return num * (CANDIDATE_NUM + (problem.num_slots + 1) * num_moves * num_priorities)


def _times(sizes: Sequence[tuple[int, int]], num_slots: int, rest: Callable[[int], int]) -> float:
    """The lowest factor on the task's gains with which `choose_plan` gives it slots. With factor f
    the objective at size x is rest(n - x) + f g(x). Without the task the objective is rest(n)."""
    return min(
        (
            (rest(num_slots) - value) / gain
            for size, gain in sizes
            if (value := rest(num_slots - size)) > IMPOSSIBLE // 2
        ),
        default=float("inf"),
    )


# --- Blocking constraint of a waiting task: without this limit the plan would give it slots ---

NUM_SOLVES = 3
"""The number of solves that one plan under limits takes."""


class Blocker(Struct, frozen=True, kw_only=True):
    """The limit that blocks one task without slots. All fields are empty if no limit blocks it."""

    why: str = ""
    needs: str = ""
    within: str = ""
    """The quota of its team, if more slots would help the task only within this quota."""


def blocking_constraints(
    problem: PlanProblem, slots: Sequence[int], num_idle: int = 0
) -> dict[int, Blocker]:
    """The limit that blocks each task without slots in the plan `slots`, by task; empty without
    limits. `num_idle`: slots of a hot spare. Limits are removed together, then each on its own;
    beyond LIMITED_WORK_NUM_MAX all are named instead."""
    kinds = constraints.kinds_of_limits(problem)
    if not kinds:
        return {}
    if num_idle:
        problem = replace(problem, num_slots=problem.num_slots - num_idle, kept_slots=num_idle)
    waits = [i for i, x in enumerate(slots) if x == 0 and problem.demands[i].sizes]
    if not waits:
        return {}
    without = solve(constraints.without_limits(problem, kinds)).slots
    work = work_under_limits(problem) * NUM_SOLVES
    most = LIMITED_WORK_NUM_MAX // max(work, 1)
    plans: dict[str, Sequence[int]] = {}
    found: dict[int, Blocker] = {}
    for i in waits:
        demand = problem.demands[i]
        mine = [what for what in kinds if what != "quota" or demand.team in dict(problem.quotas)]
        quota = dict(problem.quotas).get(demand.team)
        if quota is not None and quota < demand.sizes[0]:
            found[demand.task] = Blocker(
                why=_quota(demand.team, quota),
                needs=f"a quota of {slots_in_words(demand.sizes[0])} or more",
            )
        elif not without[i]:
            found[demand.task] = Blocker(within=_within(problem, demand, slots))
        else:
            one = _alone(problem, i, mine, plans, most) if len(mine) > 1 else mine
            peers = any(
                x and other.priority == demand.priority
                for x, other in zip(slots, problem.demands, strict=True)
            )
            found[demand.task] = _bar(
                problem, demand, one or mine or kinds, alone=bool(one), peers=peers
            )
    return found


def _alone(
    problem: PlanProblem, row: int, kinds: Sequence[str], plans: dict[str, Sequence[int]], most: int
) -> list[str]:
    """The limits without each of which a plan runs the task. `plans`: at most `most` such plans."""
    found: list[str] = []
    for kind in kinds:
        team = problem.demands[row].team if kind == "quota" else ""
        key = f"{kind} {team}"
        if key not in plans and len(plans) < most:
            plans[key] = solve(constraints.without_limits(problem, [kind], team)).slots
        if key in plans and plans[key][row]:
            found.append(kind)
    return found


def _bar(
    problem: PlanProblem, demand: TaskDemand, kinds: Sequence[str], *, alone: bool, peers: bool
) -> Blocker:
    """`alone`: each limit in `kinds` blocks the task alone. Else all together do, or it is unknown
    which. `peers`: tasks of its priority have slots that a higher weight may win."""
    quota = dict(problem.quotas).get(demand.team)
    words = {
        "moves_max": (f"moves_max {problem.moves_max}", "a larger moves_max"),
        "quota": (
            _quota(demand.team, quota) if quota is not None else "quotas of teams",
            "a larger quota",
        ),
        "floor": ("the floors of others", "smaller floors"),
        "priority": (
            f"priority {demand.priority}, where others have more",
            "a higher priority" + " (a higher weight may do)" * peers,
        ),
    }
    whys, needs = [words[kind][0] for kind in kinds], [words[kind][1] for kind in kinds]
    if alone or len(kinds) == 1:
        return Blocker(why=f"blocked by {', and by '.join(whys)}", needs=", or ".join(needs))
    return Blocker(
        why=f"blocked by the limits of the plan: {', '.join(whys)}",
        needs=f"fewer limits: {', '.join(needs)}",
    )


def _quota(team: str, quota: int) -> str:
    return f"the quota of team {team}, {slots_in_words(quota)}"


def _within(problem: PlanProblem, demand: TaskDemand, slots: Sequence[int]) -> str:
    """The quota of the task's team if the task does not fit into it, else empty."""
    quota = dict(problem.quotas).get(demand.team)
    used = sum(x for x, one in zip(slots, problem.demands, strict=True) if one.team == demand.team)
    if quota is None or used + demand.sizes[0] <= quota:
        return ""
    return _quota(demand.team, quota)


# --- Reasons, in the log and on request ---

NOT_CHOSEN = "the plan gives it no slots"
"""The reason in the log if the task would have enough slots in another plan."""
NOT_PRICED = "; the weight is not computed: too many tasks and sizes"
NAMES_NUM_MAX = 8
"""Nodes that a reason names."""
_SHOWN = Context(prec=3, rounding=ROUND_CEILING)


class WaitExplanation(Struct, frozen=True, kw_only=True):
    """Why one task has no slots, and what it needs. It is computed from the state."""

    why: str
    needs: str
    cost_waf: float = 0.0
    """The total WAF that would be lost if the task ran."""
    weight_from: float = 0.0
    """The weight from which the plan gives the task slots; 0: too few slots, or not known."""


def record_waiting(
    state: ClusterState,
    task: Task,
    snapshot: PlanningSnapshot,
    floor: int = 0,
    *,
    by_quota: bool = False,
) -> Iterator[Body]:
    """Record that the plan gives a task no slots.
    `floor`: a floor that is not granted. `by_quota`: only the quota of its team prevents it."""
    why = _missing(state, task, snapshot, floor, by_quota=by_quota)[0] or NOT_CHOSEN
    yield from record_reason(task, why)


def record_reason(task: Task, why: str) -> Iterator[Body]:
    """Record why a task waits, unless the log already has this reason."""
    if task.why != why:
        yield TaskWaiting(task=task.id, why=why)


def explain_waiting(state: ClusterState) -> dict[int, WaitExplanation]:
    """By waiting task: the reason, its needs, what others would lose. Takes a few plans' time."""
    if not is_any_waiting(state) or state.plan is None:
        return {}
    snapshot = planning_snapshot(state)
    problem, given = snapshot.problem, {x.task: x.slots for x in state.plan.allocations}
    slots = tuple(given.get(demand.task, demand.now) for demand in problem.demands)
    plan = Plan(
        slots=slots,
        objective=0,
        waf=fsum(waf_of(demand, x) for demand, x in zip(problem.demands, slots, strict=True)),
    )
    short = constraints.below_floor(problem, slots)
    by_quota = constraints.blocked_by_quota(problem, short)
    is_spare = state.plan.binding == "spare"
    num_idle = min(problem.spare_slots, problem.num_slots) * is_spare
    bars = blocking_constraints(problem, slots, num_idle)
    price_of = prices(problem, plan)
    spared = solve(replace(problem, spare_slots=0)).slots if is_spare else slots
    found: dict[int, WaitExplanation] = {}
    for demand, x, without in zip(problem.demands, slots, spared, strict=True):
        task = state.tasks[demand.task]
        if demand.task not in given or not is_waiting(task):
            continue
        if x:
            if state.starts_held:  # else TaskPlaced follows in the same batch
                needs = "healing to be on" if state.held else "room on the disk of the log"
                found[task.id] = WaitExplanation(why=state.starts_held, needs=needs)
            continue
        why, needs = _missing(
            state, task, snapshot, short.get(task.id, 0), by_quota=task.id in by_quota
        )
        if why:
            found[task.id] = WaitExplanation(why=why, needs=needs)
        elif without:
            found[task.id] = WaitExplanation(
                why="its slots are kept idle as a hot spare",
                needs="more slots, or a policy without hot_spare",
            )
        else:
            found[task.id] = _not_chosen(
                state, problem, task, slots, price_of.get(task.id), bars.get(task.id, Blocker())
            )
    return found


def is_any_waiting(state: ClusterState) -> bool:
    """True if `explain_waiting` has any task to explain."""
    return state.plan is not None and any(is_waiting(task) for task in live_tasks(state))


def is_waiting(task: Task) -> bool:
    """True if the task has no seats and is not ending."""
    return not task.target and not task.ending and task.phase != "ended"


def _missing(
    state: ClusterState, task: Task, snapshot: PlanningSnapshot, floor: int, *, by_quota: bool
) -> tuple[str, str]:
    """(why no plan can run the task, what the task needs); both empty if a plan could run it."""
    low, num_slots = task.smallest_size, len(snapshot.slots)
    if low > state.num_slots_max:
        return (
            "too large",
            f"{slots_in_words(low)}; the cluster has had at most {state.num_slots_max}",
        )
    if (
        task.modelled is not None
        and task.modelled.refused
        and not any(task.throughput.rates_flops if task.throughput is not None else ())
    ):
        return task.modelled.refused, "a larger slots.max, or a smaller model"
    if task.throughput is not None and not any(task.throughput.rates_flops):
        return "its throughput is 0 for every size", "a declared throughput above 0"
    if snapshot.most.get(task.id, num_slots) < low <= num_slots:
        return _barred(state, task, snapshot)
    if 0 < floor <= num_slots:
        return _no_room(state, task, floor, by_quota=by_quota)
    if low <= num_slots:
        return "", ""
    num_out = sum(
        node.is_disabled(index) for node in state.nodes.values() for index in range(node.num_slots)
    )
    away = [f"{num_out} out"] if num_out else []
    drained = [name for name in sorted(state.nodes) if state.nodes[name].drained]
    away += [f"{' '.join(drained)} drained"] if drained else []
    kept = [name for name in sorted(state.nodes) if state.nodes[name].quarantine is not None]
    away += [f"{' '.join(kept)} quarantined"] if kept else []
    out = f" ({', '.join(away)}: unicron status nodes)" if away else ""
    return "not enough slots", f"{slots_in_words(low)}; there are {num_slots}{out}"


def _barred(state: ClusterState, task: Task, snapshot: PlanningSnapshot) -> tuple[str, str]:
    """(why the task may not have enough of the slots, what it needs)."""
    barred = snapshot.barred[task.id]
    if barred.unread and not barred.fails:
        return _unread(state, task, barred.unread)
    return (
        "its own processes fail, so it takes no slot from another task",
        f"{slots_in_words(task.smallest_size)} that no other task has; "
        f"free for it are {snapshot.most[task.id]}",
    )


def _unread(state: ClusterState, task: Task, nodes: Collection[str]) -> tuple[str, str]:
    """(which agents cannot read the task's orders, what the task needs)."""
    names = sorted(name for name in nodes if state.nodes[name].takes_tasks)
    one, known = len(names) == 1, {state.nodes[name].order_format for name in names}
    shown = " ".join(names[:NAMES_NUM_MAX]) + f" and {len(names) - NAMES_NUM_MAX} more" * (
        len(names) > NAMES_NUM_MAX
    )
    return (
        f"the agent{'s' * (not one)} of {shown} read{'s' * one} order format "
        f"{' '.join(map(str, sorted(known)))}, and this job needs {needed_format(task.spec)}",
        f"{'a newer agent' if one else 'newer agents'} there, or other nodes with newer agents",
    )


def _not_chosen(
    state: ClusterState,
    problem: PlanProblem,
    task: Task,
    slots: Sequence[int],
    price: Price | None,
    bar: Blocker,
) -> WaitExplanation:
    """Why the plan prefers other tasks, and what the task needs."""
    why, needs = bar.why, bar.needs
    if not why:
        why = (
            "the plan has better use for the slots"
            if price is None
            else _who_earns_more(state, problem, slots, price)
        )
        # How many is not known, since other tasks may get the first additional slots.
        needs = f"more slots within {bar.within}" if bar.within else "more slots"
        needs += ", or more weight" * state.policy.hot_spare  # there are no prices then
    if price is None:
        return WaitExplanation(why=why, needs=needs + NOT_PRICED * exceeds_work_limit(problem))
    weight = task.weight * price.times
    weight = weight if weight <= WEIGHT_RATIO_MAX else 0.0  # else no valid weight runs it
    if weight:
        needs += f", or weight {_SHOWN.create_decimal(Decimal(weight)).normalize():f}"
    return WaitExplanation(why=why, needs=needs, cost_waf=price.cost_waf, weight_from=weight)


def _no_room(state: ClusterState, task: Task, floor: int, *, by_quota: bool) -> tuple[str, str]:
    """(why the task's floor is not granted, what the task needs for it)."""
    team = task.spec.team
    quota = state.policy.quotas.get(team, floor)
    if quota < floor:
        return (
            f"the quota of team {team} is {slots_in_words(quota)}",
            f"a quota of {slots_in_words(floor)}, its floor",
        )
    first = "or a higher priority (a higher weight may do)"  # floors are granted in this order
    if by_quota:
        return (
            f"its floor does not fit the quota of team {team}, {slots_in_words(quota)}, beside "
            "those before it",
            f"a larger quota, {first}",
        )
    more = "more slots (and maybe a larger quota)" if team in state.policy.quotas else "more slots"
    return "there is no room for its floor beside those before it", f"{more}, {first}"


def _who_earns_more(
    state: ClusterState, problem: PlanProblem, slots: Sequence[int], price: Price
) -> str:
    """The tasks whose slots the waiting task would get at its price."""
    names = [
        demand.name
        for demand, x, then in zip(problem.demands, slots, price.plan.slots, strict=True)
        if then < x
    ]
    if not names:
        return "the plan has better use for the slots"
    if price.cost_waf == 0.0:
        return (
            f"{', '.join(names)} keep{'s' * (len(names) == 1)} the slots: a change must gain "
            f"{100 * state.policy.gain_min:g} % of the WAF"
        )
    return f"{', '.join(names)} earn{'s' * (len(names) == 1)} more with the slots"
