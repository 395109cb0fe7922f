"""The policies that a simulation compares: each a file, with the sources of its constants."""

from __future__ import annotations

from . import (
    bamboo,
    by_size,
    by_weight,
    equally,
    kubernetes,
    megatron,
    megatron_spares,
    oobleck,
    requeue,
    shrink,
    spares,
    unicron,
    varuna,
)
from .policy import Policy

POLICIES: dict[str, Policy] = {
    "unicron": unicron.POLICY, "shrink": shrink.POLICY, "spares": spares.POLICY,
    "requeue": requeue.POLICY, "kubernetes": kubernetes.POLICY, "megatron": megatron.POLICY,
    "megatron-spares": megatron_spares.POLICY, "oobleck": oobleck.POLICY, "bamboo": bamboo.POLICY,
    "varuna": varuna.POLICY, "equally": equally.POLICY, "by-weight": by_weight.POLICY,
    "by-size": by_size.POLICY}
