"""Megatron: a job restarts as a whole from its checkpoint, when its own node is repaired."""

from __future__ import annotations

from ..baseline import following, kept
from ..costs import Costs
from ..policy import Policy

POLICY = Policy(
    what="restart from the checkpoint, once the node is back",
    heals=False,
    decides=lambda: following(kept),
    costs=Costs(
        # Without Unicron a process's end, an exception or a hang shows when the collective's
        # timeout has passed: 30 min (Unicron, table 2; torch's default). A lost node is noticed by
        # its heartbeat in the same table, which is Unicron's own: Megatron has none.
        detect_s={}, detect_other_s=1800.0,
        # Scheduling, communicators, the checkpoint: what HyperPod gives for a restart of a job
        # without its own in-process healing, 15 min (AWS; SemiAnalysis).
        start_s=900.0,
        # Our reading of the paper: a checkpoint each half hour.
        checkpoint_s=1800.0,
    ),
)
