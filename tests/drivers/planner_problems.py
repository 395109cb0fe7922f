"""Random planning problems for tests that compare the planner with brute force."""

from __future__ import annotations

from hypothesis import strategies as st
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput.transition_cost import Transition

MTBF_GPU_S, TRANSITION_S = 7.2e6, 10.0
ALIKE = Transition.uniform(TRANSITION_S)
KINDS = Transition(same_s=3.0, shrink_s=20.0, grow_s=1.0, stop_s=700.0)


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[TaskDemand], int]:
    num_slots = draw(st.integers(0, 9))
    found: list[TaskDemand] = []
    for task in range(1, draw(st.integers(0, 4)) + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 10), max_size=4)))
        wafs = [
            draw(
                st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e12, 3e12])
                | st.floats(0, 1e18, allow_nan=False)
            )
            for _ in sizes
        ]
        now = draw(st.sampled_from([0, *sizes]))
        found.append(
            TaskDemand(
                task=task,
                name=f"t{task}",
                now=now,
                faulted=draw(st.booleans()),
                transition=draw(st.sampled_from([ALIKE, KINDS])),
                sizes=tuple(sizes),
                wafs=tuple(wafs),
            )
        )
    return found, num_slots


def asking(
    found: list[TaskDemand],
    num_slots: int,
    *,
    gain_min: float = 0.005,
    mtbf_gpu_s: float = MTBF_GPU_S,
) -> PlanProblem:
    return PlanProblem(
        demands=tuple(found), num_slots=num_slots, mtbf_gpu_s=mtbf_gpu_s, gain_min=gain_min
    )
