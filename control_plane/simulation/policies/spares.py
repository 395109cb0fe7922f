"""Spares and a restart in the process: today's strongest practice for one job (NVRx, HyperPod)."""

from __future__ import annotations

from .baseline import following, moved
from .policy import Costs, Policy

POLICY = Policy(
    what="a spare node takes over; the job restarts in its processes",
    heals=False,
    decides=lambda run: following(moved, run.costs.num_spares),
    costs=Costs(
        # Detected in about 60 s before anything is localised (ByteRobust, arXiv 2509.16293, 2.2).
        detect_s={}, detect_other_s=60.0,
        # HyperPod without reading checkpoints: recovery in 1 min 45 s (AWS), the detection in it.
        start_s=45.0,
        # State comes out of a peer's memory: what is done again is an iteration; ours: a minute.
        checkpoint_s=60.0,
        num_spares=1,
    ),
)
