"""The lookout: the plans of what may happen next, made in a thread beside the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from .aside import aside
from .foreseen import Foreseen, foresee
from .knapsack import Found
from .plan_input import node_slots, plan_input
from .state import ClusterState
from .wishes import PlanInput

WORK_NUM_MAX = 1 << 21
"""Tasks times all their sizes: about two seconds of a thread. Above it there is no table."""


class Lookout:
    """A table for the plan's input as it is, made anew when that has changed.

    No decision waits for it: while one is made, the last one stands, and whatever it was made for,
    it is used only for an input that one event leads to. A plan is the same with it and without.
    """

    def __init__(self, state: Callable[[], ClusterState]) -> None:
        self._state = state
        self._talk = structlog.get_logger("control_plane")
        self.table: Foreseen | None = None
        self.num_used = 0
        """Plans whose optimum was looked up."""

    def known(self, asked: PlanInput) -> Found | None:
        """The optimum for this input, where it was foreseen."""
        found = self.table.known(asked) if self.table is not None else None
        self.num_used += found is not None
        return found

    async def run(self, news: Callable[[], asyncio.Event]) -> None:
        """Until it is cancelled; a table that is being made is then finished, and forgotten.

        `news`: the event that is set when the state has next changed.
        """
        seen, told = (ClusterState(), 0), False
        while True:
            changed, state = news(), self._state()
            if state is seen[0] and state.num_inputs == seen[1]:
                await changed.wait()
                continue
            seen = (state, state.num_inputs)
            asked = plan_input(state).asked
            work = len(asked.wishes) * sum(len(wish.sizes) for wish in asked.wishes)
            if work > WORK_NUM_MAX:
                self.table = None
                if not told:
                    self._talk.info("too many tasks to foresee plans", tasks=len(asked.wishes))
                told = True
            else:
                self.table = await aside(partial(foresee, asked, node_slots(state) or 1))

