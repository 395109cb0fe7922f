"""Names of alternative plans and number formats, shared by the planner and the screens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

LIMIT_NAMES = ("moves_max", "quotas", "priorities", "floors")


def without(names: Sequence[str]) -> str:
    """The name of the best plan without these limits."""
    return f"without {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"


FLOORLESS = without(("floors",))
LIMITS_BY_NAME = {without(some): some
          for num in (1, 2, 3, 4) for some in combinations(LIMIT_NAMES, num) if some != ("floors",)}
UNCHANGED = "keep as it is"
"""The plan in which every task keeps its slots."""
ALPHALESS = "the best by WAF, without alpha"
SPARELESS = "without a hot spare"
NOT_COMPARABLE_NUM = -(1 << 53)
"""Objective of a plan that cannot be compared, since another set of tasks has no slots in it."""


def percent(share: float) -> str:
    """Format 0.214 as `21 %`: two digits below 100 %, else all, and from 1e9 on a power of ten."""
    value = 100 * share
    if value < 0.001:
        return "under 0.001 %"
    return f"{value:,.0f} %" if 99.5 <= value < 1e9 else f"{value:.2g} %"


def slots_in_words(num: int) -> str:
    return f"{num} slot{'s' * (num != 1)}"
