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
SHARE_PERCENT_MIN = 0.001
"""Smaller percentages are printed as "under" this value."""
WHOLE_PERCENT_MIN = 99.5
"""At and above this value `.2g` would print a power of ten."""
POWER_PERCENT_MIN = 1e9
"""At and above this value a power of ten is printed, since it is shorter."""


def percent(share: float) -> str:
    """Format 0.214 as `21 %`: two digits below 100 %, else all digits, grouped by three."""
    value = 100 * share
    if value < SHARE_PERCENT_MIN:
        return f"under {SHARE_PERCENT_MIN:g} %"
    is_whole = WHOLE_PERCENT_MIN <= value < POWER_PERCENT_MIN
    return f"{value:,.0f} %" if is_whole else f"{value:.2g} %"


def slots_in_words(num: int) -> str:
    return f"{num} slot{'s' * (num != 1)}"
