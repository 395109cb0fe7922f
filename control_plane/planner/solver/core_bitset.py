"""A core in which few sums of losses are little enough: for each, a set of states, held as bits.

So it is where candidates are tied: a row costs a few shifts of one long integer, however many
candidates it has, as long as their sizes are few arithmetic progressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from .core import LOSS_NUM_MAX, Ints, Kept

_FEW_NUM = 16
"""States before a row from which its options are looked at all at once."""


class _Run(Struct, frozen=True):
    """Moves first, first + step, ..., `count` of them, which all lose the same."""

    first: int
    step: int
    count: int
    loss: int


class _States(Struct, frozen=True):
    """By level: the states from `first` on, as bits."""

    first: int
    bits: tuple[int, ...]

    def has(self, level: int, state: int) -> bool:
        place = state - self.first
        return place >= 0 and bool(self.bits[level] >> place & 1)


class Bits:
    """By sum of losses, which states the rows to come can lose it from."""

    def __init__(self, kept: Kept, levels: tuple[int, ...]) -> None:
        self._kept, self._levels = kept, levels
        self._place = {level: at for at, level in enumerate(levels)}
        self._reached = kept.reached()
        self._runs = _runs(kept)
        self._losses = [{run.loss for run in runs} for runs in self._runs]
        """By open row: the losses of its options."""
        self._after = self._backward()
        self._before = [_States(kept.start, (1, *[0] * (len(levels) - 1)))]

    @property
    def least(self) -> int:
        return next((level for at, level in enumerate(self._levels)
                     if self._after[0].has(at, self._kept.start)), LOSS_NUM_MAX)

    def vector(self) -> Ints:
        chosen = self._kept.picks.copy()
        self._follow(chosen, 0, self._kept.start, self._place[self.least])
        return chosen

    def others(self, vector: Ints) -> Iterator[tuple[int, int, int]]:
        kept = self._kept
        told: set[int] = set()
        for level in self._levels:
            for i, row in enumerate(kept.rows):
                for at in self._likely(i, level):
                    candidate = int(kept.candidates[at])
                    if (candidate != vector[row] and candidate not in told
                            and self._joined(i, at, level) is not None):
                        told.add(candidate)
                        yield level, row, candidate

    def through(self, row: int, candidate: int) -> Ints:
        kept = self._kept
        i = kept.rows.index(row)
        part = kept.part(i)
        at = part.start + int(np.searchsorted(kept.candidates[part], candidate))
        state, before, after = next(found for level in self._levels
                                    if (found := self._joined(i, at, level)) is not None)
        chosen = kept.picks.copy()
        chosen[row] = candidate
        self._follow(chosen, i + 1, state - int(kept.moves[at]), after)
        for back in range(i - 1, -1, -1):
            one = kept.part(back)
            for option in range(one.stop - 1, one.start - 1, -1):
                move = int(kept.moves[option])
                left = self._place.get(self._levels[before] - int(kept.losses[option]))
                if left is not None and self._before[back].has(left, state + move):
                    chosen[kept.rows[back]] = kept.candidates[option]
                    state, before = state + move, left
                    break
        return chosen

    def _likely(self, i: int, level: int) -> Iterable[int]:
        """The options of open row i, ascending, without those of which few states are enough to
        see that none leads to a sum of `level`."""
        part = self._kept.part(i)
        moves, before, after = self._kept.moves[part], self._at(i), self._after[i + 1]
        most, num = int(moves[-1]), int(moves[-1] - moves[0]) + 1
        found = 0
        for b, bits in enumerate(before.bits):
            if bits.bit_count() > _FEW_NUM:
                return range(part.start, part.stop)
            for a, targets in enumerate(after.bits):
                loss = level - self._levels[b] - self._levels[a]
                if not targets or loss not in self._losses[i]:
                    continue
                for place in _ones(bits):
                    state = before.first + place
                    found |= _shifted(targets, most - (state - after.first))
        found &= (1 << num) - 1
        held = np.unpackbits(np.frombuffer(found.to_bytes(-(-num // 8), "little"), np.uint8),
                             bitorder="little")
        options: list[int] = (part.start + np.flatnonzero(held[most - moves])).tolist()
        return options

    def _at(self, i: int) -> _States:
        while len(self._before) <= i:
            self._before.append(self._next_before())
        return self._before[i]

    def _joined(self, i: int, at: int, level: int) -> tuple[int, int, int] | None:
        """(a state at open row i from which option `at` leads to a sum of `level`, the levels
        before it and after it), None if there is no such state."""
        before, after = self._at(i), self._after[i + 1]
        move, loss = int(self._kept.moves[at]), int(self._kept.losses[at])
        shift = after.first + move - before.first
        for b, bits in enumerate(before.bits):
            a = self._place.get(level - loss - self._levels[b])
            if bits and a is not None and (met := bits & _shifted(after.bits[a], shift)):
                return before.first + met.bit_length() - 1, b, a
        return None

    def _follow(self, chosen: Ints, i: int, state: int, level: int) -> None:
        """From open row i on: what loses as much as `level` says, the largest sizes first."""
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
        """The last option of the row with this loss that leads from `place` to one of `bits`."""
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

    def _next_before(self) -> _States:
        i = len(self._before) - 1
        runs = [_Run(-run.first - (run.count - 1) * run.step, run.step, run.count, run.loss)
                for run in self._runs[i]]
        return self._step(self._before[i], runs, self._reached[i + 1])

    def _step(self, known: _States, runs: Sequence[_Run], reached: tuple[int, int]) -> _States:
        """One row more: from states to those that its moves lead to."""
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


def _ones(bits: int) -> Iterator[int]:
    """Which bits are set."""
    while bits:
        least = bits & -bits
        yield least.bit_length() - 1
        bits ^= least


def _shifted(bits: int, shift: int) -> int:
    return bits << shift if shift >= 0 else bits >> -shift


def _repeated(bits: int, step: int, count: int) -> int:
    """The bits `count` times, each `step` after the one before."""
    done = 1
    while done < count:
        more = min(done, count - done)
        bits |= bits << more * step
        done += more
    return bits


def _runs(kept: Kept) -> list[list[_Run]]:
    """By open row: its moves, as few arithmetic progressions of one loss each."""
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
