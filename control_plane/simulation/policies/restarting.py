"""Policies that restart the whole job from a checkpoint.

Of the published value and the value that this project measured (four ranks over gloo, two cores),
each constant is the one that favours the policy more. "Bench" is docs/guides/bench-detection.md and
docs/guides/bench-recovery.md; "trial" is an earlier run of the same fault, also on four ranks.

| constant | published | measured |
|---|---|---|
| a process has ended | 1,800 s (Unicron, arXiv 2401.00134, table 2, "without") | 0.21 s (bench) |
| a process raises | 1,800 s (the same) | 1.08 s (bench) |
| a node is lost | 5.7 s (the same, our reading) | 1.17 s (bench, `agent_killed`) |
| network, hang | 600 s (torch: NCCL's default), 1,800 s (Unicron) | not within 30 s (bench) |
| Megatron starts again | 540 s to queue and 840 s for environment and CUDA (Unicron) | 4.0 s |
| Slurm ends and schedules a job | 30 s (KillWait), 454 s (below) | no |
| Slurm notices a lost node | 300 s (SlurmdTimeout) | no |
| Kubernetes notices a lost node | 40 s and 300 s (below) | no |
| Kubernetes starts a container again | 10 s (first back-off) | no |
| spares: to notice, to restart | 60 s (ByteRobust), 45 s (HyperPod: 105 s in all) | 2.6 s (trial) |
| spares: a hang is noticed | 60 s (ByteRobust) | 2.06 s (bench) |
| checkpoint | every 1,800 s: 15 min of work are repeated (Unicron) | a setting |

4.0 s: torchrun took 4.2 s until the next step (trial; 7.5 s in the bench), and 0.21 s of this time
to notice the fault. CUDA and NCCL would take longer. 454 s: the shortest published scheduling time,
at 2,048 GPUs (ByteRobust, arXiv 2509.16293, table 7). Kubernetes: node-monitor-grace-period 40 s,
then pods tolerate an unreachable node for 300 s (DefaultTolerationSeconds).
"""

from __future__ import annotations

from msgspec.structs import replace

from ....events.records import statuses as s
from .baseline import following, kept, moved
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
