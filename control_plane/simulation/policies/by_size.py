"""An allocation rule: slots in proportion to the models' sizes; all else as Unicron."""

from __future__ import annotations

from .baseline import sharing
from .policy import Policy
from .unicron import POLICY as UNICRON

POLICY = Policy(
    what="slots in proportion to the models' sizes, healed in memory",
    heals=True, escalates=True, by_params=True, costs=UNICRON.costs,
    decides=lambda run: sharing(lambda wish: run.params[wish.name]))
