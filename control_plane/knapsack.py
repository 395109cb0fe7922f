"""The multiple-choice knapsack: one candidate of each row, most gain within a capacity, exactly.

Gains are integers, so every way of adding them up gives the same sum. Lagrange's bound leaves out
the candidates that no optimum has, and a dynamic programme over the rest finds it. Of all optima,
the one in which the first row takes most, of those the one in which the second does, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Found = tuple[tuple[int, ...], int]
"""Slots per row, and the sum of their gains."""
LOSS_NUM_MAX = 1 << 60
"""More than any loss: no vector."""
_BUDGET_BITS, _BUDGET_STEP_BITS = 9, 3
_SMALL_NUM = 48
"""Candidates beside one of each row: where there are no more, one core is made, not several."""
_PRICE_BITS = 61
"""Price times size fits into 64 bits beside a gain."""


class Rows(Struct, frozen=True, kw_only=True):
    """Row r's candidates are at starts[r]..starts[r + 1] of `sizes` and `gains`; at least one.

    Sizes ascend within a row, each once, from 0 on. The largest |gain| of each row add up to less
    than 2^53.
    """

    sizes: Ints
    gains: Ints
    starts: Ints
    """One more than there are rows."""

    @property
    def num(self) -> int:
        return len(self.starts) - 1

    @property
    def row_of(self) -> Ints:
        """By candidate."""
        return np.repeat(np.arange(self.num), np.diff(self.starts))

    def only(self, kept: NDArray[np.bool_]) -> Rows:
        """The rows with these candidates alone; every row must have one."""
        counts = np.bincount(self.row_of[kept], minlength=self.num)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Rows(sizes=self.sizes[kept], gains=self.gains[kept], starts=starts)

    def part(self, begin: int, end: int) -> Rows:
        """Rows begin..end."""
        starts = self.starts[begin:end + 1]
        inner = slice(int(starts[0]), int(starts[-1]))
        return Rows(sizes=self.sizes[inner], gains=self.gains[inner], starts=starts - starts[0])

    def sums(self, vector: Ints) -> tuple[int, int]:
        """(gain, slots) of one candidate per row."""
        return int(self.gains[vector].sum()), int(self.sizes[vector].sum())

    def vector(self, slots: Sequence[int]) -> Ints:
        """The candidates of these sizes, which must be among them."""
        wanted = np.array(slots, dtype=np.int64)[self.row_of]
        return np.flatnonzero(self.sizes == wanted)

    def slots(self, vector: Ints) -> tuple[int, ...]:
        return tuple(self.sizes[vector].tolist())


def rows_of(found: Sequence[Sequence[tuple[int, int]]]) -> Rows:
    """From (size, gain) pairs per row."""
    flat = [pair for row in found for pair in row]
    starts = np.cumsum([0, *(len(row) for row in found)], dtype=np.int64)
    return Rows(sizes=np.array([size for size, _ in flat], dtype=np.int64),
                gains=np.array([gain for _, gain in flat], dtype=np.int64), starts=starts)


def best(rows: Rows, capacity: int) -> Found | None:
    """The optimum, None if nothing fits."""
    solved = Solved.of(rows, capacity)
    return None if solved is None else (rows.slots(solved.vector), solved.gain)


class Relaxed(Struct, frozen=True, kw_only=True):
    """The rows at a price per slot: no vector that fits gains more than `bound`."""

    price: int
    bound: int
    losses: Ints
    """By candidate: what it gives away against its row's best at this price, at least 0."""
    picks: Ints
    """By row: the smallest candidate that gives nothing away."""


class Solved(Struct, frozen=True, kw_only=True):
    """An optimum, and the bound by which it was found."""

    rows: Rows
    capacity: int
    relaxed: Relaxed
    vector: Ints
    """By row: the candidate."""
    gain: int

    @classmethod
    def of(cls, rows: Rows, capacity: int, known: Found | None = None) -> Solved | None:
        """None if nothing fits. `known`: the optimum, where it need not be searched for."""
        if not rows.num:
            none = np.zeros(0, np.int64)
            relaxed = Relaxed(price=0, bound=0, losses=none, picks=none)
            return cls(rows=rows, capacity=capacity, relaxed=relaxed, vector=none, gain=0)
        found = _relax(rows, capacity)
        if found is None:
            return None
        relaxed, fits = found
        if known is not None:
            return cls(rows=rows, capacity=capacity, relaxed=relaxed,
                       vector=rows.vector(known[0]), gain=known[1])
        most = relaxed.bound - rows.sums(_filled(rows, fits, capacity))[0]
        cores = (Core(rows, relaxed, capacity, budget) for budget in _budgets(relaxed, 0, most))
        vector = next(core for core in cores if core.is_enough).vector()
        return cls(rows=rows, capacity=capacity, relaxed=relaxed, vector=vector,
                   gain=rows.sums(vector)[0])

    def runners_up(self, chosen: Sequence[int], num: int) -> Iterator[tuple[int, int, Found]]:
        """For each row and each size that is not `chosen`, the best vector with it; best first.

        Quick for about the first `num` of them.
        """
        if not self.rows.num:
            return
        vector = self.rows.vector(chosen)
        known: set[tuple[int, int]] = set()
        lost = self.relaxed.bound - self.gain
        most = self._budget(vector, num)
        for budget in (*_budgets(self.relaxed, lost, most), LOSS_NUM_MAX - 1):
            core = Core(self.rows, self.relaxed, self.capacity, budget)
            for loss, row, candidate in core.others(vector):
                if (row, candidate) not in known:
                    known.add((row, candidate))
                    yield (row, int(self.rows.sizes[candidate]),
                           (self.rows.slots(core.through(row, candidate)),
                            self.relaxed.bound - loss))

    def _budget(self, vector: Ints, num: int) -> int:
        """What a vector loses at most with `num` different changes of one row, each that fits."""
        rows, relaxed = self.rows, self.relaxed
        now = vector[rows.row_of]
        extra = rows.sizes - rows.sizes[now]
        gain, slots = rows.sums(vector)
        left = self.capacity - slots
        fits = (extra <= left) & (np.arange(len(now)) != now)
        losses = np.sort((rows.gains[now] - rows.gains)[fits])
        if len(losses) < num:
            return LOSS_NUM_MAX - 1
        return relaxed.bound - gain + max(int(losses[num - 1]), 0)


def _budgets(relaxed: Relaxed, least: int, most: int) -> Iterator[int]:
    """From little to `most`, which is known to do: what a small core finds it finds soonest."""
    if np.count_nonzero(relaxed.losses <= most) <= len(relaxed.picks) + _SMALL_NUM:
        least = most
    for shift in range(_BUDGET_BITS, 0, -_BUDGET_STEP_BITS):
        if least < most:
            yield least + (most - least >> shift)
    yield most


def _relax(rows: Rows, capacity: int) -> tuple[Relaxed, Ints] | None:
    """(near the price at which the bound is lowest, a vector that fits), None if nothing fits.

    Newton's way down a convex function of straight pieces: the price at which what is too much and
    what fits gain alike is asked next.
    """
    firsts, row_of = rows.starts[:-1], rows.row_of
    numbers = np.arange(len(row_of))
    price_max = (1 << _PRICE_BITS) // max(int(rows.sizes.max()), capacity, 1)

    def at(price: int) -> Relaxed:
        left = rows.gains - price * rows.sizes
        most = np.maximum.reduceat(left, firsts)
        losses = most[row_of] - left
        picks = np.minimum.reduceat(np.where(losses == 0, numbers, len(numbers)), firsts)
        return Relaxed(price=price, bound=int(most.sum()) + price * capacity, losses=losses,
                       picks=picks)

    vector, fits = firsts, rows.sums(firsts)
    if fits[1] > capacity:
        return None
    found = at(0)
    over = rows.sums(found.picks)
    if over[1] <= capacity:
        return found, found.picks
    while True:
        new = at(min((over[0] - fits[0]) // (over[1] - fits[1]), price_max))
        sums = rows.sums(new.picks)
        if new.bound < found.bound:
            found = new
        if sums in (over, fits):
            return found, vector
        if sums[1] > capacity:
            over = sums
        else:
            fits, vector = sums, new.picks


def _filled(rows: Rows, vector: Ints, capacity: int) -> Ints:
    """A vector that fits, and on top of it the largest single gains, while one fits."""
    row_of, vector = rows.row_of, vector.copy()
    left = capacity - rows.sums(vector)[1]
    while True:
        now = vector[row_of]
        extra = rows.sizes - rows.sizes[now]
        more = np.where(extra <= left, rows.gains - rows.gains[now], 0)
        most = int(np.argmax(more))
        if more[most] <= 0:
            return vector
        left -= int(extra[most])
        vector[row_of[most]] = most


class Table(Struct, frozen=True):
    """Least loss by state, from the state `first` on; elsewhere no vector."""

    first: int
    losses: Ints

    def at(self, state: int) -> int:
        place = state - self.first
        return int(self.losses[place]) if 0 <= place < len(self.losses) else LOSS_NUM_MAX


class Core:
    """All vectors that lose at most `budget` against the bound, by dynamic programming.

    Only rows with a choice are left. A state is how many slots more are left than the picks of the
    rows to come would take.
    """

    def __init__(self, rows: Rows, relaxed: Relaxed, capacity: int, budget: int) -> None:
        self._relaxed, self._budget = relaxed, budget
        self._start = capacity - rows.sums(relaxed.picks)[1]
        kept = np.flatnonzero(relaxed.losses <= budget)
        counts = np.bincount(rows.row_of[kept], minlength=rows.num)
        ends = np.cumsum(counts)
        self._open: list[int] = np.flatnonzero(counts > 1).tolist()
        self._options: list[list[int]] = []
        """By open row: candidates; then slots more than the pick's, ascending, and losses."""
        self._moves: list[list[int]] = []
        self._losses: list[list[int]] = []
        for row in self._open:
            options = kept[ends[row] - counts[row]:ends[row]]
            self._options.append(options.tolist())
            self._moves.append((rows.sizes[options] - rows.sizes[relaxed.picks[row]]).tolist())
            self._losses.append(relaxed.losses[options].tolist())
        most = np.cumsum([0, *(moves[-1] for moves in self._moves)]).tolist()
        least = np.cumsum([0, *(moves[0] for moves in self._moves)]).tolist()
        self._reached = [(self._start - high, self._start - low)
                         for high, low in zip(most, least, strict=True)]
        """By open row, and after the last: between which states it can be reached."""
        self._after = self._backward()

    @property
    def is_enough(self) -> bool:
        """Whether any vector loses so little: then the optimum is among them."""
        return self._after[0].at(self._start) <= self._budget

    def vector(self) -> Ints:
        """The optimum, as a candidate per row, where the budget is enough."""
        chosen = self._relaxed.picks.copy()
        self._follow(chosen, 0, self._start)
        return chosen

    def others(self, vector: Ints) -> list[tuple[int, int, int]]:
        """(loss, row, candidate) of the best vector with each candidate not in `vector`."""
        self._before = self._forward()
        picks = self._relaxed.picks
        closed = np.setdiff1d(np.flatnonzero(picks != vector), self._open).tolist()
        found = [(self._after[0].at(self._start), row, int(picks[row])) for row in closed
                 if self.is_enough]
        for i, row in enumerate(self._open):
            for at, candidate in enumerate(self._options[i]):
                if candidate != vector[row]:
                    loss = int(self._joined(i, at)[1].min(initial=LOSS_NUM_MAX))
                    if loss <= self._budget:
                        found.append((loss, row, candidate))
        return sorted(found)

    def through(self, row: int, candidate: int) -> Ints:
        """The best vector with this candidate; after `others`."""
        if row not in self._open:
            return self.vector()
        i = self._open.index(row)
        at = self._options[i].index(candidate)
        first, losses = self._joined(i, at)
        state = first + int(losses.argmin())
        chosen = self._relaxed.picks.copy()
        chosen[row] = candidate
        self._follow(chosen, i + 1, state - self._moves[i][at])
        for back in range(i - 1, -1, -1):
            want = self._before[back + 1].at(state)
            for option in range(len(self._options[back]) - 1, -1, -1):
                move, loss = self._moves[back][option], self._losses[back][option]
                if self._before[back].at(state + move) + loss == want:
                    chosen[self._open[back]] = self._options[back][option]
                    state += move
                    break
        return chosen

    def _follow(self, chosen: Ints, i: int, state: int) -> None:
        """From open row `i` on: the least loss, the largest sizes first."""
        for row in range(i, len(self._open)):
            want = self._after[row].at(state)
            for option in range(len(self._options[row]) - 1, -1, -1):
                move, loss = self._moves[row][option], self._losses[row][option]
                if self._after[row + 1].at(state - move) + loss == want:
                    chosen[self._open[row]] = self._options[row][option]
                    state -= move
                    break

    def _backward(self) -> list[Table]:
        """By open row, and after the last: what the rows from it on must lose."""
        idle = self._reached[-1][1]
        if self._relaxed.price:
            idle = min(idle, self._budget // self._relaxed.price)
        idling: Ints = np.arange(max(idle + 1, 0), dtype=np.int64) * self._relaxed.price
        table = Table(0, idling)
        found = [table]
        for i in range(len(self._open) - 1, -1, -1):
            table = self._step(table, self._moves[i], self._losses[i], self._reached[i])
            found.append(table)
        return found[::-1]

    def _forward(self) -> list[Table]:
        """By open row, and after the last: what the rows before it must lose."""
        table = Table(self._start, np.zeros(1, np.int64))
        found = [table]
        for i in range(len(self._open)):
            table = self._step(table, [-move for move in self._moves[i]], self._losses[i],
                               self._reached[i + 1])
            found.append(table)
        return found

    def _step(self, table: Table, moves: Sequence[int], losses: Sequence[int],
              reached: tuple[int, int]) -> Table:
        """One row more: from states to those `moves` above them."""
        first, known = table.first, table.losses
        low = max(first + min(moves), reached[0])
        high = min(first + len(known) + max(moves), reached[1] + 1)
        new = np.full(max(high - low, 0), LOSS_NUM_MAX, dtype=np.int64)
        for move, loss in zip(moves, losses, strict=True):
            begin, end = max(first + move, low), min(first + len(known) + move, high)
            if begin < end:
                part = new[begin - low:end - low]
                np.minimum(part, known[begin - move - first:end - move - first] + loss, out=part)
        good = np.flatnonzero(new <= self._budget)
        if not len(good):
            return Table(low, new[:0])
        return Table(low + int(good[0]), new[int(good[0]):int(good[-1]) + 1])

    def _joined(self, i: int, at: int) -> tuple[int, Ints]:
        """By state at open row `i`, from the first on: the least loss with its option `at`."""
        before, after, move = self._before[i], self._after[i + 1], self._moves[i][at]
        low = max(before.first, after.first + move)
        high = min(before.first + len(before.losses), after.first + move + len(after.losses))
        if high <= low:
            return low, before.losses[:0]
        return low, (before.losses[low - before.first:high - before.first]
                     + after.losses[low - move - after.first:high - move - after.first]
                     + self._losses[i][at])
