"""The core of a knapsack: what loses little enough against the bound."""

from __future__ import annotations

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

    def second(self, vector: Ints) -> Ints | None:
        """The best vector but for `vector`, which is the optimum; None: none within the budget.

        It is found by the first row in which it differs: before that it is `vector`, after it the
        best of what is left.
        """
        ...


# --- A core in which losses have many sums: the least loss of every state, as an array. ---


class Table(Struct, frozen=True):
    """Least loss by state, from the state `first` on; elsewhere no vector."""

    first: int
    losses: Ints

    def at(self, state: int) -> int:
        place = state - self.first
        return int(self.losses[place]) if 0 <= place < len(self.losses) else LOSS_NUM_MAX

    def of(self, states: Ints) -> Ints:
        """By state."""
        if not len(self.losses):
            return np.full(len(states), LOSS_NUM_MAX, dtype=np.int64)
        places = states - self.first
        there = (places >= 0) & (places < len(self.losses))
        return np.where(there, self.losses[np.where(there, places, 0)], LOSS_NUM_MAX)


class Sums:
    """The least loss by state, of the rows to come."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._moves = [kept.moves[kept.part(i)] for i in range(kept.num)]
        """By open row, ascending."""
        self._losses = [kept.losses[kept.part(i)] for i in range(kept.num)]
        self._reached = kept.reached()
        self._after = self._backward()

    @property
    def least(self) -> int:
        return self._after[0].at(self._kept.start)

    def vector(self) -> Ints:
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start)
        return chosen

    def second(self, vector: Ints) -> Ints | None:
        kept, state, lost = self._kept, self._kept.start, 0
        best: tuple[int, int, int, int] | None = None
        for i, row in enumerate(kept.rows):
            found: Ints = self._after[i + 1].of(state - self._moves[i]) + self._losses[i]
            had = int(np.searchsorted(kept.candidates[kept.part(i)], int(vector[row])))
            found[had] = LOSS_NUM_MAX
            at = int(found.argmin())
            total = lost + int(found[at])
            if total <= kept.budget and (best is None or total < best[0]):
                best = total, i, at, state
            state -= int(self._moves[i][had])
            lost += int(self._losses[i][had])
        if best is None:
            return None
        _, i, at, state = best
        chosen = vector.copy()
        chosen[kept.rows[i]] = kept.candidates[kept.part(i)][at]
        self._follow(chosen, i + 1, state - int(self._moves[i][at]))
        return chosen

    def _follow(self, chosen: Ints, i: int, state: int) -> None:
        """From open row `i` on: the least loss, the largest sizes first."""
        for row in range(i, self._kept.num):
            state -= self._taken(chosen, row, self._after[row + 1], state - self._moves[row],
                                 self._after[row].at(state))

    def _taken(self, chosen: Ints, i: int, table: Table, states: Ints, want: int) -> int:
        """The move of the largest candidate that makes the loss `want` with the rest, in `table`
        by the state that each of the row's candidates leads to; it is put into `chosen`."""
        option = int(np.flatnonzero(table.of(states) + self._losses[i] == want)[-1])
        chosen[self._kept.rows[i]] = self._kept.candidates[self._kept.part(i)][option]
        return int(self._moves[i][option])

    def _backward(self) -> list[Table]:
        """By open row, and after the last: what the rows from it on must lose."""
        kept = self._kept
        idle = self._reached[-1][1]
        if kept.price:
            idle = min(idle, kept.budget // kept.price)
        idling: Ints = np.arange(max(idle + 1, 0), dtype=np.int64) * kept.price
        table = Table(0, idling)
        found = [table]
        for i in range(kept.num - 1, -1, -1):
            table = self._step(table, self._moves[i], self._losses[i], self._reached[i])
            found.append(table)
        return found[::-1]

    def _step(self, table: Table, moves: Ints, losses: Ints, reached: tuple[int, int]) -> Table:
        """One row more: from states to those `moves` above them."""
        first, known = table.first, table.losses
        low = max(first + int(moves.min()), reached[0])
        high = min(first + len(known) + int(moves.max()), reached[1] + 1)
        new = np.full(max(high - low, 0), LOSS_NUM_MAX, dtype=np.int64)
        if len(new) < len(moves):
            for place in range(len(new)):
                new[place] = (table.of(low + place - moves) + losses).min()
        elif len(known) < len(moves):
            for place in range(len(known)):
                to = first + place + moves - low
                there = (to >= 0) & (to < len(new))
                to = to[there]
                new[to] = np.minimum(new[to], losses[there] + known[place])
        else:
            for move, loss in zip(moves.tolist(), losses.tolist(), strict=True):
                begin, end = max(first + move, low), min(first + len(known) + move, high)
                if begin < end:
                    part = new[begin - low:end - low]
                    np.minimum(part, known[begin - move - first:end - move - first] + loss,
                               out=part)
        good = np.flatnonzero(new <= self._kept.budget)
        if not len(good):
            return Table(low, new[:0])
        return Table(low + int(good[0]), new[int(good[0]):int(good[-1]) + 1])
