"""Plain dynamic programming over the knapsack: an optimum to compare with, by another method."""

from __future__ import annotations

import numpy as np
from unicron.control_plane.planner.solver.candidates import Candidates, tables
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
