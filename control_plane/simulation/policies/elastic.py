"""Policies that continue with the nodes that are left: torchft, Oobleck, Bamboo, Varuna.

Of the published value and the value that this project measured, each constant is the one that
favours the policy more. restarting.py explains "bench" and "trial".

| constant | published | measured |
|---|---|---|
| shrink: fault to next step | no | 0.53 s (trial), 1.85 s (bench), 4.66 s (bench, release) |
| shrink: a hang | no | 2.12 s to the next step (bench, SIGSTOP) |
| the others: a node is lost | 5.6 s (Unicron, table 2) | 1.17 s (bench, Unicron) |
| the others: a process has ended | 1.8 s (the same) | 0.076 s (the same) |
| the others: a process raises | 0.3 s (the same) | 0.019 s (the same) |
| the others: other network faults | 0.3 s (the same) | 1.35 s (the same) |
| a process starts | no | 4.0 s (restarting.py) |
| Oobleck reconfigures | 10 s | no |
| Bamboo rebalances its pipelines | 450 s | no |
| Varuna restarts | 701 s | no |
| speed of Oobleck, Bamboo, Varuna | 0.27 to 0.32, 0.22 to 0.26, 0.21 to 0.25 (derived) | no |

Shrink is torchft's nightly with a heartbeat of 500 ms. The 10, 450 and 701 s are for a model of
6.7 B parameters (Oobleck's artifact, SOSP'23, 30 A40). In Bamboo's favour two costs are left out:
30 s where redundancy is not enough, and 1.5 times slower steps until it has rebalanced. No source
says when these three notice a fault: here they notice it as early as Unicron. Their speed relative
to Megatron's, without a fault, is the upper end of what the ratios in Unicron's paper imply. So
these ratios are no evidence here; docs/guides/paper.md shows the ratios at Megatron's speed.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....events.records import statuses as s
from .baseline import following, shrunk
from .policy import Costs, Policy
from .restarting import START_S

SHRINK = Policy(
    heals=True, decides=lambda _, __: following(shrunk),
    costs=Costs(
        # Of the 0.53 s until the next step, 0.5 s is the limit of the heartbeat.
        detect_s=dict.fromkeys((s.NCCL_TIMEOUT, s.LINK_FLAPPING, s.TASK_HANG), 2.09),
        detect_other_s=0.5, start_s=START_S, regroup_s=0.03, checkpoint_s=1800.0))
_RESILIENT = Costs(
    # Hangs are noticed after three iterations (Unicron, table 2).
    detect_s={s.LOST_CONNECTION: 1.17, s.EXITED_ABNORMALLY: 0.076, s.OTHER_NETWORK: 0.3},
    detect_other_s=0.019,
    detect_iterations={s.NCCL_TIMEOUT: 3.0, s.LINK_FLAPPING: 3.0, s.TASK_HANG: 3.0},
    start_s=START_S, checkpoint_s=1800.0)
OOBLECK = Policy(
    heals=True, decides=lambda _, __: following(shrunk),
    costs=replace(_RESILIENT, regroup_s=10.0, speed=0.32))
BAMBOO = Policy(
    heals=True, decides=lambda _, __: following(shrunk),
    costs=replace(_RESILIENT, regroup_s=450.0, speed=0.26))
VARUNA = Policy(
    heals=False, decides=lambda _, __: following(shrunk),
    # A checkpoint every ten iterations. The 120 s that it takes are part of Varuna's speed.
    costs=replace(_RESILIENT, start_s=701.0, checkpoint_s=100.0, speed=0.25))
