"""Why a task waits, and what would let it run."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, Context, Decimal

from ..events.orders import TaskWaiting
from ..events.reports import Body
from ..events.spec import WEIGHT_RATIO_MAX
from .barring import Bar
from .plan_words import SPARELESS, slots_told
from .pricing import Price
from .state import ClusterState, Task

_SHOWN = Context(prec=3, rounding=ROUND_CEILING)


def wait(state: ClusterState, task: Task, num_slots: int, price: Price | None,
         floor: int = 0, bar: Bar | None = None, *, by_quota: bool = False) -> Iterator[Body]:
    """Tell of a task that the last plan gives nothing; nothing if it was told already.

    `num_slots`: what that plan had to give. `floor`: of a task that asks for one, and for which
    there was no room; `by_quota`: there would be if its team had no quota. `bar`: of a plan under
    limits.
    """
    low = _smallest(task)
    cost_waf = weight_from = 0.0
    if low > state.num_slots_max:
        why, needs = "too large", (f"{slots_told(low)}; the cluster has had at most "
                                   f"{state.num_slots_max}")
    elif task.modelled is not None and task.modelled.refused and not any(
            task.throughput.rates_flops if task.throughput is not None else ()):
        why, needs = task.modelled.refused, "a larger slots.max, or a smaller model"
    elif task.throughput is not None and not any(task.throughput.rates_flops):
        why, needs = "its throughput is 0 for every size", "a declared throughput above 0"
    elif 0 < floor <= num_slots:
        why, needs = _no_room(state, task, floor, by_quota=by_quota)
    elif low <= num_slots:
        why, needs = _not_chosen(state, task, price, bar or Bar())
        if price is not None:
            cost_waf, weight_from = price.cost_waf, _weight_from(task, price)
    else:
        num_out = sum(node.is_out(index) for node in state.nodes.values()
                      for index in range(node.num_slots))
        away = [f"{num_out} out"] if num_out else []
        drained = [name for name in sorted(state.nodes) if state.nodes[name].drained]
        away += [f"{' '.join(drained)} drained"] if drained else []
        kept = [name for name in sorted(state.nodes) if state.nodes[name].quarantine is not None]
        away += [f"{' '.join(kept)} quarantined"] if kept else []
        out = f" ({', '.join(away)}: unicron status nodes)" if away else ""
        why, needs = "not enough slots", f"{slots_told(low)}; there are {num_slots}{out}"
    if (task.why, task.needs, task.cost_waf, task.weight_from) != (
            why, needs, cost_waf, weight_from):
        yield TaskWaiting(task=task.id, why=why, needs=needs, cost_waf=cost_waf,
                          weight_from=weight_from)


def _not_chosen(state: ClusterState, task: Task, price: Price | None, bar: Bar) -> tuple[str, str]:
    """Why the plan gives its slots to others, and what would let the task run."""
    if _is_spared(state, task):
        return "its slots are kept idle as a hot spare", "more slots, or a policy without hot_spare"
    why, needs = bar.why, bar.needs
    if not why:
        why = ("the plan has better use for the slots" if price is None
               else _who_earns_more(state, price))
        # How many is not known: of more slots, others may be given the first.
        needs = f"more slots within {bar.within}" if bar.within else "more slots"
        needs += ", or more weight" * state.policy.hot_spare  # which has no prices
    if price is not None and (weight := _weight_from(task, price)):
        needs += f", or weight {_SHOWN.create_decimal(Decimal(weight)).normalize():f}"
    return why, needs


def _is_spared(state: ClusterState, task: Task) -> bool:
    """Whether it would run on the slots that are kept idle."""
    plan = state.plan
    return plan is not None and plan.spare is not None and plan.spare.verdict == "kept" and any(
        (task.id, 0) not in other.slots for other in plan.alternatives if other.what == SPARELESS)


def _weight_from(task: Task, price: Price) -> float:
    """The weight above which it runs, 0 where there is none that a task may have."""
    weight = task.weight * price.times
    return weight if weight <= WEIGHT_RATIO_MAX else 0.0


def wait_for_healing(state: ClusterState, task: Task) -> Iterator[Body]:
    """The last plan has slots for it, and nothing is ordered at the moment."""
    if task.why != state.held:
        yield TaskWaiting(task=task.id, why=state.held, needs="healing to be on")


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


def _who_earns_more(state: ClusterState, price: Price) -> str:
    """Which tasks hold the slots that it would run on."""
    assert state.plan is not None
    pairs = zip(state.plan.allocations, price.plan.slots, strict=True)
    names = [state.tasks[x.task].spec.name for x, slots in pairs if slots < x.slots]
    if not names:
        return "the plan has better use for the slots"
    if price.cost_waf == 0.0:
        return (f"{', '.join(names)}: changed only for {100 * state.policy.gain_min:g} % "
                "of the WAF")
    return f"{', '.join(names)} earn{'s' * (len(names) == 1)} more with the slots"
