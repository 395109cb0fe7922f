"""Planning problems for tests, fixed and random."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput.transition_cost import Transition

LEVELS = st.floats(0.5, 50.0, allow_nan=False) | st.just(0.0)


def wish(task: int, now: int, wafs: dict[int, float], **more: Any) -> TaskDemand:
    """A demand with `wafs` by slots. Default: no fault, 10 s for each change."""
    return TaskDemand(
        task=task,
        name=f"t{task}",
        now=now,
        faulted=more.pop("faulted", False),
        transition=Transition.uniform(more.pop("transition_s", 10.0)),
        sizes=tuple(wafs),
        wafs=tuple(wafs.values()),
        **more,
    )


def asking(wishes: list[TaskDemand], num_slots: int, **more: Any) -> PlanProblem:
    return PlanProblem(demands=tuple(wishes), num_slots=num_slots, mtbf_gpu_s=7.2e6, **more)


def slots(problem: PlanProblem) -> tuple[int, ...]:
    """The planned slots by task."""
    return planner.choose_plan(problem).plan.slots


def rising(draw: st.DrawFn) -> dict[int, float]:
    """One to three sizes; more slots never give less throughput, and some sizes give none."""
    sizes = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)))
    return dict(zip(sizes, itertools.accumulate([draw(LEVELS) for _ in sizes], max), strict=True))
