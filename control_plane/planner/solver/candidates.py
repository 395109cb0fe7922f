"""What a knapsack is packed from: of each row one candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .core import Ints

Found = tuple[tuple[int, ...], int]
"""Slots per row, and the sum of their gains."""


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
