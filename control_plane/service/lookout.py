"""The lookout: the plans of what may happen next, made in a thread beside the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from ..planner import constraints
from ..planner.next_event import Foreseen, foresee
from ..planner.problem import PlanInput
from ..planner.problem_of_state import node_slots, plan_input
from ..planner.solver.candidates import Found
from ..state.cluster import ClusterState
from .threads import aside

WORK_NUM_MAX = 1 << 21
"""Of `work_num`: about two seconds of a thread. Above it there is no table."""
_PLAN_NUM, _SIZE_NUM = 1 << 11, 3
"""A plan that is made for one event alone, and for each of its sizes."""
_STATES_NUM, _SLOTS_NUM = 1 << 9, 1 << 11
"""States of a search under limits that take as long as one size; and what each size takes beside
its slots, in slots."""


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
        seen, told = PlanInput(wishes=(), num_slots=0, mtbf_gpu_s=1.0), False
        while True:
            changed, state = news(), self._state()
            asked = plan_input(state).asked
            if asked == seen:
                await changed.wait()
                continue
            seen = asked
            if work_num(asked) > WORK_NUM_MAX:
                self.table = None
                if not told:
                    self._talk.info("too many tasks to foresee plans", tasks=len(asked.wishes))
                told = True
            else:
                self.table = await aside(partial(foresee, asked, node_slots(state) or 1))


def work_num(asked: PlanInput) -> int:
    """What a table of this input takes at most, in microseconds or so.

    By itself a pass over all sizes for each task. With floors or alpha each event is a plan of its
    own, and with limits a search over slots, moves and priorities, in which a team's quota is as
    many sizes as it has slots.
    """
    num, limits = len(asked.wishes), asked.limits
    sizes = sum(len(wish.sizes) + 1 for wish in asked.wishes)
    work = num * sizes
    events = 3 * num + 1
    if limits is not None or not constraints.is_plain(asked):
        work += events * (_PLAN_NUM + _SIZE_NUM * sizes)
    if limits is not None:
        moves = min(limits.moves_max or 0, num) + 1
        options = sizes + sum(min(quota, asked.num_slots) * moves for _, quota in limits.teams)
        states = (asked.num_slots + _SLOTS_NUM) * moves * len(set(limits.priorities) | {0})
        work += events * options * states // _STATES_NUM
    return work
