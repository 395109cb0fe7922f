"""Unicron: the unchanged decider, with measured durations; also with other rules of allocation."""

from __future__ import annotations

from ....events.records import statuses as s
from ...decide import decide
from .baseline import sharing
from .policy import Costs, Policy

POLICY = Policy(
    heals=True, escalates=True, decides=lambda _, __: decide.decide,
    costs=Costs(
        # docs/guides/bench-detection.md: medians of ten faults each on two cores. A hang, or a
        # collective in which others wait, is reported after three iterations and at least 1 s.
        detect_s={s.EXITED_ABNORMALLY: 0.076, s.LOST_CONNECTION: 1.17, s.OTHER_NETWORK: 1.35,
                  s.NCCL_TIMEOUT: 1.18, s.LINK_FLAPPING: 1.18, s.TASK_HANG: 1.18},
        detect_other_s=0.019,
        detect_iterations={s.NCCL_TIMEOUT: 3.0, s.LINK_FLAPPING: 3.0, s.TASK_HANG: 3.0},
        # A guess: with CUDA and NCCL a rank on a GPU is ready after tens of seconds. On gloo,
        # without a GPU, it is ready after 1.4 s (docs/guides/bench-recovery.md, `restart`).
        start_s=30.0,
        # Together 0.3 to 0.6 s on gloo (docs/guides/bench-recovery.md, `breakdown` and layouts).
        quiesce_s=0.3, regroup_s=0.3,
        checkpoint_s=1800.0, copy_s=300.0))
# Rules of allocation that replace the planner; detection and healing are Unicron's.
EQUALLY = Policy(
    heals=True, escalates=True, costs=POLICY.costs, decides=lambda _, __: sharing(lambda _: 1.0))
BY_WEIGHT = Policy(
    heals=True, escalates=True, costs=POLICY.costs,
    decides=lambda _, __: sharing(lambda demand: demand.weight))
BY_SIZE = Policy(
    heals=True, escalates=True, costs=POLICY.costs, by_params=True,
    decides=lambda _, params: sharing(lambda demand: params[demand.name]))
