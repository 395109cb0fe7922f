"""An allocation rule: slots in proportion to the weights; all else as Unicron."""

from __future__ import annotations

from .baseline import sharing
from .policy import Policy
from .unicron import POLICY as UNICRON

POLICY = Policy(
    what="slots in proportion to the weights, healed in memory",
    heals=True, escalates=True, costs=UNICRON.costs,
    decides=lambda _: sharing(lambda wish: wish.weight))
