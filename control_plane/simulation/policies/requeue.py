"""Requeue: Slurm starts the job again as a whole, on whatever is free."""

from __future__ import annotations

from ....events.records import statuses as s
from .baseline import following, moved
from .policy import Costs, Policy

POLICY = Policy(
    what="Slurm requeues the whole job, on free nodes of its size",
    heals=False,
    decides=lambda _: following(moved),
    costs=Costs(
        # slurm.conf: SlurmdTimeout is 300 s by default, then the node is down and the job requeued.
        # One process that ends does not end the step by default (srun --kill-on-bad-exit): the
        # others wait for their collective, 30 min (Unicron, table 2).
        detect_s={s.LOST_CONNECTION: 300.0}, detect_other_s=1800.0,
        # KillWait, 30 s by default; scheduling alone 454 s at 2,048 GPUs, the least published
        # (ByteRobust, arXiv 2509.16293, table 7); environment and CUDA 14 min (Unicron).
        start_s=30.0 + 454.0 + 840.0,
        checkpoint_s=1800.0,
    ),
)
