"""Allocation rules that replace the planner; detection and healing are Unicron's."""

from __future__ import annotations

from .baseline import sharing
from .policy import Policy
from .unicron import POLICY as UNICRON

EQUALLY = Policy(
    heals=True, escalates=True, costs=UNICRON.costs, decides=lambda _, __: sharing(lambda _: 1.0))
BY_WEIGHT = Policy(
    heals=True, escalates=True, costs=UNICRON.costs,
    decides=lambda _, __: sharing(lambda demand: demand.weight))
BY_SIZE = Policy(
    heals=True, escalates=True, costs=UNICRON.costs, by_params=True,
    decides=lambda _, params: sharing(lambda demand: params[demand.name]))
