"""Plain dynamic programming: the optima by first row and slots left, and without any one row.

O(capacity) for each candidate. For a single optimum `knapsack.best` gives the same result faster.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .candidates import Candidates
from .core import Ints

IMPOSSIBLE = -(1 << 60)
"""A value below IMPOSSIBLE / 2 means that no vector fits."""
_FEW_NUM = 8
"""The number of sizes that are tried one by one before the vectorised search."""


def suffixes(rows: Candidates, capacity: int) -> Ints:
    """[r, j]: the optimum of rows r.. with j slots; (rows + 1) x (capacity + 1)."""
    found = np.zeros((rows.num + 1, capacity + 1), dtype=np.int64)
    for row in range(rows.num - 1, -1, -1):
        _add(rows, row, found[row + 1], found[row])
    return found


def prefixes(rows: Candidates, capacity: int) -> Ints:
    """[r, j]: the optimum of the rows before r with j slots."""
    found = np.zeros((rows.num + 1, capacity + 1), dtype=np.int64)
    for row in range(rows.num):
        _add(rows, row, found[row], found[row + 1])
    return found


def _add(rows: Candidates, row: int, rest: Ints, into: Ints) -> None:
    """into[j] = the maximum of gain + rest[j - size] over the row's candidates."""
    begin, end = int(rows.starts[row]), int(rows.starts[row + 1])
    into.fill(IMPOSSIBLE)
    for size, gain in zip(rows.sizes[begin:end].tolist(), rows.gains[begin:end].tolist(),
                          strict=True):
        if size < len(rest):
            part = into[size:]
            np.maximum(part, rest[:len(rest) - size] + gain, out=part)
    np.copyto(into, IMPOSSIBLE, where=into < IMPOSSIBLE // 2)


def backtrack(rows: Candidates, after: Ints, left: int, first: int = 0) -> list[int]:
    """The optimum's sizes by row, for the rows `first`.. and `left` slots; on a tie the largest."""
    chosen: list[int] = []
    for row in range(first, rows.num):
        chosen.append(_largest(rows, row, after[row + 1], left, int(after[row, left])))
        left -= chosen[-1]
    return chosen


def _largest(rows: Candidates, row: int, rest: Ints, left: int, want: int) -> int:
    """The largest size with which the row and `rest` together gain `want` on `left` slots."""
    begin, end = int(rows.starts[row]), int(rows.starts[row + 1])
    sizes = rows.sizes[begin:end]
    sizes = sizes[:int(sizes.searchsorted(left, side="right"))]
    for at in range(len(sizes) - 1, max(len(sizes) - 1 - _FEW_NUM, -1), -1):
        if rest[left - sizes[at]] + rows.gains[begin + at] == want:
            return int(sizes[at])
    totals = rest[left - sizes] + rows.gains[begin:begin + len(sizes)]
    return int(sizes[np.flatnonzero(totals == want)[-1]])


class LeaveOneOut:
    """The optimum of all rows except one, by the number of slots left for these rows."""

    def __init__(self, rows: Candidates, capacity: int) -> None:
        self.rows = rows
        self.before, self.after = prefixes(rows, capacity), suffixes(rows, capacity)

    def without(self, row: int, left: int) -> tuple[int, int]:
        """(the others' optimum on `left` slots, how many of these the rows before `row` take)."""
        value = self.before[row, :left + 1] + self.after[row + 1, :left + 1][::-1]
        at = int(np.argmax(value))
        return int(value[at]), at

    def beside(self, row: int) -> Callable[[int], int]:
        """The optimum of all rows except `row`, as a function of the slots left for them."""
        return lambda left: self.without(row, left)[0]

    def vector(self, row: int, size: int, left: int, at: int) -> tuple[int, ...]:
        """The sizes by row in the result `at` of `without(row, left)`, with `size` for `row`."""
        rest = backtrack(self.rows, self.after, left - at, row + 1)
        first: list[int] = []
        for other in range(row - 1, -1, -1):
            want = int(self.before[other + 1, at])
            first.append(_largest(self.rows, other, self.before[other], at, want))
            at -= first[-1]
        return (*first[::-1], size, *rest)
