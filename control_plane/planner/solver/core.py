"""The core of a knapsack: all vectors whose total reduced cost is within a budget.

A vector is one candidate per row. A loss is a reduced cost: how far a candidate lowers the bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LOSS_NUM_MAX = 1 << 61
"""Above any loss: there is no vector."""
_LEVELS_NUM_MAX = 8
"""Up to this number of distinct sums of losses, many candidates tie (`CoreProblem.ties`)."""


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
    def of(
        cls,
        sizes: Ints,
        losses: Ints,
        row_of: Ints,
        picks: Ints,
        *,
        capacity: int,
        price: int,
        budget: int,
    ) -> CoreProblem:
        good = losses <= budget
        counts = np.bincount(row_of[good], minlength=len(picks))
        good &= (counts > 1)[row_of]
        kept, open_rows = np.flatnonzero(good), np.flatnonzero(counts > 1)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts[open_rows])))
        return cls(
            picks=picks,
            rows=tuple(open_rows.tolist()),
            candidates=kept,
            moves=sizes[kept] - sizes[picks][row_of[kept]],
            losses=losses[kept],
            starts=tuple(starts.tolist()),
            start=capacity - int(sizes[picks].sum()),
            price=price,
            budget=budget,
        )

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

    def ties(self) -> bool:
        """Whether the sums of losses within the budget are few."""
        some = self.losses[self.losses > 0]
        if len(set(some[:_LEVELS_NUM_MAX].tolist())) == _LEVELS_NUM_MAX:
            return False
        found, steps = {0}, (set(some.tolist()) | {self.price}) - {0}
        while len(found) <= _LEVELS_NUM_MAX and len(steps) <= _LEVELS_NUM_MAX:
            more = {one + step for one in found for step in steps if one + step <= self.budget}
            if more <= found:
                return True
            found |= more
        return False


class LossTable(Struct, frozen=True):
    """The least loss by state, from the state `first` on. The first and the last entry are above
    the budget, and stand for all states before and after."""

    first: int
    losses: Ints

    def of(self, states: Ints | int) -> Ints:
        return self.losses.take(states - self.first, mode="clip")


class Core:
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
        is tried as the first that differs: earlier rows stay, later rows are optimal. Of candidates
        that tie, the smallest is taken; if many do, the largest of those with the least loss."""
        kept, state, lost = self._kept, self._kept.start, 0
        ties = kept.ties()
        best: tuple[int, int, int, int] | None = None
        for i, row in enumerate(kept.rows):
            found: Ints = self._after[i + 1].of(state - self._moves[i]) + self._losses[i]
            current = int(np.searchsorted(kept.candidates[kept.part(i)], int(vector[row])))
            found[current] = LOSS_NUM_MAX
            at = int(found.argmin())
            if ties:
                tied = np.flatnonzero(found == found[at])
                at = int(min(tied, key=lambda one: (self._losses[i][one], -one)))
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
        kept = self._kept
        for row in range(i, kept.num):
            found = self._after[row + 1].of(state - self._moves[row]) + self._losses[row]
            option = int(np.flatnonzero(found == self._after[row].of(state))[-1])
            chosen[kept.rows[row]] = kept.candidates[kept.part(row)][option]
            state -= int(self._moves[row][option])

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

    def _step(
        self, table: LossTable, moves: Ints, losses: Ints, reached: tuple[int, int]
    ) -> LossTable:
        """Prepend one row to `table`."""
        first, known = table.first + 1, table.losses[1:-1]
        low = max(first + int(moves[0]), reached[0])
        high = min(first + len(known) + int(moves[-1]), reached[1] + 1)
        padded = np.full(max(high - low, 0) + 2, LOSS_NUM_MAX, dtype=np.int64)
        new = padded[1:-1]
        for move, step, count, loss in _runs(moves, losses):
            tried = _repeated(known, step, count)
            begin, end = max(first + move, low), min(first + len(tried) + move, high)
            if begin < end:
                part = new[begin - low : end - low]
                np.minimum(part, tried[begin - move - first : end - move - first] + loss, out=part)
        good = (new <= self._kept.budget).nonzero()[0]
        begin, end = (int(good[0]), int(good[-1]) + 1) if len(good) else (0, 0)
        return LossTable(low + begin - 1, padded[begin : end + 2])


def _runs(moves: Ints, losses: Ints) -> Iterator[tuple[int, int, int, int]]:
    """(first, step, count, loss) of arithmetic progressions of moves that have the same loss."""
    order = np.lexsort((moves, losses))
    sorted_moves, sorted_losses = moves[order].tolist(), losses[order].tolist()
    at = 0
    while at < len(sorted_moves):
        end = at + 1
        step = sorted_moves[end] - sorted_moves[at] if end < len(sorted_moves) else 1
        while (
            end < len(sorted_moves)
            and sorted_losses[end] == sorted_losses[at]
            and (sorted_moves[end] - sorted_moves[end - 1] == step)
        ):
            end += 1
        yield sorted_moves[at], step, end - at, sorted_losses[at]
        at = end


def _repeated(losses: Ints, step: int, count: int) -> Ints:
    """By state: the least of `count` copies, each `step` behind the one before."""
    done = 1
    while done < count:
        more = min(done, count - done)
        wide = np.full(len(losses) + more * step, LOSS_NUM_MAX, dtype=np.int64)
        wide[: len(losses)] = losses
        np.minimum(wide[more * step :], losses, out=wide[more * step :])
        losses, done = wide, done + more
    return losses
