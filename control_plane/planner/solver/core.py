"""The core of a knapsack: all vectors whose total reduced cost is within a budget.

A vector is one candidate per row. A loss is a reduced cost: how far a candidate lowers the bound.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LOSS_NUM_MAX = 1 << 61
"""Above any loss: there is no vector."""
_LEVELS_NUM_MAX = 8
"""The most distinct sums of losses that `BitsetCore` is used for."""


class CoreProblem(Struct, frozen=True, kw_only=True):
    """The candidates with a loss of at most `budget`, in the open rows. A row is open if it has two
    or more of them. A state is the slots left less the slots of the remaining rows' picks."""

    picks: Ints
    """The choice of the relaxation for every row, open or not: a candidate with loss 0."""
    rows: tuple[int, ...]
    candidates: Ints
    moves: Ints
    """By candidate: its size less the size of the pick; ascending within a row."""
    losses: Ints
    starts: tuple[int, ...]
    """By open row: the index of its first candidate. The last entry is the end."""
    start: int
    """The state before the first row."""
    price: int
    """The loss of each slot that is left after the last row."""
    budget: int

    @classmethod
    def of(cls, sizes: Ints, losses: Ints, row_of: Ints, picks: Ints, *, capacity: int,
           price: int, budget: int) -> CoreProblem:
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
        return len(self.rows)

    def part(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])

    def reached(self) -> list[tuple[int, int]]:
        """By open row, and after the last: the lowest and the highest reachable state."""
        if not self.num:
            return [(self.start, self.start)]
        firsts = np.array(self.starts[:-1])
        low = self.start - np.cumsum(np.maximum.reduceat(self.moves, firsts))
        high = self.start - np.cumsum(np.minimum.reduceat(self.moves, firsts))
        return [(self.start, self.start), *zip(low.tolist(), high.tolist(), strict=True)]

    def work(self) -> int:
        """An upper bound of candidates times states, summed over rows."""
        if not self.num:
            return 0
        firsts, counts = np.array(self.starts[:-1]), np.diff(np.array(self.starts))
        most, least = (edge.reduceat(self.moves, firsts) for edge in (np.maximum, np.minimum))
        idle = self.budget // self.price if self.price else LOSS_NUM_MAX
        low = np.maximum(self.start - np.cumsum(most), np.cumsum(least[::-1])[::-1])
        high = np.minimum(self.start - np.cumsum(least), np.cumsum(most[::-1])[::-1] + idle)
        return int((counts * np.maximum(high - low + 1, 1)).sum())

    def levels(self) -> tuple[int, ...] | None:
        """The sums of losses within the budget; None if there are more than _LEVELS_NUM_MAX."""
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


# --- Core for many distinct sums of losses: the least loss of every state, as an array ---
class LossTable(Struct, frozen=True):
    """The least loss by state, from the state `first` on. The first and the last entry are above
    the budget, and stand for all states before and after."""

    first: int
    losses: Ints

    def of(self, states: Ints | int) -> Ints:
        return self.losses.take(states - self.first, mode="clip")


class ArrayCore:
    """All vectors within the budget. By row: the least loss of the remaining rows, by state."""

    def __init__(self, kept: CoreProblem) -> None:
        self._kept = kept
        self._moves = [kept.moves[kept.part(i)] for i in range(kept.num)]
        """By open row: its moves, ascending."""
        self._losses = [kept.losses[kept.part(i)] for i in range(kept.num)]
        self._reached = kept.reached()
        self._after = self._backward()

    @property
    def least(self) -> int:
        """The loss of the optimum; above the budget if no vector is within the budget."""
        return int(self._after[0].of(self._kept.start))

    def vector(self) -> Ints:
        """The optimum, as one candidate per row. The budget must be large enough."""
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start)
        return chosen

    def second(self, vector: Ints) -> Ints | None:
        """The best vector except the optimum `vector`; None if none is within the budget. Each row
        is tried as the first that differs: earlier rows stay, later rows are optimal."""
        kept, state, lost = self._kept, self._kept.start, 0
        best: tuple[int, int, int, int] | None = None
        for i, row in enumerate(kept.rows):
            found: Ints = self._after[i + 1].of(state - self._moves[i]) + self._losses[i]
            current = int(np.searchsorted(kept.candidates[kept.part(i)], int(vector[row])))
            found[current] = LOSS_NUM_MAX
            at = int(found.argmin())
            total = lost + int(found[at])
            if total <= kept.budget and (best is None or total < best[0]):
                best = total, i, at, state
            state -= int(self._moves[i][current])
            lost += int(self._losses[i][current])
        if best is None:
            return None
        _, i, at, state = best
        chosen = vector.copy()
        chosen[kept.rows[i]] = kept.candidates[kept.part(i)][at]
        self._follow(chosen, i + 1, state - int(self._moves[i][at]))
        return chosen

    def _follow(self, chosen: Ints, i: int, state: int) -> None:
        """Choose candidates from open row `i` on with the least loss: on a tie the largest."""
        for row in range(i, self._kept.num):
            state -= self._taken(chosen, row, self._after[row + 1], state - self._moves[row],
                                 int(self._after[row].of(state)))

    def _taken(self, chosen: Ints, i: int, table: LossTable, states: Ints, want: int) -> int:
        """Put the row's choice into `chosen` and return its move. It is the largest candidate whose
        loss and loss in `table` sum to `want`. `states`: the state after each of the candidates."""
        option = int(np.flatnonzero(table.of(states) + self._losses[i] == want)[-1])
        chosen[self._kept.rows[i]] = self._kept.candidates[self._kept.part(i)][option]
        return int(self._moves[i][option])

    def _backward(self) -> list[LossTable]:
        """By open row: the least losses of this and all later rows. Last: those without any row."""
        kept = self._kept
        idle = self._reached[-1][1]
        if kept.price:
            idle = min(idle, kept.budget // kept.price)
        idling = np.full(max(idle + 1, 0) + 2, LOSS_NUM_MAX, dtype=np.int64)
        idling[1:-1] = np.arange(len(idling) - 2) * kept.price
        table = LossTable(-1, idling)
        found = [table]
        for i in range(kept.num - 1, -1, -1):
            table = self._step(table, self._moves[i], self._losses[i], self._reached[i])
            found.append(table)
        return found[::-1]

    def _step(self, table: LossTable, moves: Ints, losses: Ints,
              reached: tuple[int, int]) -> LossTable:
        """Prepend one row to `table`."""
        first, known = table.first + 1, table.losses[1:-1]
        low = max(first + int(moves[0]), reached[0])
        high = min(first + len(known) + int(moves[-1]), reached[1] + 1)
        padded = np.full(max(high - low, 0) + 2, LOSS_NUM_MAX, dtype=np.int64)
        new = padded[1:-1]
        for move, loss in zip(moves.tolist(), losses.tolist(), strict=True):
            begin, end = max(first + move, low), min(first + len(known) + move, high)
            if begin < end:
                part = new[begin - low:end - low]
                np.minimum(part, known[begin - move - first:end - move - first] + loss,
                           out=part)
        good = (new <= self._kept.budget).nonzero()[0]
        begin, end = (int(good[0]), int(good[-1]) + 1) if len(good) else (0, 0)
        return LossTable(low + begin - 1, padded[begin:end + 2])
