"""The policies that a simulation compares.

Read `policy` first, then `unicron`, then `others`. A policy supplies `decide`; the fold and the
transitions are the same for all policies. docs/guides/simulate.md says what each one does, and
where its constants are from.
"""

from __future__ import annotations

from . import others, unicron
from .policy import Policy

POLICIES: dict[str, Policy] = {
    "unicron": unicron.POLICY, "shrink": others.SHRINK, "spares": others.SPARES,
    "requeue": others.REQUEUE, "kubernetes": others.KUBERNETES,
    "megatron": others.MEGATRON, "megatron-spares": others.MEGATRON_SPARES,
    "oobleck": others.OOBLECK, "bamboo": others.BAMBOO, "varuna": others.VARUNA,
    "equally": unicron.EQUALLY, "by-weight": unicron.BY_WEIGHT, "by-size": unicron.BY_SIZE}
