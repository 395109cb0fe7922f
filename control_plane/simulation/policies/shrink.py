"""Shrink: a job goes on with the replicas that are left (torchft); each job for itself."""

from __future__ import annotations

from .baseline import following, shrunk
from .policy import Costs, Policy

POLICY = Policy(
    what="the job that failed goes on smaller, until its nodes are back",
    heals=True,
    decides=lambda _: following(shrunk),
    costs=Costs(
        # docs/guides/bench-recovery.md, dp4_sigkill: torchft's release steps again 4.66 s after a
        # kill; nearly all of it is its lighthouse's 5 s of heartbeats.
        detect_s={}, detect_other_s=4.3,
        # As Unicron's, the same process: what torchft starts imports and builds as much.
        start_s=30.0, quiesce_s=0.1, regroup_s=0.26,
        checkpoint_s=1800.0,
    ),
)
