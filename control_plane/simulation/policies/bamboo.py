"""Bamboo: a neighbour computes a lost stage too, until the pipelines are balanced again."""

from __future__ import annotations

from msgspec.structs import replace

from .baseline import following, shrunk
from .policy import Policy
from .resilient import COSTS

POLICY = Policy(
    what="redundant stages take over, then the pipelines are balanced anew",
    heals=True, decides=lambda _: following(shrunk),
    # Rebalances in 450 s. That it is 1.5 x slower until then, and 30 s for what redundancy cannot
    # cover, is left out, in its favour. Speed 0.22 to 0.26, derived: the middle.
    costs=replace(COSTS, regroup_s=450.0, speed=0.24))
