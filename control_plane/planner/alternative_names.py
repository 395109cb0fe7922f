"""Names of alternative plans, why they were not chosen, and number formats."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ...events.words import listed, number_of, scaled

LIMIT_NAMES = ("moves_max", "quotas", "priorities", "floors")


def without(names: Sequence[str]) -> str:
    """The name of the best plan without these limits."""
    return f"without {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"


FLOORLESS = without(("floors",))
LIMITS_BY_NAME = {
    without(some): some
    for num in (1, 2, 3, 4)
    for some in combinations(LIMIT_NAMES, num)
    if some != ("floors",)
}
UNCHANGED = "keep as it is"
"""The plan in which every task keeps its slots."""
ALPHALESS = "the best by WAF, without alpha"
SPARELESS = "without a hot spare"
NOT_COMPARABLE_NUM = -(1 << 53)
"""Objective of a plan that cannot be compared, since another set of tasks has no slots in it."""

BREAKS = {
    FLOORLESS: ", and leaves a task below its floor",
    SPARELESS: " until the next fault",
    "without priorities": ", and a higher priority comes first",
    **{
        what: f", and breaks {'it' if len(some) == 1 else 'one of them'}"
        for what, some in LIMITS_BY_NAME.items()
        if some != ("priorities",)
    },
}
"""Why an alternative with a higher value was excluded."""
TIE_RATIO = 1e-4
"""Two plans whose WAF differs by less are printed as equal."""


def percent(share: float) -> str:
    """Format 0.214 as `21 %`: two digits below 100 %, else all, and from 1e9 on a power of ten."""
    value = 100 * share
    if value < 0.001:
        return "under 0.001 %"
    return f"{value:,.0f} %" if 99.5 <= value < 1e9 else f"{value:.2g} %"


def slots_in_words(num: int) -> str:
    return f"{num} slot{'s' * (num != 1)}"


def bound_by(plan: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """The binding constraint of a plan (PlanChosen); empty if the log does not have it."""
    of = listed([names.get(task, f"task {task}") for task in plan.get("bound_tasks", ())])
    return {
        "slots": number_of(plan["num_slots"], "slot"),
        "max": f"the max of {of}",
        "min": f"the min of {of}",
        "gain_min": "gain_min",
        "nothing": "nothing",
        "limits": _limits(plan),
        "floor": f"the floor of {of}",
        "spare": "the hot spare",
    }.get(plan.get("bound", ""), "")


def _limits(plan: Mapping[str, Any]) -> str:
    """The limits that bind: those that the first such alternative breaks, else any."""
    some = next(
        (
            LIMITS_BY_NAME[other["what"]]
            for other in plan.get("alternatives", ())
            if other["what"] in LIMITS_BY_NAME
        ),
        ("moves_max", "quotas", "priorities"),
    )
    return f"{', '.join(some[:-1])}{' or ' * (len(some) > 1)}{some[-1]}"


def not_taken(plan: Mapping[str, Any], what: str, gain_min: str = ", below gain_min") -> str:
    """Why an alternative with a higher value is not the plan."""
    if what not in BREAKS and plan.get("bound") == "limits":
        return BREAKS["without priorities"]
    return BREAKS.get(what, gain_min)


def hidden(waf: float, chosen: float) -> str:
    """`, 0.3 % less`: the difference of an alternative's WAF, if both print as the same number."""
    if scaled(waf, "") != scaled(chosen, "") or math.isclose(waf, chosen, rel_tol=TIE_RATIO):
        return ""
    return f", {100 * abs(waf / chosen - 1):.1g} % {'less' if waf < chosen else 'more'}"
