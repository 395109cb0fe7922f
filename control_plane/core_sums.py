"""A core in which losses have many sums: the least loss of every state, as an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from .core import LOSS_NUM_MAX, Ints, Kept


class Table(Struct, frozen=True):
    """Least loss by state, from the state `first` on; elsewhere no vector."""

    first: int
    losses: Ints

    def at(self, state: int) -> int:
        place = state - self.first
        return int(self.losses[place]) if 0 <= place < len(self.losses) else LOSS_NUM_MAX


class Sums:
    """The least loss by state, of the rows to come."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._options: list[list[int]] = []
        self._moves: list[list[int]] = []
        self._losses: list[list[int]] = []
        for begin, end in pairwise(kept.starts):
            self._options.append(kept.candidates[begin:end].tolist())
            self._moves.append(kept.moves[begin:end].tolist())
            self._losses.append(kept.losses[begin:end].tolist())
        self._reached = kept.reached()
        self._after = self._backward()
        self._before: list[Table] = []

    @property
    def least(self) -> int:
        return self._after[0].at(self._kept.start)

    def vector(self) -> Ints:
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start)
        return chosen

    def others(self, vector: Ints) -> Iterator[tuple[int, int, int]]:
        self._before = self._forward()
        found: list[tuple[int, int, int]] = []
        for i, row in enumerate(self._kept.rows):
            for at, candidate in enumerate(self._options[i]):
                if candidate != vector[row]:
                    loss = int(self._joined(i, at)[1].min(initial=LOSS_NUM_MAX))
                    if loss <= self._kept.budget:
                        found.append((loss, row, candidate))
        yield from sorted(found)

    def through(self, row: int, candidate: int) -> Ints:
        kept = self._kept
        i = kept.rows.index(row)
        at = self._options[i].index(candidate)
        first, losses = self._joined(i, at)
        state = first + int(losses.argmin())
        chosen = kept.picks.copy()
        chosen[row] = candidate
        self._follow(chosen, i + 1, state - self._moves[i][at])
        for back in range(i - 1, -1, -1):
            want = self._before[back + 1].at(state)
            for option in range(len(self._options[back]) - 1, -1, -1):
                move, loss = self._moves[back][option], self._losses[back][option]
                if self._before[back].at(state + move) + loss == want:
                    chosen[kept.rows[back]] = self._options[back][option]
                    state += move
                    break
        return chosen

    def _follow(self, chosen: Ints, i: int, state: int) -> None:
        """From open row `i` on: the least loss, the largest sizes first."""
        for row in range(i, self._kept.num):
            want = self._after[row].at(state)
            for option in range(len(self._options[row]) - 1, -1, -1):
                move, loss = self._moves[row][option], self._losses[row][option]
                if self._after[row + 1].at(state - move) + loss == want:
                    chosen[self._kept.rows[row]] = self._options[row][option]
                    state -= move
                    break

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

    def _forward(self) -> list[Table]:
        """By open row, and after the last: what the rows before it must lose."""
        table = Table(self._kept.start, np.zeros(1, np.int64))
        found = [table]
        for i in range(self._kept.num):
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
        good = np.flatnonzero(new <= self._kept.budget)
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
