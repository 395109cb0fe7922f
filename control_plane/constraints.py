"""Plans under limits: few moves, quotas of teams, priorities; the best of all that keep them.

A dynamic programme over slots and moves: a team with a quota is one of its own, which gives one
row of many candidates. Where priorities differ, values are compared one priority after the other,
the highest first. It costs slots times moves for each candidate, so plans without limits are made
by `knapsack` alone, and a plan that keeps the limits by itself is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .core import Ints
from .rows import Found, Rows
from .tables import IMPOSSIBLE


class Limits(Struct, frozen=True, kw_only=True):
    """What a plan must keep, in the order of the rows."""

    now: tuple[int, ...]
    """By row: the slots that its task has."""
    healthy: tuple[bool, ...]
    """By row: it trains on them, undisturbed; another number is a move."""
    moves_max: int | None
    teams: tuple[tuple[tuple[int, ...], int], ...]
    """Rows that have at most so many slots together; no row in two of them."""
    priorities: tuple[int, ...]
    """By row; a higher one comes first. Empty: there is one alone."""

    def allow(self, slots: Sequence[int]) -> bool:
        """Whether a plan keeps the moves and the quotas."""
        return (self.moves_max is None or self.num_moves(slots) <= self.moves_max) and all(
            sum(slots[row] for row in rows) <= quota for rows, quota in self.teams)

    def num_moves(self, slots: Sequence[int]) -> int:
        """Healthy tasks that would have other slots."""
        return sum(healthy and x != now for x, now, healthy in
                   zip(slots, self.now, self.healthy, strict=True))

    def by_priority(self, gains: Sequence[int]) -> tuple[int, ...]:
        """Sums of what each row gains, the highest priority first."""
        if not self.priorities:
            return (sum(gains),)
        pairs = list(zip(gains, self.priorities, strict=True))
        return tuple(sum(gain for gain, priority in pairs if priority == one)
                     for one in sorted(set(self.priorities), reverse=True))


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
