"""Megatron with hot spares: a job restarts as a whole, on an idle node where one is left."""

from __future__ import annotations

from msgspec.structs import replace

from .baseline import following, moved
from .megatron import COSTS
from .policy import Policy

POLICY = Policy(
    what="a spare node takes over; the job restarts from the checkpoint",
    heals=False, decides=lambda run: following(moved, run.costs.num_spares),
    # As Megatron's; who has its node already need not queue, but sets up and computes as much.
    costs=replace(COSTS, start_s=840.0, num_spares=1))
