"""Requeue: a scheduler (Slurm, Kubernetes) starts the job again as a whole, on whatever is free."""

from __future__ import annotations

from ..baseline import following, moved
from ..costs import Costs
from ..policy import Policy

POLICY = Policy(
    what="requeue the whole job, on free nodes of its size",
    heals=False,
    decides=lambda: following(moved),
    costs=Costs(
        # As Megatron's: a job that stands ends by its collectives' timeout (torch's 30 min).
        detect_s={}, detect_other_s=1800.0,
        # Scheduling alone at 2,048 GPUs, 454 s (ByteRobust, arXiv 2509.16293, table 7), and to
        # catch up from the checkpoint under 15 min (MegaScale, arXiv 2402.15627, 6.3: the half).
        start_s=454.0 + 450.0,
        checkpoint_s=1800.0,
    ),
)
