"""The multiple-choice knapsack: one candidate of each row, most gain within a capacity, exactly.

Gains are integers, so every way of adding them up gives the same sum. Lagrange's bound leaves out
the candidates that no optimum has, and a dynamic programme over the rest finds it. Of all optima,
the one in which the first row takes most, of those the one in which the second does, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .candidates import Found, Rows
from .core import LOSS_NUM_MAX, Core, Ints, Kept, Sums
from .core_bitset import Bits
from .dynamic_program import IMPOSSIBLE, followed, suffixes

PLAIN_NUM_MAX = 1 << 14
"""Candidates times slots up to which plain dynamic programming is the quickest."""
_BUDGET_BITS, _BUDGET_STEP_BITS = 9, 3
_SMALL_NUM = 48
"""Candidates beside one of each row: where there are no more, one core is made, not several."""
_ROUNDS_NUM = 16
"""In which a vector is filled up."""
_LIKELY_NUM, _SWAPS_NUM = 64, 8
"""Candidates of each kind that are tried in pairs, and how many pairs are told."""
_SHORT_NUM = 4096
"""Candidates that are all looked at rather than chosen among first."""
_PRICE_BITS = 58
"""Price times size fits into 64 bits beside a gain."""
_PARTS_NUM_MAX = 32
"""A price is a whole number of so small parts at most; gains times that many fit too."""


def best(rows: Rows, capacity: int, gain: int | None = None) -> Found | None:
    """The optimum, None if nothing fits. `gain`: what it gains, where that is known."""
    if len(rows.sizes) * capacity <= PLAIN_NUM_MAX:
        after = suffixes(rows, capacity)
        most = int(after[0, capacity])
        return (tuple(followed(rows, after, capacity)), most) if most > IMPOSSIBLE // 2 else None
    solved = Solved.of(rows, capacity, gain=gain)
    return None if solved is None else (rows.slots(solved.vector), solved.gain)


class Relaxed(Struct, frozen=True, kw_only=True):
    """The rows at a price per slot, in `parts` of a unit of gain: no vector that fits gains more
    than `bound` parts."""

    parts: int
    price: int
    bound: int
    losses: Ints
    """By candidate: what it gives away against its row's best at this price, at least 0;
    LOSS_NUM_MAX where it does not fit beside the smallest of all others."""
    picks: Ints
    """By row: the smallest candidate that gives nothing away."""


class Solved(Struct, frozen=True, kw_only=True):
    """An optimum, and the bound by which it was found."""

    rows: Rows
    capacity: int
    units: Rows
    """The rows by the greatest number of slots that divides all sizes that fit; so is `relaxed`.
    Other sizes are rounded up: they do not fit either way."""
    units_num: int
    """That fit."""
    relaxed: Relaxed
    vector: Ints
    """By row: the candidate."""
    gain: int

    @classmethod
    def of(cls, rows: Rows, capacity: int, known: Found | None = None,
           gain: int | None = None) -> Solved | None:
        """None if nothing fits. `known`: the optimum, where it need not be searched for. `gain`:
        of the optimum, where that is known: one core is then enough to find it."""
        if not rows.num:
            none = np.zeros(0, np.int64)
            relaxed = Relaxed(parts=1, price=0, bound=0, losses=none, picks=none)
            return cls(rows=rows, capacity=capacity, units=rows, units_num=capacity,
                       relaxed=relaxed, vector=none, gain=0)
        unit = max(int(np.gcd.reduce(rows.sizes[_fits(rows, capacity)])), 1)
        units, units_num = replace(rows, sizes=-(-rows.sizes // unit)), capacity // unit
        found = _relax(units, units_num)
        if found is None:
            return None
        relaxed, *starts = found
        if known is not None:
            vector = rows.vector(known[0])
        elif gain is not None:
            vector = _Core(_kept(units, units_num, relaxed,
                                 relaxed.bound - relaxed.parts * gain)).vector()
        else:
            most = relaxed.bound - relaxed.parts * max(
                units.sums(_filled(units, start, units_num))[0] for start in starts)
            cores = (_Core(_kept(units, units_num, relaxed, budget))
                     for budget in _budgets(relaxed, 0, most))
            vector = next(core for core in cores if core.is_enough).vector()
        return cls(rows=rows, capacity=capacity, units=units, units_num=units_num,
                   relaxed=relaxed, vector=vector, gain=rows.sums(vector)[0])

    def next_best(self, work_num_max: int | None = None) -> Found | None:
        """The best vector but for the optimum; None: there is none, or it takes more work than
        `work_num_max` to find."""
        if not self.rows.num:
            return None
        rows, relaxed = self.rows, self.relaxed
        lost = relaxed.bound - relaxed.parts * self.gain
        for budget in (*_budgets(relaxed, lost, self._budget()), LOSS_NUM_MAX - 1):
            kept = _kept(self.units, self.units_num, relaxed, budget)
            if work_num_max is not None and kept.levels() is None and kept.work() > work_num_max:
                return None
            vector = _Core(kept).second(self.vector)
            if vector is not None:
                return rows.slots(vector), rows.sums(vector)[0]
        return None

    def _budget(self) -> int:
        """What the optimum loses at most with another change of one row that fits, or of two."""
        rows, vector = self.rows, self.vector
        now = vector[rows.row_of]
        extra = rows.sizes - rows.sizes[now]
        gain, slots = rows.sums(vector)
        fits = (extra <= self.capacity - slots) & (np.arange(len(now)) != now)
        single = (rows.gains[now] - rows.gains)[fits].min(initial=LOSS_NUM_MAX)
        least = min(int(single), -int(self._pairs(vector, slots)[2].max(initial=-LOSS_NUM_MAX)))
        if least >= LOSS_NUM_MAX:
            return LOSS_NUM_MAX - 1
        return self.relaxed.bound - self.relaxed.parts * (gain - max(least, 0))

    def swaps(self, chosen: Sequence[int]) -> list[Found]:
        """Vectors in which two rows change, of the likeliest changes, best first: one for each
        candidate that comes in."""
        rows, vector = self.rows, self.rows.vector(chosen)
        row_of, (gain, slots) = rows.row_of, rows.sums(vector)
        at, with_, best = self._pairs(vector, slots)
        found: list[Found] = []
        for one in np.argsort(-best, kind="stable")[:_SWAPS_NUM].tolist():
            if best[one] > -LOSS_NUM_MAX:
                other = vector.copy()
                for candidate in (at[one], at[with_[one]]):
                    other[row_of[candidate]] = candidate
                found.append((rows.slots(other), gain + int(best[one])))
        return found

    def _pairs(self, vector: Ints, slots: int) -> tuple[Ints, Ints, Ints]:
        """(likely candidates, the best of them to come in beside each, what both gain more than
        those of `vector`; -LOSS_NUM_MAX where no pair fits)."""
        rows, row_of = self.rows, self.rows.row_of
        at = self._likely(vector, row_of)
        rows_at = row_of[at]
        extra = rows.sizes[at] - rows.sizes[vector[rows_at]]
        more = rows.gains[at] - rows.gains[vector[rows_at]]
        fits = extra[:, None] + extra[None, :] <= self.capacity - slots
        fits &= rows_at[:, None] != rows_at[None, :]
        sums = np.where(fits, more[:, None] + more[None, :], -LOSS_NUM_MAX)
        with_ = sums.argmax(axis=1) if len(at) else at
        return at, with_, sums[np.arange(len(at)), with_]

    def _likely(self, vector: Ints, row_of: Ints) -> Ints:
        """Candidates that are likely to come in: those beside the ones that are there, and those
        that give least away; not those of `vector`."""
        losses = self.relaxed.losses
        beside = np.zeros(len(row_of), dtype=np.bool_)
        for step in (-1, 1):
            near = np.clip(vector + step, 0, len(row_of) - 1)
            beside[near[row_of[near] == np.arange(self.rows.num)]] = True
        beside[vector] = False
        rest = ~beside
        rest[vector] = False
        return np.concatenate([_least(np.flatnonzero(some), losses) for some in (beside, rest)])


class _Core:
    """What loses at most `budget` against the bound, solved by what is quicker for it."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        levels = kept.levels()
        self._core: Core = Sums(kept) if levels is None else Bits(kept, levels)

    @property
    def is_enough(self) -> bool:
        """Whether any vector loses so little: then the optimum is among them."""
        return self._core.least <= self._kept.budget

    def vector(self) -> Ints:
        """The optimum, as a candidate per row, where the budget is enough."""
        return self._core.vector()

    def second(self, vector: Ints) -> Ints | None:
        """The best but for the optimum `vector`, None where the budget is not enough."""
        return self._core.second(vector)


def _least(numbers: Ints, losses: Ints) -> Ints:
    """_LIKELY_NUM of these candidates, or all: those that lose least, of equal ones the first."""
    if len(numbers) <= _LIKELY_NUM:
        return numbers
    most = np.partition(losses[numbers], _LIKELY_NUM)[_LIKELY_NUM]
    under, tied = numbers[losses[numbers] < most], numbers[losses[numbers] == most]
    return np.concatenate((under, tied[:_LIKELY_NUM - len(under)]))


def _kept(rows: Rows, capacity: int, relaxed: Relaxed, budget: int) -> Kept:
    return Kept.of(rows.sizes, relaxed.losses, rows.row_of, relaxed.picks,
                   capacity=capacity, price=relaxed.price, budget=budget)


def _budgets(relaxed: Relaxed, least: int, most: int) -> Iterator[int]:
    """From little to `most`, which is known to do: what a small core finds it finds soonest."""
    if np.count_nonzero(relaxed.losses <= most) <= len(relaxed.picks) + _SMALL_NUM:
        least = most
    if least < most:
        yield least
    for shift in range(_BUDGET_BITS, 0, -_BUDGET_STEP_BITS):
        if least < most:
            yield least + (most - least >> shift)
    yield most


class _Part(Struct, frozen=True):
    """Candidates among which is the best of each row, at all prices that are still asked for."""

    numbers: Ints
    sizes: Ints
    gains: Ints
    row_of: Ints
    firsts: Ints
    """By row: its first place here."""

    def between(self, low: Ints, high: Ints) -> _Part:
        """By row from the size of candidate `low` to that of `high`; all where they are few."""
        if len(self.numbers) <= _SHORT_NUM:
            return self
        return self.only((self.numbers >= low[self.row_of]) & (self.numbers <= high[self.row_of]))

    def only(self, some: NDArray[np.bool_]) -> _Part:
        """These candidates; every row must have one."""
        if some.all():
            return self
        kept = np.flatnonzero(some)
        row_of = self.row_of[kept]
        counts = np.bincount(row_of, minlength=len(self.firsts))
        return _Part(self.numbers[kept], self.sizes[kept], self.gains[kept], row_of,
                     np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)[:-1])))

    def picked(self, price: int, capacity: int) -> tuple[Ints, int]:
        """(the smallest best candidate of each row at this price, the bound)."""
        left = self.gains - price * self.sizes
        most = np.maximum.reduceat(left, self.firsts)
        numbers = np.where(left == most[self.row_of], self.numbers, self.numbers[-1] + 1)
        return np.minimum.reduceat(numbers, self.firsts), int(most.sum()) + price * capacity


def _relax(rows: Rows, capacity: int) -> tuple[Relaxed, Ints, Ints] | None:
    """(at the price at which the bound is lowest, or near it; two vectors that fit, the second with
    as many of the rows as fit at what they would have with more), None if nothing fits.

    Newton's way down a convex function of straight pieces: the price at which what is too much and
    what fits gain alike is asked next. A row's pick lies between those of the two prices around.
    """
    row_of = rows.row_of
    price_max = (1 << _PRICE_BITS) // max(capacity, 1)
    vector = rows.starts[:-1]
    if (rows.sizes[vector] > capacity).any() or rows.sums(vector)[1] > capacity:
        return None
    fits = rows.sums(vector)
    part = _Part(np.arange(len(row_of)), rows.sizes, rows.gains, row_of, vector).only(
        _fits(rows, capacity))
    over_at, found = part.picked(0, capacity)
    over = rows.sums(over_at)
    if over[1] <= capacity:
        return _at(rows, capacity, row_of, 1, 0), over_at, over_at
    price = 0
    while True:
        part = part.between(vector, over_at)
        asked = min((over[0] - fits[0]) // (over[1] - fits[1]), price_max)
        picks, bound = part.picked(asked, capacity)
        sums = rows.sums(picks)
        if bound < found:
            found, price = bound, asked
        if sums in (over, fits):
            break
        if sums[1] > capacity:
            over, over_at = sums, picks
        else:
            fits, vector = sums, picks
    parts, exact = 1, price
    gain, slots = over[0] - fits[0], over[1] - fits[1]
    if gain // slots == price:
        common = math.gcd(gain, slots)
        if slots // common <= _PARTS_NUM_MAX and gain // common <= price_max:
            parts, exact = slots // common, gain // common
    grown = np.cumsum(rows.sizes[over_at] - rows.sizes[vector])
    more = np.arange(rows.num) < np.searchsorted(grown, capacity - fits[1], side="right")
    return (_at(rows, capacity, row_of, parts, exact), vector,
            np.where(more, over_at, vector))


def _fits(rows: Rows, capacity: int) -> NDArray[np.bool_]:
    """By candidate: whether it fits beside the smallest of all other rows."""
    least = np.minimum(rows.sizes[rows.starts[:-1]], capacity + 1)
    found: NDArray[np.bool_] = rows.sizes <= (capacity - int(least.sum()) + least)[rows.row_of]
    return found


def _at(rows: Rows, capacity: int, row_of: Ints, parts: int, price: int) -> Relaxed:
    fits, firsts = _fits(rows, capacity), rows.starts[:-1]
    left = np.where(fits, parts * rows.gains - price * np.minimum(rows.sizes, capacity),
                    -LOSS_NUM_MAX)
    most = np.maximum.reduceat(left, firsts)
    losses = np.where(fits, most[row_of] - left, LOSS_NUM_MAX)
    numbers = np.where(losses == 0, np.arange(len(row_of)), len(row_of))
    return Relaxed(parts=parts, price=price, bound=int(most.sum()) + price * capacity,
                   losses=losses, picks=np.minimum.reduceat(numbers, firsts))


def _filled(rows: Rows, vector: Ints, capacity: int) -> Ints:
    """A vector that fits, and on top of it, in a few rounds, the largest gains that fit."""
    row_of, firsts, vector = rows.row_of, rows.starts[:-1], vector.copy()
    numbers = np.arange(len(row_of))
    left = capacity - rows.sums(vector)[1]
    for _ in range(_ROUNDS_NUM):
        now = vector[row_of]
        extra = rows.sizes - rows.sizes[now]
        more = np.where(extra <= left, rows.gains - rows.gains[now], 0)
        most = np.maximum.reduceat(more, firsts)
        gaining = np.flatnonzero(most > 0)
        if not len(gaining):
            break
        order = gaining[np.argsort(-most[gaining], kind="stable")]
        to = np.minimum.reduceat(np.where(more == most[row_of], numbers, len(numbers)), firsts)
        taken = np.cumsum(extra[to[order]])
        fits = int(np.searchsorted(np.maximum.accumulate(taken), left, side="right"))
        vector[order[:fits]] = to[order[:fits]]
        left -= int(taken[fits - 1])
    return vector
