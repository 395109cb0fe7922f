"""Random planning problems for tests of the one-event plan table."""

from __future__ import annotations

from hypothesis import strategies as st
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput.transition_cost import Transition


@st.composite
def inputs(draw: st.DrawFn) -> tuple[PlanProblem, int]:
    """Ties are frequent, and so are changes that cost more than they gain."""
    wafs = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 1e12]) | st.floats(0, 1e15, allow_nan=False)
    spans = st.sampled_from([0.0, 10.0, 1e4])
    linear, bound = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    floored = draw(st.sampled_from([False, False, True]))
    found: list[TaskDemand] = []
    for task in range(1, draw(st.integers(0, 5)) + 1):
        sizes = sorted(draw(st.sets(st.integers(1, 8), max_size=4)))
        found.append(
            TaskDemand(
                task=10 * task,
                name=f"t{task}",
                now=draw(st.sampled_from([0, *sizes, 3])),
                faulted=draw(st.sampled_from([False, False, True])),
                transition=Transition(
                    same_s=draw(spans), shrink_s=draw(spans), grow_s=draw(spans), stop_s=draw(spans)
                ),
                sizes=tuple(sizes),
                wafs=tuple(float(size) if linear else draw(wafs) for size in sizes),
                team=draw(st.sampled_from(["", "red"])) if bound else "",
                priority=draw(st.integers(0, 1)) if bound else 0,
                floor=draw(st.integers(0, 4)) if floored else 0,
            )
        )
    return PlanProblem(
        demands=tuple(found),
        num_slots=draw(st.integers(0, 20)),
        mtbf_gpu_s=draw(st.sampled_from([1e2, 1e5, 7.2e6])),
        gain_min=draw(st.sampled_from([0.0, 0.005, 0.3])),
        moves_max=draw(st.none() | st.integers(0, 2)) if bound else None,
        quotas=(("red", draw(st.integers(0, 9))),) if bound else (),
        floor=floored and draw(st.booleans()),
    ), draw(st.integers(1, 4))
