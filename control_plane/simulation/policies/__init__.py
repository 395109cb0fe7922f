"""The policies that a simulation compares.

Read `policy` first, then `unicron`, then the others. A policy supplies `decide`; the fold and the
transitions are the same for all policies. docs/guides/simulate.md says what each one does, and
where its constants are from.
"""

from __future__ import annotations

from . import allocation_rules, elastic, restarting, unicron
from .policy import Policy

POLICIES: dict[str, Policy] = {
    "unicron": unicron.POLICY, "shrink": elastic.SHRINK, "spares": restarting.SPARES,
    "requeue": restarting.REQUEUE, "kubernetes": restarting.KUBERNETES,
    "megatron": restarting.MEGATRON, "megatron-spares": restarting.MEGATRON_SPARES,
    "oobleck": elastic.OOBLECK, "bamboo": elastic.BAMBOO, "varuna": elastic.VARUNA,
    "equally": allocation_rules.EQUALLY, "by-weight": allocation_rules.BY_WEIGHT,
    "by-size": allocation_rules.BY_SIZE}
