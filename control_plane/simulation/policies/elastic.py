"""Policies that continue with the nodes that are left: torchft, Oobleck, Bamboo, Varuna.

docs/guides/simulate.md, "Sources of the constants", says where each value is from.
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
