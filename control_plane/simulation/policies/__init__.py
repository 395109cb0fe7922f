"""The policies that a simulation compares.

Read `policy` first, then `baseline`. A policy supplies `decide`; the fold and the transitions are
the same for all policies. docs/guides/simulate.md says what each one does, and, in "Sources of the
constants", where each value is from.
"""

from msgspec.structs import replace

from ....events.records import statuses as s
from ...decide import decide
from .baseline import following, kept, moved, shrunk
from .policy import Costs, Policy

# --- Unicron: the unchanged decider, with measured durations ---
UNICRON = Policy(
    heals=True,
    escalates=True,
    decides=lambda _: decide.decide,
    costs=Costs(
        # docs/guides/bench-detection.md: medians of ten faults each on two cores. A hang, or a
        # collective in which others wait, is reported after three iterations and at least 1 s.
        detect_s={
            s.EXITED_ABNORMALLY: 0.076,
            s.LOST_CONNECTION: 1.17,
            s.OTHER_NETWORK: 1.35,
            s.NCCL_TIMEOUT: 1.18,
            s.LINK_FLAPPING: 1.18,
            s.TASK_HANG: 1.18,
        },
        detect_other_s=0.019,
        detect_iterations={s.NCCL_TIMEOUT: 3.0, s.LINK_FLAPPING: 3.0, s.TASK_HANG: 3.0},
        # A guess: with CUDA and NCCL a rank on a GPU is ready after tens of seconds. On gloo,
        # without a GPU, it is ready after 1.4 s (docs/guides/bench-recovery.md, `restart`).
        start_s=30.0,
        # Together 0.3 to 0.6 s on gloo (docs/guides/bench-recovery.md, `breakdown` and layouts).
        quiesce_s=0.3,
        regroup_s=0.3,
        checkpoint_s=1800.0,
        copy_s=300.0,
    ),
)

# --- restarts from a checkpoint ---
START_S = 4.0
"""torchrun's restart: its processes import, build the model and load a checkpoint."""
NODE_S, EXIT_S, RAISED_S = 1.17, 0.21, 1.08
COLLECTIVE_S = 600.0
_SILENT = dict.fromkeys(
    (s.OTHER_NETWORK, s.NCCL_TIMEOUT, s.LINK_FLAPPING, s.TASK_HANG), COLLECTIVE_S
)
"""No process reports these before the timeout of the collective."""

MEGATRON = Policy(
    heals=False,
    decides=lambda _: following(kept),
    costs=Costs(
        detect_s={s.LOST_CONNECTION: NODE_S, s.EXITED_ABNORMALLY: EXIT_S, **_SILENT},
        detect_other_s=RAISED_S,
        start_s=START_S,
        checkpoint_s=1800.0,
    ),
)
MEGATRON_SPARES = Policy(
    heals=False,
    decides=lambda costs: following(moved, costs.num_spares),
    costs=replace(MEGATRON.costs, num_spares=1),
)
REQUEUE = Policy(
    heals=False,
    decides=lambda _: following(moved),
    # The job's processes run under torchrun, which ends the job when one of them ends.
    costs=replace(
        MEGATRON.costs,
        detect_s={**MEGATRON.costs.detect_s, s.LOST_CONNECTION: 300.0},
        start_s=30.0 + 454.0 + START_S,
    ),
)
KUBERNETES = Policy(
    heals=False,
    decides=lambda _: following(moved),
    costs=replace(
        MEGATRON.costs, detect_s={s.LOST_CONNECTION: 40.0 + 300.0, **_SILENT}, detect_other_s=10.0
    ),
)
SPARES = Policy(
    heals=False,
    decides=lambda costs: following(moved, costs.num_spares),
    costs=Costs(
        # NVRx noticed SIGSTOP 1.85 s later than SIGKILL. A lost node is noticed as by torchrun.
        detect_s={s.LOST_CONNECTION: NODE_S, **dict.fromkeys(_SILENT, EXIT_S + 1.85)},
        detect_other_s=EXIT_S,
        start_s=2.6 - EXIT_S,
        # The state comes from a peer's memory, so only one iteration is repeated (AWS, HyperPod).
        # In the paper's scenarios an iteration takes 10 s.
        checkpoint_s=10.0,
        num_spares=1,
    ),
)

# --- torchft goes on with the nodes that are left ---

SHRINK = Policy(
    heals=True,
    decides=lambda _: following(shrunk),
    costs=Costs(
        # Of the 0.53 s until the next step, 0.5 s is the limit of the heartbeat.
        detect_s=dict.fromkeys((s.NCCL_TIMEOUT, s.LINK_FLAPPING, s.TASK_HANG), 2.09),
        detect_other_s=0.5,
        start_s=START_S,
        regroup_s=0.03,
        checkpoint_s=1800.0,
    ),
)
POLICIES: dict[str, Policy] = {
    "unicron": UNICRON,
    "shrink": SHRINK,
    "spares": SPARES,
    "requeue": REQUEUE,
    "kubernetes": KUBERNETES,
    "megatron": MEGATRON,
    "megatron-spares": MEGATRON_SPARES,
}
