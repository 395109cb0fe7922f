"""Unicron: the unchanged decider, with the measured durations of its steps."""

from __future__ import annotations

from collections.abc import Iterator

from ....events.records import statuses as s
from ....events.records.decisions import PlanChosen
from ....events.records.envelope import Record
from ....events.records.types import Body
from ...decide import decide
from ...planner import explain, hot_spare, planner, straggler_cost
from ...planner.problem import allocation
from ...planner.problem_of_state import planning_snapshot
from ...state.cluster import ClusterState
from .policy import Costs, Policy


def decide_unexplained(state: ClusterState, record: Record) -> Iterator[Body]:
    """As `decide`, but a plan's record lacks what nothing but a reader of the log needs."""
    yield from decide.decisions(state, record, _plan)
    for name in list(state.to_price):
        yield straggler_cost.node_cost(state, name)


def _plan(state: ClusterState) -> Iterator[Body]:
    snapshot = planning_snapshot(state)
    problem = snapshot.problem
    plan = hot_spare.with_hot_spare(problem).plan if problem.spare_slots else (
        planner.solve(problem))
    yield PlanChosen(
        trigger=state.replan, num_slots=problem.num_slots, waf=plan.waf, objective=plan.objective,
        allocations=tuple(map(allocation, problem.demands, plan.slots)), alternatives=(),
        kept=explain.kept(snapshot))
    yield from decide.apply_plan(state, snapshot, plan.slots)


POLICY = Policy(
    what="replan the cluster by what it earns, heal in memory",
    heals=True, escalates=True, decides=lambda _, __: decide.decide,
    decides_unexplained=decide_unexplained,
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
