"""Inputs of the planner as its tests write them, and as they draw them."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput.transition_cost import Transition

LEVELS = st.floats(0.5, 50.0, allow_nan=False) | st.just(0.0)


def wish(task: int, now: int, wafs: dict[int, float], **more: Any) -> TaskDemand:
    """`wafs`: what it earns, by slots. Healthy, and 10 s for each change, unless told otherwise."""
    return TaskDemand(task=task, name=f"t{task}", now=now, faulted=more.pop("faulted", False),
                transition=Transition.uniform(more.pop("transition_s", 10.0)), sizes=tuple(wafs),
                wafs=tuple(wafs.values()), **more)


def asking(wishes: list[TaskDemand], num_slots: int, **more: Any) -> PlanProblem:
    return PlanProblem(demands=tuple(wishes), num_slots=num_slots, mtbf_gpu_s=7.2e6, **more)


def slots(asked: PlanProblem) -> tuple[int, ...]:
    """What is planned."""
    return planner.choose_plan(asked).plan.slots


def rising(draw: st.DrawFn) -> dict[int, float]:
    """By size, one to three of them: more slots never earn less, and some earn nothing."""
    sizes = sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)))
    return dict(zip(sizes, itertools.accumulate([draw(LEVELS) for _ in sizes], max), strict=True))
