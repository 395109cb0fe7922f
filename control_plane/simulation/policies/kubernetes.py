"""Kubernetes: the operator of a training job starts all its pods again, on whatever is free."""

from __future__ import annotations

from ....events.records import statuses as s
from .baseline import following, moved
from .policy import Costs, Policy

POLICY = Policy(
    what="Kubernetes evicts the pods and starts the whole job again",
    heals=False,
    decides=lambda _: following(moved),
    costs=Costs(
        # kube-controller-manager: node-monitor-grace-period 40 s, then pods tolerate an
        # unreachable node for 300 s (DefaultTolerationSeconds). A container that ends is seen at
        # once and restarted after 10 s, the first back-off. Others by the collective's timeout,
        # 10 min for NCCL in torch of today.
        detect_s={s.LOST_CONNECTION: 340.0, s.EXITED_ABNORMALLY: 10.0}, detect_other_s=600.0,
        # No published time of a whole job's pods: environment and CUDA as Unicron has them.
        start_s=840.0,
        checkpoint_s=1800.0,
    ),
)
