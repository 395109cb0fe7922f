"""Core for few distinct sums of losses: for each sum a set of states, as bits of one integer.

This serves inputs with many ties. If the sizes of a row form few arithmetic progressions, the row
costs a few shifts of one long integer, whatever its number of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from .core import LOSS_NUM_MAX, CoreProblem, Ints


class _Run(Struct, frozen=True):
    """`count` moves with the same loss: first, first + step, first + 2 step, ..."""

    first: int
    step: int
    count: int
    loss: int


class _States(Struct, frozen=True):
    """By level: a set of states as bits. Bit 0 is the state `first`."""

    first: int
    bits: tuple[int, ...]

    def has(self, level: int, state: int) -> bool:
        place = state - self.first
        return place >= 0 and bool(self.bits[level] >> place & 1)


class BitsetCore:
    """As `ArrayCore`. By row and sum of losses: the states from which the rest can have it."""

    def __init__(self, kept: CoreProblem, levels: tuple[int, ...]) -> None:
        self._kept, self._levels = kept, levels
        self._place = {level: at for at, level in enumerate(levels)}
        self._reached = kept.reached()
        self._runs = _runs(kept)
        self._losses = [{run.loss for run in runs} for runs in self._runs]
        """By open row: the losses of its options."""
        self._after = self._backward()

    @property
    def least(self) -> int:
        return next((level for at, level in enumerate(self._levels)
                     if self._after[0].has(at, self._kept.start)), LOSS_NUM_MAX)

    def vector(self) -> Ints:
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start, self._place[self.least])
        return chosen

    def second(self, vector: Ints) -> Ints | None:
        kept = self._kept
        for total in self._levels:
            state, lost = kept.start, 0
            for i, row in enumerate(kept.rows):
                part, after = kept.part(i), self._after[i + 1]
                current = part.start + int(kept.candidates[part].searchsorted(int(vector[row])))
                move, current_loss = int(kept.moves[current]), int(kept.losses[current])
                for loss in sorted(self._losses[i]):
                    left = self._place.get(total - lost - loss)
                    if left is None:
                        continue
                    bits, place = after.bits[left], state - move - after.first
                    if loss == current_loss and place >= 0:
                        bits &= ~(1 << place)
                    at = self._largest(i, loss, state - after.first, bits)
                    if at is not None:
                        chosen = vector.copy()
                        chosen[row] = kept.candidates[part][at]
                        self._follow(chosen, i + 1, state - int(kept.moves[part][at]), left)
                        return chosen
                state -= move
                lost += current_loss
        return None

    def _follow(self, chosen: Ints, i: int, state: int, level: int) -> None:
        """Choose from open row i on, with the total loss of `level`: in each row the largest."""
        kept = self._kept
        for row in range(i, kept.num):
            part, after = kept.part(row), self._after[row + 1]
            found: tuple[int, int] | None = None
            for loss in sorted(self._losses[row]):
                left = self._place.get(self._levels[level] - loss)
                if left is None:
                    continue
                at = self._largest(row, loss, state - after.first, after.bits[left])
                if at is not None and (found is None or at > found[0]):
                    found = at, left
            assert found is not None, "a state that leads to the sum"
            at, level = found
            chosen[kept.rows[row]] = kept.candidates[part][at]
            state -= int(kept.moves[part][at])

    def _largest(self, row: int, loss: int, place: int, bits: int) -> int | None:
        """The row's largest candidate with this loss that leads from `place` into `bits`."""
        part = self._kept.part(row)
        moves = self._kept.moves[part]
        most = int(moves[-1])
        window = _shifted(bits, most - place) & (1 << most - int(moves[0]) + 1) - 1
        best: int | None = None
        for run in self._runs[row]:
            if run.loss == loss:
                last = run.first + (run.count - 1) * run.step
                own = window >> most - last & (1 << last - run.first + 1) - 1
                own &= _repeated(1, run.step, run.count)
                if own:
                    move = last - ((own & -own).bit_length() - 1)
                    best = move if best is None else max(best, move)
        return None if best is None else int(np.searchsorted(moves, best))

    def _backward(self) -> list[_States]:
        kept = self._kept
        idle = self._reached[-1][1]
        found: list[int] = []
        for level in self._levels:
            if not kept.price:
                found.append((1 << idle + 1) - 1 if level == 0 and idle >= 0 else 0)
            else:
                slots, rest = divmod(level, kept.price)
                found.append(1 << slots if not rest and slots <= idle else 0)
        states = [_States(0, tuple(found))]
        for i in range(kept.num - 1, -1, -1):
            states.append(self._step(states[-1], self._runs[i], self._reached[i]))
        return states[::-1]

    def _step(self, known: _States, runs: Sequence[_Run], reached: tuple[int, int]) -> _States:
        """Prepend one row to the known states."""
        low = max(known.first + min(run.first for run in runs), reached[0])
        mask = (1 << max(reached[1] - low + 1, 0)) - 1
        new = [0] * len(self._levels)
        for run in runs:
            for at, bits in enumerate(known.bits):
                place = self._place.get(self._levels[at] + run.loss)
                if not bits or place is None:
                    continue
                shift = known.first + run.first - low
                new[place] |= _shifted(_repeated(bits, run.step, run.count), shift) & mask
        return _States(low, tuple(new))


def _shifted(bits: int, shift: int) -> int:
    return bits << shift if shift >= 0 else bits >> -shift


def _repeated(bits: int, step: int, count: int) -> int:
    """The union of `count` copies of the bits, each shifted by `step` from the copy before."""
    done = 1
    while done < count:
        more = min(done, count - done)
        bits |= bits << more * step
        done += more
    return bits


def _runs(kept: CoreProblem) -> list[list[_Run]]:
    """By open row: its moves as arithmetic progressions, each of equal loss."""
    row_of: Ints = np.repeat(np.arange(kept.num), np.diff(np.array(kept.starts)))
    order: Ints = np.lexsort((kept.moves, kept.losses, row_of))
    rows, moves, losses = row_of[order], kept.moves[order], kept.losses[order]
    steps: Ints = np.diff(moves, prepend=0)
    begins = np.ones(len(moves), dtype=np.bool_)
    begins[1:] = (rows[1:] != rows[:-1]) | (losses[1:] != losses[:-1])
    apart = begins.copy()  # a run's second element sets its step
    begins[2:] |= ~apart[1:-1] & (steps[2:] != steps[1:-1])
    firsts = np.flatnonzero(begins)
    counts: Ints = np.diff(firsts, append=len(moves))
    seconds = np.minimum(firsts + 1, len(moves) - 1)
    found: list[list[_Run]] = [[] for _ in range(kept.num)]
    for row, first, step, count, loss in zip(
            rows[firsts].tolist(), moves[firsts].tolist(), steps[seconds].tolist(),
            counts.tolist(), losses[firsts].tolist(), strict=True):
        found[int(row)].append(_Run(first, step if count > 1 else 1, count, loss))
    return found
