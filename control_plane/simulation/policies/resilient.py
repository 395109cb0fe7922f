"""What Oobleck, Bamboo and Varuna have in common: one job that is rearranged, and slower always.

Their costs for a model of 6.7 B are those of Oobleck's artifact (SOSP'23, 30 A40). When they notice
is not published with them: as soon as Unicron's paper says of itself, in their favour. Their speed
without a fault, beside Megatron's, is what that paper's ratios imply (derived, not reported): so
those ratios are no evidence here, and docs/guides/paper.md shows what comes of them at full speed.
"""

from __future__ import annotations

from ....events.records import statuses as s
from .policy import Costs

COSTS = Costs(
    # Unicron (arXiv 2401.00134), table 2: a node 5.6 s, a process 1.8 s, an exception 0.3 s, what
    # is watched by its pace three iterations.
    detect_s={s.LOST_CONNECTION: 5.6, s.EXITED_ABNORMALLY: 1.8}, detect_other_s=0.3,
    detect_iterations={s.NCCL_TIMEOUT: 3.0, s.LINK_FLAPPING: 3.0, s.TASK_HANG: 3.0},
    # A process that joins imports and builds as much as ours.
    start_s=30.0, checkpoint_s=1800.0,
)
