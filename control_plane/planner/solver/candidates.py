"""The input of the knapsack: candidates in rows. A solution takes one candidate of each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .core import Ints

SlotsAndGain = tuple[tuple[int, ...], int]
"""(slots by row, the sum of their gains)."""
IMPOSSIBLE = -(1 << 60)
"""A value below IMPOSSIBLE / 2 means that no vector fits."""


class Candidates(Struct, frozen=True, kw_only=True):
    """Row r has the candidates from starts[r] to before starts[r + 1], at least one. The sizes of a
    row are distinct, 0 or more, ascending. The rows' largest |gain| sum to less than 2^53."""

    sizes: Ints
    gains: Ints
    starts: Ints
    """Its length is the number of rows + 1."""

    @property
    def num(self) -> int:
        return len(self.starts) - 1

    @property
    def row_of(self) -> Ints:
        return np.repeat(np.arange(self.num), np.diff(self.starts))

    def only(self, kept: NDArray[np.bool_]) -> Candidates:
        """The rows with only these candidates. Every row must keep at least one candidate."""
        counts = np.bincount(self.row_of[kept], minlength=self.num)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return Candidates(sizes=self.sizes[kept], gains=self.gains[kept], starts=starts)

    def part(self, begin: int, end: int) -> Candidates:
        starts = self.starts[begin : end + 1]
        inner = slice(int(starts[0]), int(starts[-1]))
        return Candidates(
            sizes=self.sizes[inner], gains=self.gains[inner], starts=starts - starts[0]
        )

    def sums(self, vector: Ints) -> tuple[int, int]:
        """(the sum of gains, the sum of slots) of one candidate per row."""
        return int(self.gains[vector].sum()), int(self.sizes[vector].sum())

    def vector(self, slots: Sequence[int]) -> Ints:
        """The candidates with these sizes, which must exist."""
        wanted = np.array(slots, dtype=np.int64)[self.row_of]
        return np.flatnonzero(self.sizes == wanted)

    def slots(self, vector: Ints) -> tuple[int, ...]:
        return tuple(self.sizes[vector].tolist())
