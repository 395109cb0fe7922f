"""What bars a task that waits: the limit without which the plan would give it slots."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from . import floors
from .plan_words import slots_told
from .planner import planned
from .pricing import LIMITED_WORK_NUM_MAX, limited_work
from .wishes import PlanInput, Wish

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
    kinds = {"floor": floors.are_set(asked)}
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
        asked = floors.without(asked)
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
