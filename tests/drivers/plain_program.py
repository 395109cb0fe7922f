"""Plain dynamic programming over the knapsack: an optimum to compare with, by another method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from unicron.control_plane.planner.solver.candidates import IMPOSSIBLE, Candidates
from unicron.control_plane.planner.solver.core import Ints


def suffixes(rows: Candidates, capacity: int) -> Ints:
    """[r, j]: the optimum of rows r.. with j slots; (rows + 1) x (capacity + 1)."""
    return tables(rows, capacity, range(rows.num - 1, -1, -1))[::-1]


def backtrack(rows: Candidates, after: Ints, left: int) -> list[int]:
    """The optimum's sizes by row, for `left` slots; on a tie the largest."""
    chosen: list[int] = []
    for row in range(rows.num):
        own = rows.part(row, row + 1)
        fits = own.sizes <= left
        totals = after[row + 1][left - own.sizes[fits]] + own.gains[fits]
        chosen.append(int(own.sizes[fits][np.flatnonzero(totals == after[row, left])[-1]]))
        left -= chosen[-1]
    return chosen


class LeaveOneOut:
    """The optimum of all rows except one, by the number of slots left for these rows."""

    def __init__(self, rows: Candidates, capacity: int) -> None:
        self._before = tables(rows, capacity, range(rows.num))
        self._after = tables(rows, capacity, range(rows.num - 1, -1, -1))[::-1]

    def without(self, row: int, left: int) -> int:
        """The others' optimum on `left` slots."""
        before, after = self._before[row, : left + 1], self._after[row + 1, : left + 1]
        return int((before + after[::-1]).max())


def tables(rows: Candidates, capacity: int, order: Sequence[int]) -> Ints:
    """[n, j]: the optimum of the first n rows in this order with j slots."""
    found = np.zeros((rows.num + 1, capacity + 1), dtype=np.int64)
    for n, row in enumerate(order):
        own, rest, into = rows.part(row, row + 1), found[n], found[n + 1]
        into.fill(IMPOSSIBLE)
        for size, gain in zip(own.sizes.tolist(), own.gains.tolist(), strict=True):
            if size <= capacity:
                part = into[size:]
                np.maximum(part, rest[: capacity + 1 - size] + gain, out=part)
        np.copyto(into, IMPOSSIBLE, where=into < IMPOSSIBLE // 2)
    return found
