"""The plans of all single events that may come next: a loop that plans each of them.

Made on request (`unicron plan --offline --table`); no decision reads it. It takes the time of a
plan for each event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from .planner import Plan, planned
from .problem import PlanInput

What = Literal["gpu lost", "node lost", "node joined", "task ended"]


class Event(Struct, frozen=True, kw_only=True):
    """What may come next. `task`: whose GPU or node it was, or who ended; 0: a node joins.

    A task that is submitted is none of them: what it asks for is not known.
    """

    what: What
    task: int = 0


class Foreseen(Struct, frozen=True, kw_only=True):
    """The plans after one input's events."""

    asked: PlanInput
    gpus_per_node: int
    plans: dict[Event, Plan]
    """Slots by task; a task that ended is not among them."""
    num_left: int = 0
    """Events that there was no time for."""

    @property
    def num_bytes(self) -> int:
        """What the plans take."""
        return sum(sys.getsizeof(plan.slots) for plan in self.plans.values())


def foresee(asked: PlanInput, gpus_per_node: int,
            is_late: Callable[[], bool] = lambda: False) -> Foreseen:
    """A plan for each event, until `is_late`; the time of one plan for each."""
    every, plans = list(events(asked, gpus_per_node)), dict[Event, Plan]()
    for event in every:
        if is_late():
            break
        plans[event] = planned(after(asked, event, gpus_per_node))
    return Foreseen(asked=asked, gpus_per_node=gpus_per_node, plans=plans,
                    num_left=len(every) - len(plans))


def events(asked: PlanInput, gpus_per_node: int) -> Iterator[Event]:
    """A lost GPU and a lost node of each task that has slots, each task's end, and a node more."""
    losses: tuple[tuple[What, int], ...] = (("gpu lost", 1), ("node lost", gpus_per_node))
    for what, num in losses:
        if num <= asked.num_slots:
            yield from (Event(what=what, task=wish.task) for wish in asked.wishes if wish.now)
    yield from (Event(what="task ended", task=wish.task) for wish in asked.wishes)
    yield Event(what="node joined")


def after(asked: PlanInput, event: Event, gpus_per_node: int) -> PlanInput:
    """The input once this has happened."""
    wishes = asked.wishes
    if event.what == "task ended":
        return replace(asked, wishes=tuple(one for one in wishes if one.task != event.task))
    more = {"gpu lost": -1, "node lost": -gpus_per_node, "node joined": gpus_per_node}[event.what]
    return replace(asked, num_slots=asked.num_slots + more, wishes=tuple(
        replace(one, hurt=True) if one.task == event.task else one for one in wishes))
