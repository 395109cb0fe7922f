"""Policies of other systems: restarts from a checkpoint, and those that go on with fewer nodes.

docs/guides/simulate.md, "Sources of the constants", says where each value is from.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....events.records import statuses as s
from .baseline import following, kept, moved, shrunk
from .policy import Costs, Policy

START_S = 4.0
"""torchrun's restart: its processes import, build the model and load a checkpoint."""
NODE_S, EXIT_S, RAISED_S = 1.17, 0.21, 1.08
COLLECTIVE_S = 600.0
_SILENT = dict.fromkeys((s.OTHER_NETWORK, s.NCCL_TIMEOUT, s.LINK_FLAPPING, s.TASK_HANG),
                        COLLECTIVE_S)
"""No process reports these before the timeout of the collective."""

MEGATRON = Policy(
    heals=False, decides=lambda _, __: following(kept),
    costs=Costs(
        detect_s={s.LOST_CONNECTION: NODE_S, s.EXITED_ABNORMALLY: EXIT_S, **_SILENT},
        detect_other_s=RAISED_S, start_s=START_S, checkpoint_s=1800.0))
MEGATRON_SPARES = Policy(
    heals=False, decides=lambda costs, _: following(moved, costs.num_spares),
    costs=replace(MEGATRON.costs, num_spares=1))
REQUEUE = Policy(
    heals=False, decides=lambda _, __: following(moved),
    # The job's processes run under torchrun, which ends the job when one of them ends.
    costs=replace(MEGATRON.costs, detect_s={**MEGATRON.costs.detect_s, s.LOST_CONNECTION: 300.0},
                  start_s=30.0 + 454.0 + START_S))
KUBERNETES = Policy(
    heals=False, decides=lambda _, __: following(moved),
    costs=replace(MEGATRON.costs, detect_s={s.LOST_CONNECTION: 40.0 + 300.0, **_SILENT},
                  detect_other_s=10.0))
SPARES = Policy(
    heals=False, decides=lambda costs, _: following(moved, costs.num_spares),
    costs=Costs(
        # NVRx noticed SIGSTOP 1.85 s later than SIGKILL. A lost node is noticed as by torchrun.
        detect_s={s.LOST_CONNECTION: NODE_S, **dict.fromkeys(_SILENT, EXIT_S + 1.85)},
        detect_other_s=EXIT_S, start_s=2.6 - EXIT_S,
        # The state comes from a peer's memory, so only one iteration is repeated (AWS, HyperPod).
        # In the paper's scenarios an iteration takes 10 s.
        checkpoint_s=10.0, num_spares=1))

# --- torchft, Oobleck, Bamboo and Varuna go on with the nodes that are left ---

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
