"""The policies that a simulation compares: each a file, with the sources of its constants."""

from __future__ import annotations

from ..policy import Policy
from . import megatron, requeue, shrink, spares, unicron

POLICIES: dict[str, Policy] = {
    "unicron": unicron.POLICY, "shrink": shrink.POLICY, "spares": spares.POLICY,
    "requeue": requeue.POLICY, "megatron": megatron.POLICY}
