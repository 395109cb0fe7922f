"""The core of a knapsack: what loses little enough against the bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LOSS_NUM_MAX = 1 << 61
"""More than any loss: no vector."""
_LEVELS_NUM_MAX = 8
"""Sums of losses for which states are held as bits."""


class Kept(Struct, frozen=True, kw_only=True):
    """The candidates that lose at most `budget` each, of the rows that have a choice among them.

    A state is how many slots more are left than the picks of the rows to come would take.
    """

    picks: Ints
    """By row, also those without a choice: the candidate that loses nothing."""
    rows: tuple[int, ...]
    candidates: Ints
    moves: Ints
    """By candidate: slots more than the pick's; ascending within a row."""
    losses: Ints
    starts: tuple[int, ...]
    """By open row, and one more: where its candidates begin."""
    start: int
    """The state before the first row."""
    price: int
    """What each slot costs that is left after the last row."""
    budget: int

    @classmethod
    def of(cls, sizes: Ints, losses: Ints, row_of: Ints, picks: Ints, *, capacity: int,
           price: int, budget: int) -> Kept:
        """Of all candidates with their losses."""
        good = losses <= budget
        counts = np.bincount(row_of[good], minlength=len(picks))
        good &= (counts > 1)[row_of]
        kept, open_rows = np.flatnonzero(good), np.flatnonzero(counts > 1)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[open_rows])))
        return cls(picks=picks, rows=tuple(open_rows.tolist()), candidates=kept,
                   moves=sizes[kept] - sizes[picks][row_of[kept]], losses=losses[kept],
                   starts=tuple(starts.tolist()), start=capacity - int(sizes[picks].sum()),
                   price=price, budget=budget)

    @property
    def num(self) -> int:
        """Rows that have a choice."""
        return len(self.rows)

    def part(self, i: int) -> slice:
        """Of open row i."""
        return slice(self.starts[i], self.starts[i + 1])

    def reached(self) -> list[tuple[int, int]]:
        """By open row, and after the last: between which states it can be reached."""
        if not self.num:
            return [(self.start, self.start)]
        firsts = np.array(self.starts[:-1])
        low = self.start - np.cumsum(np.maximum.reduceat(self.moves, firsts))
        high = self.start - np.cumsum(np.minimum.reduceat(self.moves, firsts))
        return [(self.start, self.start), *zip(low.tolist(), high.tolist(), strict=True)]

    def work(self) -> int:
        """Candidates times the states that each row has, at most."""
        if not self.num:
            return 0
        firsts, counts = np.array(self.starts[:-1]), np.diff(np.array(self.starts))
        most, least = (edge.reduceat(self.moves, firsts) for edge in (np.maximum, np.minimum))
        idle = self.budget // self.price if self.price else LOSS_NUM_MAX
        low = np.maximum(self.start - np.cumsum(most), np.cumsum(least[::-1])[::-1])
        high = np.minimum(self.start - np.cumsum(least), np.cumsum(most[::-1])[::-1] + idle)
        return int((counts * np.maximum(high - low + 1, 1)).sum())

    def levels(self) -> tuple[int, ...] | None:
        """The sums of losses within the budget; None: they are many."""
        some = self.losses[self.losses > 0]
        if len(set(some[:_LEVELS_NUM_MAX].tolist())) == _LEVELS_NUM_MAX:
            return None
        some = np.sort(some)  # np.unique's first call would load numpy.ma: tens of milliseconds
        new = some[np.diff(some, prepend=0) > 0]
        found, steps = {0}, (set(new.tolist()) | {self.price}) - {0}
        if len(steps) > _LEVELS_NUM_MAX:
            return None
        while True:
            more = {one + step for one in found for step in steps if one + step <= self.budget}
            if more <= found:
                return tuple(sorted(found))
            found |= more
            if len(found) > _LEVELS_NUM_MAX:
                return None


class Core(Protocol):
    """All vectors that lose at most the budget against the bound."""

    @property
    def least(self) -> int:
        """What the optimum loses; above the budget: no vector loses so little."""
        ...

    def vector(self) -> Ints:
        """The optimum, as a candidate per row, where the budget is enough."""
        ...

    def others(self, vector: Ints) -> Iterator[tuple[int, int, int]]:
        """(loss, row, candidate) of the best vector with each candidate not in `vector`, of the
        rows that have a choice; in this order."""
        ...

    def through(self, row: int, candidate: int) -> Ints:
        """The best vector with this candidate; while or after `others` tells it."""
        ...
