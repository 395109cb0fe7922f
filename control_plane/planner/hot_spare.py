"""Hot spares: whether the slots of one node stay idle for the next fault, by what that is worth.

One event is looked ahead, as the plan itself does: until the next fault a plan earns its G, and
that fault takes a node of one task. More than one node cannot pay so: one event takes no second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...events.records.decisions import Alternative, HotSpare
from . import constraints, objective, planner
from .alternative_names import SPARELESS
from .next_event import Event, after
from .objective import Exact, Floats
from .planner import Choice
from .problem import PlanInput, waf_of

WORK_NUM_MAX = 1 << 18
"""Tasks times all their sizes: below 200 ms. Above it no spare is priced."""
LIMITED_WORK_NUM_MAX = 1 << 21
"""Under limits, where each plan after a fault is a search over slots and moves: times both."""


def choose(asked: PlanInput) -> Choice:
    """The plan, with a node's slots kept idle if and only if that is worth more.

    A plan is worth its G, and what is expected of the one that follows on the next fault: a node
    is lost, of task i with probability x_i / n, `planner.choose` plans anew on what is left, and
    that plan stands until the node is repaired or the fault after it comes. A tie keeps nothing
    idle; no task that runs stops for a spare, and none is left below a floor that it would have.
    """
    free, num = planner.choose(asked), asked.spare_slots
    if not num or not asked.wishes:
        return free
    if asked.num_slots - sum(free.plan.slots) >= num:
        return replace(free, spare=HotSpare(num_slots=num, verdict="idle anyway"))
    if is_too_much(asked):
        return replace(free, spare=HotSpare(num_slots=num, verdict="not priced"))
    idle = min(num, asked.num_slots)
    fewer = replace(asked, num_slots=asked.num_slots - idle, kept_slots=idle)
    pays, told = _compared(asked, free.plan.slots, planner.planned(fewer).slots)
    if not pays:
        return replace(free, spare=told)
    kept = planner.choose(fewer)
    slots = tuple((wish.task, x) for wish, x in zip(asked.wishes, free.plan.slots, strict=True))
    beaten = Alternative(what=SPARELESS, slots=slots, waf=free.plan.waf,
                         objective=free.plan.objective)
    return replace(kept, spare=told, alternatives=(
        beaten, *(other for other in kept.alternatives if other.slots != slots)))


def is_too_much(asked: PlanInput) -> bool:
    """Whether pricing would hold a decision up."""
    work = len(asked.wishes) * sum(len(wish.sizes) + 1 for wish in asked.wishes)
    if asked.limits is not None:
        return work * (asked.num_slots + 1) * (1 + (asked.moves_max or 0)) > LIMITED_WORK_NUM_MAX
    return work > WORK_NUM_MAX


class _Then(Struct, frozen=True):
    """The next fault, once a plan is carried out: every task is healthy on what it was given."""

    asked: PlanInput
    """On the slots that are left; nobody is hurt yet."""
    exact: Exact
    """By candidate: what it is worth until the node is back, or the next fault."""
    back: Floats
    """By task: what it pays besides if it is hit, and goes on with as many slots."""

    @property
    def most(self) -> list[float]:
        """The largest of each task."""
        return [*map(max, self.exact.most(), self.back.tolist())]

    def total(self, num_slots: int, shift: int) -> int:
        """What is expected, times 2^shift and `num_slots`, of which each fails as likely."""
        wishes, rows = self.asked.wishes, self.exact.rows(shift)[0]
        back = objective.scaled(self.back, shift).tolist()
        num_idle = num_slots - sum(wish.now for wish in wishes)
        total = num_idle * rows.sums(rows.vector(planner.planned(self.asked).slots))[0]
        for i, wish in enumerate(wishes):
            if wish.now:  # a node of it is lost; the slots of `asked` are those that are left
                lost = after(self.asked, Event(what="node lost", task=wish.task), 0)
                slots = planner.planned(lost).slots
                value = rows.sums(rows.vector(slots))[0]
                value -= back[i] if slots[i] == wish.now else 0
                total += wish.now * value
        return total


def _then(asked: PlanInput, slots: Sequence[int]) -> _Then:
    then = replace(asked, num_slots=max(asked.num_slots - asked.spare_slots, 0), wishes=tuple(
        replace(wish, now=x, hurt=False) for wish, x in zip(asked.wishes, slots, strict=True)))
    stands_s = min(asked.repair_s, then.running_s)
    return _Then(then, objective.exact(then.wishes, stands_s, then.num_slots), np.array(
        [waf_of(wish, wish.now) * wish.transition.same_s if wish.now <= then.num_slots else 0.0
         for wish in then.wishes]))


def _compared(asked: PlanInput, free: Sequence[int], kept: Sequence[int]) -> tuple[bool, HotSpare]:
    """Whether it pays to have the plan `kept`, with the spare, rather than `free`; in integers."""
    num = asked.num_slots
    exact = objective.exact(asked.wishes, asked.running_s, num)
    thens = [_then(asked, slots) for slots in (free, kept)]
    most = [found for found in (exact.most(), *(one.most for one in thens)) if any(found)]
    shift = min(map(objective.shift_of, most), default=0)
    rows = exact.rows(shift)[0]
    cost = rows.sums(rows.vector(free))[0] - rows.sums(rows.vector(kept))[0]
    without, with_it = (one.total(num, shift) for one in thens)
    stops = any(wish.now and x and not y
                for wish, x, y in zip(asked.wishes, free, kept, strict=True))
    starves = constraints.short(asked, kept).keys() - constraints.short(asked, free).keys()
    pays = any(kept) and not stops and not starves and with_it - without > cost * num
    return pays, HotSpare(
        num_slots=asked.spare_slots, verdict="kept" if pays else "not kept",
        cost_flop=math.ldexp(cost, -shift),
        saves_flop=math.ldexp((with_it - without) / max(num, 1), -shift))
