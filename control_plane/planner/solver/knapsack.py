"""The multiple-choice knapsack: one candidate of each row, the largest gain within a capacity.

Exact, in integers (docs/decisions/planner-bound.md). Among tied optima, the optimum with the
largest size in the first row is chosen, then in the second row, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from .candidates import Candidates, SlotsAndGain
from .core import LOSS_NUM_MAX, Core, CoreProblem, Ints

_BUDGET_BITS, _BUDGET_STEP_BITS = 9, 3
_SMALL_NUM = 48
"""Up to this number of candidates beside one per row, one core is built instead of several."""
_LIKELY_NUM = 64
"""The most candidates of each kind that are tried in pairs."""
_PRICE_BITS = 58
"""With prices up to 2^58 / capacity, price times size plus a gain fits into 64 bits."""
_DENOMINATOR_NUM_MAX = 32
"""The largest denominator of a price. A gain times this denominator fits into 64 bits, too."""


def best(rows: Candidates, capacity: int) -> SlotsAndGain | None:
    """The optimum; None if nothing fits."""
    solved = Solution.of(rows, capacity)
    return None if solved is None else (rows.slots(solved.vector), solved.gain)


class Relaxation(Struct, frozen=True, kw_only=True):
    """The Lagrangian relaxation with a price per slot. `price`, `bound` and `losses` are multiples
    of 1 / `denominator` of the unit of gain. No vector that fits gains more than `bound`."""

    denominator: int
    price: int
    bound: int
    losses: Ints
    """The reduced cost: the distance from the best of its row. LOSS_NUM_MAX: it does not fit."""
    picks: Ints
    """The choice of the relaxation by row: the smallest candidate with loss 0."""


class Solution(Struct, frozen=True, kw_only=True):
    """An optimum, and the relaxation that led to it."""

    rows: Candidates
    capacity: int
    units: Candidates
    """The rows in units of the gcd of all sizes that fit. Other sizes are rounded up."""
    units_num: int
    """The capacity in these units, which `relaxed` uses as well."""
    relaxed: Relaxation
    vector: Ints
    """The chosen candidate by row."""
    gain: int

    @classmethod
    def of(cls, rows: Candidates, capacity: int) -> Solution | None:
        """Solve; None if nothing fits."""
        if not rows.num:
            none = np.zeros(0, np.int64)
            relaxed = Relaxation(denominator=1, price=0, bound=0, losses=none, picks=none)
            return cls(
                rows=rows,
                capacity=capacity,
                units=rows,
                units_num=capacity,
                relaxed=relaxed,
                vector=none,
                gain=0,
            )
        unit = max(int(np.gcd.reduce(rows.sizes[_fits(rows, capacity)])), 1)
        units, units_num = replace(rows, sizes=-(-rows.sizes // unit)), capacity // unit
        found = _relax(units, units_num)
        if found is None:
            return None
        relaxed, start = found
        most = relaxed.bound - relaxed.denominator * units.sums(start)[0]
        cores = (
            (budget, Core(_core_problem(units, units_num, relaxed, budget)))
            for budget in _budgets(relaxed, 0, most)
        )
        vector = next(core.vector() for budget, core in cores if core.least <= budget)
        return cls(
            rows=rows,
            capacity=capacity,
            units=units,
            units_num=units_num,
            relaxed=relaxed,
            vector=vector,
            gain=rows.sums(vector)[0],
        )

    def next_best(self, work_num_max: int | None = None) -> SlotsAndGain | None:
        """The best vector except the optimum; None if there is none or the work is too much."""
        if not self.rows.num:
            return None
        rows, relaxed = self.rows, self.relaxed
        lost = relaxed.bound - relaxed.denominator * self.gain
        for budget in (*_budgets(relaxed, lost, self._budget()), LOSS_NUM_MAX - 1):
            kept = _core_problem(self.units, self.units_num, relaxed, budget)
            if work_num_max is not None and kept.work() > work_num_max and not kept.ties():
                return None
            vector = Core(kept).second(self.vector)
            if vector is not None:
                return rows.slots(vector), rows.sums(vector)[0]
        return None

    def _budget(self) -> int:
        """An upper bound of the next best's loss, from the best change of one or two rows."""
        rows, vector = self.rows, self.vector
        now = vector[rows.row_of]
        extra = rows.sizes - rows.sizes[now]
        gain, slots = rows.sums(vector)
        fits = (extra <= self.capacity - slots) & (np.arange(len(now)) != now)
        single = (rows.gains[now] - rows.gains)[fits].min(initial=LOSS_NUM_MAX)
        least = min(int(single), -int(self._pairs()[2].max(initial=-LOSS_NUM_MAX)))
        if least >= LOSS_NUM_MAX:
            return LOSS_NUM_MAX - 1
        return self.relaxed.bound - self.relaxed.denominator * (gain - max(least, 0))

    def swap(self) -> SlotsAndGain | None:
        """The best of the likeliest changes of two rows; None if none fits."""
        at, with_, sums = self._pairs()
        if sums.max(initial=-LOSS_NUM_MAX) == -LOSS_NUM_MAX:
            return None
        best, other = int(sums.argmax()), self.vector.copy()
        for candidate in (at[best], at[with_[best]]):
            other[self.rows.row_of[candidate]] = candidate
        return self.rows.slots(other), self.gain + int(sums[best])

    def _pairs(self) -> tuple[Ints, Ints, Ints]:
        """(likely candidates, the best partner of each, the pair's gain; -LOSS_NUM_MAX: none)."""
        rows, row_of, vector = self.rows, self.rows.row_of, self.vector
        slots, at = rows.sums(vector)[1], self._likely(row_of)
        rows_at = row_of[at]
        extra = rows.sizes[at] - rows.sizes[vector[rows_at]]
        more = rows.gains[at] - rows.gains[vector[rows_at]]
        fits = extra[:, None] + extra[None, :] <= self.capacity - slots
        fits &= rows_at[:, None] != rows_at[None, :]
        sums = np.where(fits, more[:, None] + more[None, :], -LOSS_NUM_MAX)
        with_ = sums.argmax(axis=1) if len(at) else at
        return at, with_, sums[np.arange(len(at)), with_]

    def _likely(self, row_of: Ints) -> Ints:
        """Likely candidates: the least losses among neighbours of `vector` and among all others."""
        vector, losses = self.vector, self.relaxed.losses
        beside = np.zeros(len(row_of), dtype=np.bool_)
        for step in (-1, 1):
            near = np.clip(vector + step, 0, len(row_of) - 1)
            beside[near[row_of[near] == np.arange(self.rows.num)]] = True
        beside[vector] = False
        rest = ~beside
        rest[vector] = False
        return np.concatenate([_least(np.flatnonzero(some), losses) for some in (beside, rest)])


def _least(numbers: Ints, losses: Ints) -> Ints:
    """The _LIKELY_NUM candidates among `numbers` with the least loss, on a tie the first ones."""
    if len(numbers) <= _LIKELY_NUM:
        return numbers
    most = np.partition(losses[numbers], _LIKELY_NUM)[_LIKELY_NUM]
    under, tied = numbers[losses[numbers] < most], numbers[losses[numbers] == most]
    return np.concatenate((under, tied[: _LIKELY_NUM - len(under)]))


def _core_problem(rows: Candidates, capacity: int, relaxed: Relaxation, budget: int) -> CoreProblem:
    return CoreProblem.of(
        rows.sizes,
        relaxed.losses,
        rows.row_of,
        relaxed.picks,
        capacity=capacity,
        price=relaxed.price,
        budget=budget,
    )


def _budgets(relaxed: Relaxation, least: int, most: int) -> Iterator[int]:
    """Ascending budgets, so that small cores are tried first. The last, `most`, is sufficient."""
    if np.count_nonzero(relaxed.losses <= most) <= len(relaxed.picks) + _SMALL_NUM:
        least = most
    if least < most:
        yield least
    for shift in range(_BUDGET_BITS, 0, -_BUDGET_STEP_BITS):
        if least < most:
            yield least + (most - least >> shift)
    yield most


def _relax(rows: Candidates, capacity: int) -> tuple[Relaxation, Ints] | None:
    """(the relaxation at or near the price with the lowest bound, a vector that fits); None if
    nothing fits.

    Newton's method on a convex, piecewise linear function. One vector is too large, another fits;
    the next price is the price at which both have equal value.
    """
    row_of, price_max = rows.row_of, (1 << _PRICE_BITS) // max(capacity, 1)
    vector = rows.starts[:-1]
    if (rows.sizes[vector] > capacity).any() or rows.sums(vector)[1] > capacity:
        return None
    fitting, fits = _fits(rows, capacity), rows.sums(vector)
    found = _at(rows, capacity, row_of, fitting, 1, 0)
    over_at = found.picks
    over = rows.sums(over_at)
    if over[1] <= capacity:
        return found, over_at
    while True:
        price = min((over[0] - fits[0]) // (over[1] - fits[1]), price_max)
        tried = _at(rows, capacity, row_of, fitting, 1, price)
        sums = rows.sums(tried.picks)
        if tried.bound < found.bound:
            found = tried
        if sums in (over, fits):
            break
        if sums[1] > capacity:
            over, over_at = sums, tried.picks
        else:
            fits, vector = sums, tried.picks
    gain, slots = over[0] - fits[0], over[1] - fits[1]
    if gain // slots == found.price:
        common = math.gcd(gain, slots)
        if slots // common <= _DENOMINATOR_NUM_MAX and gain // common <= price_max:
            found = _at(rows, capacity, row_of, fitting, slots // common, gain // common)
    return found, vector


def _fits(rows: Candidates, capacity: int) -> NDArray[np.bool_]:
    """By candidate: True if it fits beside the smallest candidates of all other rows."""
    least = np.minimum(rows.sizes[rows.starts[:-1]], capacity + 1)
    found: NDArray[np.bool_] = rows.sizes <= (capacity - int(least.sum()) + least)[rows.row_of]
    return found


def _at(
    rows: Candidates,
    capacity: int,
    row_of: Ints,
    fits: NDArray[np.bool_],
    denominator: int,
    price: int,
) -> Relaxation:
    """The relaxation at this price; `fits` is that of `_fits`."""
    firsts = rows.starts[:-1]
    left = np.where(
        fits, denominator * rows.gains - price * np.minimum(rows.sizes, capacity), -LOSS_NUM_MAX
    )
    most = np.maximum.reduceat(left, firsts)
    losses = np.where(fits, most[row_of] - left, LOSS_NUM_MAX)
    tied = (losses == 0).nonzero()[0]
    return Relaxation(
        denominator=denominator,
        price=price,
        losses=losses,
        bound=int(most.sum()) + price * capacity,
        picks=tied[tied.searchsorted(firsts)],
    )
