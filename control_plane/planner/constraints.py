"""Plans under limits: few moves, quotas of teams, priorities; the best of all that keep them.

A dynamic programme over slots and moves: a team with a quota is one of its own, which gives one
row of many candidates. Where priorities differ, values are compared one priority after the other,
the highest first. It costs slots times moves for each candidate, so plans without limits are made
by `knapsack` alone, and a plan that keeps the limits by itself is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .problem import Limits, PlanInput, Wish, waf_of
from .solver.candidates import Found, Rows
from .solver.core import Ints
from .solver.dynamic_program import IMPOSSIBLE


def best(rows: Rows, capacity: int, limits: Limits) -> Found | None:
    """The best that fits and keeps the limits, None if nothing fits.

    Where no plan moves so few, the fewest moves with which one fits. Of equal plans always the same
    one.
    """
    found = within(rows, capacity, limits)
    if found is None and limits.moves_max is not None:
        few = within(_moves_as_losses(rows, limits), capacity,
                     replace(limits, moves_max=None, priorities=()))
        if few is not None:
            found = within(rows, capacity, replace(limits, moves_max=-few[1]))
    return found


def within(rows: Rows, capacity: int, limits: Limits) -> Found | None:
    """The same, but None where no plan moves so few."""
    slots = _Search(rows, capacity, limits).slots()
    return None if slots is None else (slots, rows.sums(rows.vector(slots))[0])


def _moves_as_losses(rows: Rows, limits: Limits) -> Rows:
    """Each move gains -1, all else nothing."""
    row_of = rows.row_of
    healthy, now = np.array(limits.healthy)[row_of], np.array(limits.now)[row_of]
    return Rows(sizes=rows.sizes, starts=rows.starts,
                gains=-(healthy & (rows.sizes != now)).astype(np.int64))


class _Option(Struct, frozen=True):
    size: int
    moves: int
    gains: tuple[int, ...]
    """By priority."""


class _Layer(Struct, frozen=True):
    """One unit added to those after it: which of its options each state takes; moves x slots."""

    options: list[_Option]
    choices: NDArray[np.unsignedinteger[Any]]
    """Of the smallest type that counts the options; 0 too for states that nothing reaches."""


class _Search:
    """One search, with at most so many moves. Sizes are in units of their greatest divisor."""

    def __init__(self, rows: Rows, capacity: int, limits: Limits) -> None:
        self._rows, self._limits = rows, limits
        self._num_moves = min(limits.moves_max or 0, sum(limits.healthy))
        self._unit = max(int(np.gcd.reduce(rows.sizes)), 1) if len(rows.sizes) else 1
        self._capacity = min(capacity, _most(rows)) // self._unit
        self._priorities = sorted(set(limits.priorities), reverse=True) or [0]

    def slots(self) -> tuple[int, ...] | None:
        """The sizes by row, None if nothing fits."""
        of_team = {row: (team, quota) for team, quota in self._limits.teams for row in team}
        units: list[tuple[tuple[int, ...], int | None]] = []
        for row in range(self._rows.num):
            team, quota = of_team.get(row, ((row,), None))
            if row == team[0]:
                units.append((team, quota))
        layers: list[tuple[_Layer, list[_Layer]]] = []
        values = self._empty(self._capacity)
        for team, quota in reversed(units):
            inner: list[_Layer] = []
            if quota is None:
                options = self._options(team[0])
            else:
                inner_values = self._empty(min(quota // self._unit, self._capacity))
                for row in reversed(team):
                    inner_values, layer = _add(inner_values, self._options(row))
                    inner.append(layer)
                options = _useful(inner_values)
            values, layer = _add(values, options)
            layers.append((layer, inner[::-1]))
        if values[0, -1, -1] <= IMPOSSIBLE // 2:
            return None
        return self._follow(units, layers[::-1])

    def _follow(self, units: Sequence[tuple[tuple[int, ...], int | None]],
                layers: Sequence[tuple[_Layer, list[_Layer]]]) -> tuple[int, ...]:
        found = [0] * self._rows.num
        moves, left = self._num_moves, self._capacity
        for (team, quota), (layer, inner) in zip(units, layers, strict=True):
            option = layer.options[int(layer.choices[moves, left])]
            if quota is None:
                found[team[0]] = option.size * self._unit
            at = option.moves, option.size
            for row, one in zip(team, inner, strict=False):
                own = one.options[int(one.choices[at])]
                found[row] = own.size * self._unit
                at = at[0] - own.moves, at[1] - own.size
            moves, left = moves - option.moves, left - option.size
        return tuple(found)

    def _empty(self, capacity: int) -> Ints:
        return np.zeros((len(self._priorities), self._num_moves + 1, capacity + 1), dtype=np.int64)

    def _options(self, row: int) -> list[_Option]:
        limits, part = self._limits, self._rows.part(row, row + 1)
        priority = self._priorities.index(limits.priorities[row]) if limits.priorities else 0
        counted = limits.moves_max is not None and limits.healthy[row]
        return [_Option(size // self._unit, int(counted and size != limits.now[row]),
                        tuple(gain if at == priority else 0 for at in range(len(self._priorities))))
                for size, gain in zip(part.sizes.tolist(), part.gains.tolist(), strict=True)]


def _most(rows: Rows) -> int:
    """Slots that the rows can take at all."""
    return sum(rows.sizes[rows.starts[1:] - 1].tolist())


def _add(values: Ints, options: list[_Option]) -> tuple[Ints, _Layer]:
    """One unit before the others: for each state the best option, of equal ones the last."""
    found = np.full_like(values, IMPOSSIBLE)
    choices = np.zeros(values.shape[1:], dtype=np.min_scalar_type(max(len(options) - 1, 0)))
    _, num_moves, num_slots = values.shape
    for number, option in enumerate(options):
        if option.moves >= num_moves or option.size >= num_slots:
            continue
        gains = np.array(option.gains, dtype=np.int64)[:, None, None]
        offered = values[:, :num_moves - option.moves, :num_slots - option.size] + gains
        known = found[:, option.moves:, option.size:]
        better = _at_least(offered, known)
        np.copyto(known, offered, where=better)
        np.copyto(choices[option.moves:, option.size:], choices.dtype.type(number), where=better)
    return found, _Layer(options, choices)


def _at_least(new: Ints, old: Ints) -> NDArray[np.bool_]:
    """By state: whether the values are not worse, compared from the first priority on."""
    found: NDArray[np.bool_] = new[-1] >= old[-1]
    for priority in range(len(new) - 2, -1, -1):
        found = (new[priority] > old[priority]) | ((new[priority] == old[priority]) & found)
    return found


def _useful(within: Ints) -> list[_Option]:
    """What a team can make of its slots and moves, without what it can make with fewer slots."""
    new = np.ones(within.shape[1:], dtype=np.bool_)
    new[:, 1:] = (within[:, :, 1:] != within[:, :, :-1]).any(axis=0)
    new &= within[0] > IMPOSSIBLE // 2
    return [_Option(size, moves, tuple(within[:, moves, size].tolist()))
            for size, moves in sorted((size, moves) for moves, size in np.argwhere(new).tolist())]


# --- Floors: the fewest slots that a plan gives a task, and whose floors fit together. ---
#
# Where not all do, they are given in order while they still fit: a higher priority first, then a
# higher weight, then the earlier task. Who is not given one has none in this plan.


def are_asked(asked: PlanInput) -> bool:
    """Whether a plan of this input has floors to think of."""
    all_ask = asked.floor or asked.alpha >= 1
    return any((all_ask or wish.floor) and asks(asked, wish) for wish in asked.wishes)


def are_set(asked: PlanInput) -> bool:
    """Whether any of them is asked for by a job or the policy, and not by alpha alone."""
    return are_asked(replace(asked, alpha=0.0))


def is_plain(asked: PlanInput) -> bool:
    """Whether the plan is of the most WAF, without floors."""
    return not asked.alpha and not are_asked(asked)


def asks(asked: PlanInput, wish: Wish) -> tuple[int, ...]:
    """The floors that a task would have, the one that it asks for first; most have none or one.

    Where its own does not fit, it is given the smallest size that earns anything, if the policy
    gives each task that, or with nothing it would be worth minus infinity. A task that earns
    nothing on any size has none.
    """
    least = asked.floor or asked.alpha >= 1
    levels = (*([wish.floor] if wish.floor else []), *([0] if least else []))
    found = (next((size for size, waf in zip(wish.sizes, wish.wafs, strict=True)
                   if waf > 0 and size >= level), 0) for level in levels)
    return tuple(dict.fromkeys(floor for floor in found if floor))


def without(asked: PlanInput) -> PlanInput:
    """The same with no floor asked for but by alpha."""
    return replace(asked, floor=False, wishes=tuple(
        replace(wish, floor=0) if wish.floor else wish for wish in asked.wishes))


def given(asked: PlanInput) -> tuple[int, ...]:
    """By wish: its floor in this plan, 0 where it has none. Together they fit, also into quotas."""
    wishes, found = asked.wishes, [0] * len(asked.wishes)
    left, of_team = asked.num_slots, dict(asked.quotas)
    for i in sorted(range(len(wishes)), key=lambda i: _place(wishes[i])):
        for floor in asks(asked, wishes[i]):
            team = wishes[i].team
            if floor <= left and floor <= of_team.get(team, floor):
                found[i] = floor
                left -= floor
                if team in of_team:
                    of_team[team] -= floor
                break
    return tuple(found)


def _place(wish: Wish) -> tuple[int, float, int]:
    return -wish.priority, -wish.weight, wish.task


def kept(asked: PlanInput, rows: Rows) -> NDArray[np.bool_]:
    """By candidate: whether the floors leave it. From alpha 1 on, who has none has no slots."""
    least, row_of = np.array(given(asked), dtype=np.int64), rows.row_of
    found: NDArray[np.bool_] = rows.sizes >= least[row_of]
    if asked.alpha >= 1:
        earns = np.array([bool(asks(asked, wish)) for wish in asked.wishes], dtype=np.bool_)
        found &= (rows.sizes == 0) | (least > 0)[row_of] | ~earns[row_of]
    return found


def starved(asked: PlanInput, slots: Sequence[int]) -> tuple[int, ...]:
    """Tasks that could earn something, and do not."""
    return tuple(wish.task for wish, x in zip(asked.wishes, slots, strict=True)
                 if not waf_of(wish, x) and any(wish.wafs))


def short(asked: PlanInput, slots: Sequence[int]) -> dict[int, int]:
    """By task that a plan gives less than the floor that it asks for: the least that would be one.

    Where that is all that it has, there was no room for more.
    """
    found: dict[int, int] = {}
    for wish, x in zip(asked.wishes, slots, strict=True):
        wanted = asks(asked, wish)
        if wanted and x < wanted[0]:
            found[wish.task] = next(floor for floor in wanted[::-1] if floor > x)
    return found


def barred_by_quota(asked: PlanInput, tasks: Iterable[int]) -> tuple[int, ...]:
    """Those of `tasks` that would have a floor if their own team alone had no quota."""
    found: list[int] = []
    row_of = {wish.task: row for row, wish in enumerate(asked.wishes)}
    quotas, teams = dict(asked.quotas), dict[str, tuple[int, ...]]()
    for task in tasks:
        team = asked.wishes[row_of[task]].team
        if team not in quotas:
            continue
        if team not in teams:
            teams[team] = given(replace(asked, quotas=tuple(
                x for x in asked.quotas if x[0] != team)))
        if teams[team][row_of[task]]:
            found.append(task)
    return tuple(found)
