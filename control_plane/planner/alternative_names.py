"""Words of plans that screens share with the heart: nothing has to be loaded for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

LIMIT_NAMES = ("moves_max", "quotas", "priorities", "floors")


def without(names: Sequence[str]) -> str:
    """What the best plan is called that keeps none of these limits."""
    return f"without {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"


FLOORLESS = without(("floors",))
LIMITS = {without(some): some for num in (1, 2, 3, 4) for some in combinations(LIMIT_NAMES, num)
          if some != ("floors",)}
UNCHANGED = "keep as it is"
"""The plan in which every task keeps what it has."""
ALPHALESS = "the best by WAF, without alpha"
SPARELESS = "without a hot spare"
OTHERS_WAIT_NUM = -(1 << 53)
"""As an objective of a plan: not to be compared, since other tasks have nothing."""
SHARE_PERCENT_MIN = 0.001
"""A share that is smaller is not told more exactly."""
WHOLE_PERCENT_MIN = 99.5
"""From here on two digits would be told as a power of ten."""
POWER_PERCENT_MIN = 1e9
"""From here on a power of ten is shorter."""


def percent(share: float) -> str:
    """A share of 0.214 as `21 %`: two digits, from 100 on whole ones, in groups of three."""
    found = 100 * share
    if found < SHARE_PERCENT_MIN:
        return f"under {SHARE_PERCENT_MIN:g} %"
    is_whole = WHOLE_PERCENT_MIN <= found < POWER_PERCENT_MIN
    return f"{found:,.0f} %" if is_whole else f"{found:.2g} %"


def slots_told(num: int) -> str:
    return f"{num} slot{'s' * (num != 1)}"
