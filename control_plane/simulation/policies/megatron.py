"""Megatron: a job restarts as a whole from its checkpoint, when its own node is repaired."""

from __future__ import annotations

from ....events.records import statuses as s
from .baseline import following, kept
from .policy import Costs, Policy

COSTS = Costs(
    # Unicron (arXiv 2401.00134), table 2, "without": a lost node 5.7 s (our reading), all else
    # when the collective's timeout has passed, 30 min.
    detect_s={s.LOST_CONNECTION: 5.7}, detect_other_s=1800.0,
    # The same, of one fault of a 256-GPU task: 9 min to resubmit and queue, 14 min for the
    # environment and CUDA; and 15 min to compute again since the checkpoint: one each half hour.
    start_s=540.0 + 840.0, checkpoint_s=1800.0,
)
POLICY = Policy(
    what="restart from the checkpoint, once the node is back",
    heals=False, decides=lambda _: following(kept), costs=COSTS)
