"""An allocation rule: the same number of slots to each task; all else as Unicron."""

from __future__ import annotations

from .baseline import sharing
from .policy import Policy
from .unicron import POLICY as UNICRON

POLICY = Policy(
    what="the same number of slots to each task, healed in memory",
    heals=True, escalates=True, decides=lambda _: sharing(lambda _: 1.0), costs=UNICRON.costs)
