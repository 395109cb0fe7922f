"""Plans for every next event, as in the paper's table: only for `unicron plan --offline`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from .planner import Plan, solve
from .problem import PlanProblem

EventKind = Literal["gpu lost", "node lost", "node joined", "task ended"]


class Event(Struct, frozen=True, kw_only=True):
    """A possible next event. `task`: the task that loses the GPU or node, or that ends; 0 if a node
    joins. A submission is not among the events, since its demand is not known."""

    what: EventKind
    task: int = 0


class NextEventPlans(Struct, frozen=True, kw_only=True):
    problem: PlanProblem
    gpus_per_node: int
    plans: dict[Event, Plan]
    """By event: the plan for the remaining tasks, without a task that ended."""
    num_left: int = 0
    """The number of events that were left out for lack of time."""

    @property
    def num_bytes(self) -> int:
        return sum(sys.getsizeof(plan.slots) for plan in self.plans.values())


def plan_next_events(problem: PlanProblem, gpus_per_node: int,
            is_late: Callable[[], bool] = lambda: False) -> NextEventPlans:
    """Plan for one event after the other, until `is_late` returns True."""
    every, plans = list(events(problem, gpus_per_node)), dict[Event, Plan]()
    for event in every:
        if is_late():
            break
        plans[event] = solve(problem_after(problem, event, gpus_per_node))
    return NextEventPlans(problem=problem, gpus_per_node=gpus_per_node, plans=plans,
                    num_left=len(every) - len(plans))


def events(problem: PlanProblem, gpus_per_node: int) -> Iterator[Event]:
    """For each task with slots: a lost GPU, a lost node. For each task: its end. One more node."""
    losses: tuple[tuple[EventKind, int], ...] = (("gpu lost", 1), ("node lost", gpus_per_node))
    for what, num in losses:
        if num <= problem.num_slots:
            yield from (Event(what=what, task=one.task) for one in problem.demands if one.now)
    yield from (Event(what="task ended", task=demand.task) for demand in problem.demands)
    yield Event(what="node joined")


def problem_after(problem: PlanProblem, event: Event, gpus_per_node: int) -> PlanProblem:
    demands = problem.demands
    if event.what == "task ended":
        return replace(problem, demands=tuple(one for one in demands if one.task != event.task))
    more = {"gpu lost": -1, "node lost": -gpus_per_node, "node joined": gpus_per_node}[event.what]
    return replace(problem, num_slots=problem.num_slots + more, demands=tuple(
        replace(one, faulted=True) if one.task == event.task else one for one in demands))
