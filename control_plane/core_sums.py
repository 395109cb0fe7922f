"""A core in which losses have many sums: the least loss of every state, as an array."""

from __future__ import annotations

from collections.abc import Iterator

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
        self._before: list[Table] = []

    @property
    def least(self) -> int:
        return self._after[0].at(self._kept.start)

    def vector(self) -> Ints:
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start)
        return chosen

    def others(self, vector: Ints) -> Iterator[tuple[int, int, int]]:
        kept = self._kept
        self._before = self._forward()
        losses = np.concatenate([np.zeros(0, np.int64), *(
            self._joined_all(i) for i in range(kept.num))])
        rows = np.repeat(np.array(kept.rows, dtype=np.int64), np.diff(np.array(kept.starts)))
        good = np.flatnonzero((losses <= kept.budget) & (kept.candidates != vector[rows]))
        order = good[np.argsort(losses[good], kind="stable")]
        yield from zip(losses[order].tolist(), rows[order].tolist(),
                       kept.candidates[order].tolist(), strict=True)

    def through(self, row: int, candidate: int) -> Ints:
        kept = self._kept
        i = kept.rows.index(row)
        at = int(np.searchsorted(kept.candidates[kept.part(i)], candidate))
        first, losses = self._joined(i, at)
        state = first + int(losses.argmin())
        chosen = kept.picks.copy()
        chosen[row] = candidate
        self._follow(chosen, i + 1, state - int(self._moves[i][at]))
        for back in range(i - 1, -1, -1):
            state += self._taken(chosen, back, self._before[back], state + self._moves[back],
                                 self._before[back + 1].at(state))
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

    def _forward(self) -> list[Table]:
        """By open row, and after the last: what the rows before it must lose, for states from which
        the rows to come lose little enough."""
        table = Table(self._kept.start, np.zeros(1, np.int64))
        found = [table]
        for i, after in enumerate(self._after[1:]):
            ends = after.first, after.first + len(after.losses) - 1
            table = self._step(table, -self._moves[i], self._losses[i], ends)
            found.append(table)
        return found

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

    def _joined(self, i: int, at: int) -> tuple[int, Ints]:
        """By state at open row `i`, from the first on: the least loss with its option `at`."""
        before, after, move = self._before[i], self._after[i + 1], int(self._moves[i][at])
        low = max(before.first, after.first + move)
        high = min(before.first + len(before.losses), after.first + move + len(after.losses))
        if high <= low:
            return low, before.losses[:0]
        return low, (before.losses[low - before.first:high - before.first]
                     + after.losses[low - move - after.first:high - move - after.first]
                     + self._losses[i][at])

    def _joined_all(self, i: int) -> Ints:
        """By option of open row `i`: the least loss with it."""
        before, moves = self._before[i], self._moves[i]
        if len(before.losses) < len(moves):
            found = np.full(len(moves), LOSS_NUM_MAX, dtype=np.int64)
            for place, loss in enumerate(before.losses.tolist()):
                after = self._after[i + 1].of(before.first + place - moves)
                found = np.minimum(found, after + self._losses[i] + loss)
            return found
        return np.array([self._joined(i, at)[1].min(initial=LOSS_NUM_MAX)
                         for at in range(len(moves))], dtype=np.int64)
