"""The plans of all single events that may come next, made before one of them does.

A task that loses a GPU or a node is hurt: of its candidates, the one that it has earns less than it
did. Where the optimum does not use that candidate, or where Lagrange's bound shows that without it
the sum stays lower still, the optimum of the event is that of the slots that are left. Most events
are settled so, by one pass over all candidates; the others are solved, each as it would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from . import constraints, objective, planner
from .objective import Exact
from .problem import PlanInput, waf_of
from .solver import knapsack
from .solver.candidates import Found, Rows
from .solver.core import LOSS_NUM_MAX, Ints
from .solver.dynamic_program import Others, followed, suffixes, without_row
from .solver.knapsack import Solved, best

Bools = NDArray[np.bool_]
REST_NUM_MAX = 1 << 24
"""Tasks that are not held times slots: 128 MB."""
BESIDE_NUM_MAX = 1 << 21
"""Tasks times slots: two tables of 16 MB, each about the time of ten plans."""
What = Literal["gpu lost", "node lost", "node joined", "task ended"]


class Event(Struct, frozen=True, kw_only=True):
    """What may come next. `task`: whose GPU or node it was, or who ended; 0: a node joins.

    A task that is submitted is none of them: what it asks for is not known, and its plan is
    made when it comes.
    """

    what: What
    task: int = 0


class Outlook(Struct, frozen=True, kw_only=True):
    """Of one event: the optimum, and the plan, which changes healthy tasks for a gain alone and
    keeps the limits."""

    optimum: Found
    """Slots by task; the task that ended is not among them."""
    plan: Found


class Foreseen(Struct, frozen=True, kw_only=True):
    """The table of one input."""

    asked: PlanInput
    gpus_per_node: int
    outlooks: dict[Event, Outlook]

    def known(self, asked: PlanInput) -> Found | None:
        """The optimum of this input, if one event leads to it from the table's own."""
        event = self.event(asked)
        return self.outlooks[event].optimum if event is not None else None

    def event(self, asked: PlanInput) -> Event | None:
        """Which event leads from the table's input to this one; all of it is compared."""
        mine = self.asked.wishes
        other = next((one.task for one, its in zip(mine, asked.wishes, strict=False)
                      if one != its), mine[-1].task if len(mine) > len(asked.wishes) else 0)
        hurt = other or next((one.task for one in mine if one.hurt and one.now), 0)
        for event in (Event(what="gpu lost", task=hurt), Event(what="node lost", task=hurt),
                      Event(what="task ended", task=other), Event(what="node joined")):
            if event in self.outlooks and after(self.asked, event, self.gpus_per_node) == asked:
                return event
        return None

    @property
    def num_bytes(self) -> int:
        """What the plans take; those that are the same are held once."""
        every = {id(found[0]): sys.getsizeof(found[0]) for outlook in self.outlooks.values()
                 for found in (outlook.optimum, outlook.plan)}
        return sum(every.values())


def after(asked: PlanInput, event: Event, gpus_per_node: int) -> PlanInput:
    """The input once this has happened."""
    wishes = asked.wishes
    if event.what == "task ended":
        return replace(asked, wishes=tuple(one for one in wishes if one.task != event.task))
    more = {"gpu lost": -1, "node lost": -gpus_per_node, "node joined": gpus_per_node}[event.what]
    return replace(asked, num_slots=asked.num_slots + more, wishes=tuple(
        replace(one, hurt=True) if one.task == event.task else one for one in wishes))


def foresee(asked: PlanInput, gpus_per_node: int) -> Foreseen:
    """The table: a lost GPU and a lost node of each task that has slots, each task's end, and a
    node more. At least the time of a few plans; at most that of one for each event.
    """
    if not constraints.is_plain(asked):
        return Foreseen(asked=asked, gpus_per_node=gpus_per_node, outlooks={
            event: _by_choice(after(asked, event, gpus_per_node))
            for event in _events(asked, gpus_per_node)})
    outlooks: dict[Event, Outlook] = {}
    for what, num in _losses(asked, gpus_per_node):
        if asked.wishes:
            left = _Left(replace(asked, num_slots=asked.num_slots - num))
            outlooks |= {Event(what=what, task=wish.task): left.hurt(i)
                         for i, wish in enumerate(asked.wishes) if wish.now}
    if asked.wishes:
        left = _Left(asked)
        outlooks |= {Event(what="task ended", task=wish.task): left.ended(i)
                     for i, wish in enumerate(asked.wishes)}
    more = Event(what="node joined")
    outlooks[more] = _by_itself(after(asked, more, gpus_per_node))
    if asked.limits is not None:
        outlooks = {event: _limited(after(asked, event, gpus_per_node), outlook.optimum)
                    for event, outlook in outlooks.items()}
    return Foreseen(asked=asked, gpus_per_node=gpus_per_node, outlooks=outlooks)


def _losses(asked: PlanInput, gpus_per_node: int) -> list[tuple[What, int]]:
    """Which can happen, and how many slots go."""
    every: tuple[tuple[What, int], ...] = (("gpu lost", 1), ("node lost", gpus_per_node))
    return [(what, num) for what, num in every if num <= asked.num_slots]


def _events(asked: PlanInput, gpus_per_node: int) -> Iterator[Event]:
    """All that `foresee` has, in its order."""
    for what, _ in _losses(asked, gpus_per_node):
        yield from (Event(what=what, task=wish.task) for wish in asked.wishes if wish.now)
    yield from (Event(what="task ended", task=wish.task) for wish in asked.wishes)
    yield Event(what="node joined")


def _by_choice(then: PlanInput) -> Outlook:
    """With floors, which fit or do not, or alpha each event is a plan of its own."""
    return _limited(then, _best(planner.gains(then), then.num_slots))


def plans_hurt(asked: PlanInput) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each task that has slots, by its place, and what is planned if a worker of it failed and
    `asked.num_slots` are left; without limits and floors."""
    left = _Left(asked)
    yield from ((i, left.plan_hurt(i)) for i, wish in enumerate(asked.wishes) if wish.now)


def _limited(then: PlanInput, optimum: Found) -> Outlook:
    """Under limits the plan is another matter than the optimum."""
    plan = planner.planned(then, optimum)
    return Outlook(optimum=optimum, plan=(plan.slots, plan.objective))


def _by_itself(then: PlanInput) -> Outlook:
    exact = objective.exact(then.wishes, then.running_s, then.num_slots)
    rows, earned = exact.rows(objective.shift_of(exact.most()))
    return _outlook(then, lambda: (rows, earned), _best(rows, then.num_slots), _steady(then, rows))


def _steady(then: PlanInput, rows: Rows) -> Found | None:
    """The best with the healthy as they are, None: it cannot be."""
    return best(planner.held(then.wishes, rows), then.num_slots)


def _best(rows: Rows, num_slots: int, gain: int | None = None) -> Found:
    """`gain`: of the optimum, where it is known."""
    found = best(rows, num_slots, gain)
    assert found is not None, "0 slots for each fit, and so do the floors that are given"
    return found


def _outlook(then: PlanInput, made: Callable[[], tuple[Rows, Ints]], optimum: Found,
             held: Found | None) -> Outlook:
    """As `choose` would. `held`: the best with the healthy as they are; None: it cannot be."""
    if held is not None and (then.gain_min > 0 or optimum[1] == held[1]) and planner.stays(
            then, *made(), optimum, held):
        return Outlook(optimum=optimum, plan=held)
    return Outlook(optimum=optimum, plan=optimum)


class _Scale:
    """The input's own optimum on one scale, and what the events on that scale share."""

    def __init__(self, exact: Exact, shift: int, num_slots: int, at: Ints, stays: Bools,
                 num_free: int) -> None:
        self.shift = shift
        self.rows, self.earned = exact.rows(shift)
        solved = Solved.of(self.rows, num_slots)
        assert solved is not None, "0 slots for each always fits"
        self.vector, self.gain, self.relaxed = solved.vector, solved.gain, solved.relaxed
        self.slots = self.rows.slots(solved.vector)
        losses = solved.relaxed.losses.copy()
        losses[at[at >= 0]] = LOSS_NUM_MAX
        self.others: Ints = np.minimum.reduceat(losses, exact.starts[:-1])
        """By row: what a vector loses against the bound, at least, without what the task has."""
        self._stays, self._num_free, self._num_slots = stays, num_free, num_slots
        self._shared: dict[int, list[int]] = {}
        self.held_gain = int(self.rows.gains[at[stays]].sum())

    def is_less(self, i: int, gain: int) -> bool:
        """Whether without what task i has every plan gains less than this."""
        return self.relaxed.bound - int(self.others[i]) < self.relaxed.parts * gain

    def gain_beside(self, i: int) -> int | None:
        """Of the optimum of all but task i; None: to know it of every task would take too much."""
        return None if self._beside is None else self._beside.without(i, self._num_slots)[0]

    @cached_property
    def _beside(self) -> Others | None:
        work = len(self.rows.sizes) * self._num_slots
        if work <= knapsack.PLAIN_NUM_MAX or self.rows.num * self._num_slots > BESIDE_NUM_MAX:
            return None
        return Others(self.rows, self._num_slots)

    @property
    def is_held_small(self) -> bool:
        """Whether `rest` is no burden: where few tasks run and very many wait, it would be."""
        return self.free.num * self._num_free <= REST_NUM_MAX

    @cached_property
    def free(self) -> Rows:
        """The tasks that `held` does not hold."""
        of_free = ~self._stays[self.rows.row_of]
        counts = np.diff(self.rows.starts)[~self._stays]
        return Rows(sizes=self.rows.sizes[of_free], gains=self.rows.gains[of_free],
                    starts=np.cumsum([0, *counts.tolist()], dtype=np.int64))

    @cached_property
    def rest(self) -> Ints:
        """[r, j]: what those from the r-th on make of j slots, of as many as they may ever have."""
        return suffixes(self.free, self._num_free)

    def shared(self, left: int) -> list[int]:
        """What each of them has of so many slots, at best; the first most."""
        if left not in self._shared:
            self._shared[left] = followed(self.free, self.rest, left)
        return self._shared[left]


class _Left:
    """One number of slots, and the events that leave so many."""

    def __init__(self, asked: PlanInput) -> None:
        self._asked = asked
        self._exact = objective.exact(asked.wishes, asked.running_s, asked.num_slots)
        self._most = self._exact.most()
        self._shift = objective.shift_of(self._most)
        wishes, exact = asked.wishes, self._exact
        row_of = np.repeat(np.arange(len(wishes)), np.diff(exact.starts))
        self._now: Ints = np.array([wish.now for wish in wishes], dtype=np.int64)
        has = np.flatnonzero(exact.sizes == self._now[row_of])
        self._at: Ints = np.full(len(wishes), -1, dtype=np.int64)
        """By row: the candidate that the task has, -1 where it is none."""
        self._at[row_of[has]] = has
        may = np.array([wish.hurt or wish.now == 0 for wish in wishes], dtype=np.bool_)
        self._stays: Bools = ~may & (self._at >= 0)
        """By row: whether `held` leaves the task as it is."""
        self._held_num = int(self._now[self._stays].sum())
        self._scales: dict[int, _Scale] = {}

    def plan_hurt(self, i: int) -> tuple[int, ...]:
        """The plan of `hurt`. Its optimum is not searched for where even that of nobody hurt would
        gain too little for the healthy to be changed."""
        scale, ours = self._hurt(i)
        if scale is not None and scale.is_held_small:
            held = self._held(scale, i, self._sizes(i), ours)
            if held is not None and planner.stays(self._asked, scale.rows, scale.earned,
                                                  (scale.slots, scale.gain), held):
                return held[0]
        return self.hurt(i).plan[0]

    def _sizes(self, i: int) -> Ints:
        return self._exact.sizes[self._exact.starts[i]:self._exact.starts[i + 1]]

    def _hurt(self, i: int) -> tuple[_Scale | None, Ints]:
        """The scale if a worker of task i failed, and on it the gains of the task's candidates."""
        wish, at = self._asked.wishes[i], int(self._at[i])
        begin, end = int(self._exact.starts[i]), int(self._exact.starts[i + 1])
        losses = self._exact.losses[begin:end].copy()
        if self._stays[i] and wish.now <= self._asked.num_slots:
            # else it pays already, has what earns nothing, or cannot have it any more
            losses[at - begin] = waf_of(wish, wish.now) * wish.transition.same_s
        most = float((np.abs(self._exact.earned[begin:end]) + losses).max())
        scale = self._scale([*self._most[:i], most, *self._most[i + 1:]])
        if scale is None:
            return None, np.zeros(0, dtype=np.int64)
        return scale, scale.earned[begin:end] - objective.scaled(losses, scale.shift)

    def hurt(self, i: int) -> Outlook:
        """A worker of task i failed."""
        wishes, at = self._asked.wishes, int(self._at[i])
        then = replace(self._asked, wishes=(
            *wishes[:i], replace(wishes[i], hurt=True), *wishes[i + 1:]))
        scale, ours = self._hurt(i)
        if scale is None:
            return _by_itself(then)
        begin, end = int(self._exact.starts[i]), int(self._exact.starts[i + 1])
        less = int(scale.rows.gains[at] - ours[at - begin]) if self._stays[i] else 0

        def made() -> tuple[Rows, Ints]:
            changed = scale.rows.gains.copy()
            changed[begin:end] = ours
            return replace(scale.rows, gains=changed), scale.earned

        if less == 0 or scale.vector[i] != at:
            optimum = (scale.slots, scale.gain)
        elif scale.is_less(i, scale.gain - less):
            optimum = (scale.slots, scale.gain - less)
        else:
            optimum = _best(made()[0], then.num_slots)
        if not self._changes(optimum[0], i):
            return Outlook(optimum=optimum, plan=optimum)
        return _outlook(then, made, optimum, self._held(scale, i, self._sizes(i), ours) if (
            scale.is_held_small) else _steady(then, made()[0]))

    def ended(self, i: int) -> Outlook:
        """Task i is there no more."""
        wishes = (*self._asked.wishes[:i], *self._asked.wishes[i + 1:])
        then = replace(self._asked, wishes=wishes)
        scale = self._scale([*self._most[:i], *self._most[i + 1:]])
        if scale is None:
            return _by_itself(then)
        begin, end = int(self._exact.starts[i]), int(self._exact.starts[i + 1])

        def made() -> tuple[Rows, Ints]:
            return without_row(scale.rows, i), np.delete(scale.earned, slice(begin, end))

        if scale.slots[i] == 0:
            optimum = ((*scale.slots[:i], *scale.slots[i + 1:]),
                       scale.gain - int(scale.rows.gains[begin]))
        else:
            optimum = _best(made()[0], then.num_slots, scale.gain_beside(i))

        if not self._changes((*optimum[0][:i], 0, *optimum[0][i:]), i):
            return Outlook(optimum=optimum, plan=optimum)
        return _outlook(then, made, optimum, self._held_beside(scale, i) if (
            scale.is_held_small) else _steady(then, made()[0]))

    def _scale(self, most: Sequence[float]) -> _Scale | None:
        """That of these largest gains; None: on it, ours would be too large."""
        shift = objective.shift_of(most)
        if shift > self._shift + 1:
            return None
        if shift not in self._scales:
            largest = int(self._now[self._stays].max(initial=0))
            self._scales[shift] = _Scale(
                self._exact, shift, self._asked.num_slots, self._at, self._stays,
                max(self._asked.num_slots - self._held_num + largest, 0))
        return self._scales[shift]

    def _changes(self, slots: tuple[int, ...], i: int) -> bool:
        """Whether a healthy task other than i is changed."""
        changed = self._stays & (np.array(slots, dtype=np.int64) != self._now)
        return int(changed.sum()) > int(changed[i])

    def _held(self, scale: _Scale, i: int, sizes: Ints, gains: Ints) -> Found | None:
        """The best with the other healthy tasks as they are, and task i on any of these sizes; of
        all that are as good, that in which the first task has most."""
        left, gain = self._asked.num_slots - self._held_num, scale.held_gain
        if not self._stays[i]:
            return (self._with_rest(scale, left), gain + int(scale.rest[0, left])) if (
                left >= 0) else None
        left, gain = left + int(self._now[i]), gain - int(scale.rows.gains[self._at[i]])
        fits = sizes[sizes <= left]
        if not len(fits):
            return None
        made = gains[sizes <= left] + scale.rest[0, left - fits]
        return max(self._with_rest(scale, left - x, (i, x)) for x in
                   fits[made == made.max()].tolist()), gain + int(made.max())

    def _held_beside(self, scale: _Scale, i: int) -> Found | None:
        """As `_held`, without task i."""
        none = np.zeros(1, dtype=np.int64)
        held = self._held(scale, i, none, none)
        if held is None or self._stays[i]:
            return held and ((*held[0][:i], *held[0][i + 1:]), held[1])
        if held[0][i] == 0:  # it is in nobody's way
            has_none = int(scale.rows.gains[self._exact.starts[i]])
            return (*held[0][:i], *held[0][i + 1:]), held[1] - has_none
        left, free = self._asked.num_slots - self._held_num, ~self._stays
        slots, gain = _best(without_row(scale.free, int(free[:i].sum())), left)
        found, others = np.delete(self._now, i), np.delete(free, i)
        found[others] = slots
        return tuple(found.tolist()), scale.held_gain + gain

    def _with_rest(self, scale: _Scale, left: int,
                   own: tuple[int, int] | None = None) -> tuple[int, ...]:
        """What each has, with the best of so many slots for those that are not held; `own`: a task
        and what it has instead."""
        slots = self._now.copy()
        slots[~self._stays] = scale.shared(left)
        if own is not None:
            slots[own[0]] = own[1]
        return tuple(slots.tolist())
