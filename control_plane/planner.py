"""The plan: which task gets how many slots, exactly, and what was beaten.

A multiple-choice knapsack over the candidate sizes of each task, maximising the sum of G (our
reading of the paper, section 4). G is scaled by a power of two and rounded to integers, so that
every way of computing the optimum gives the same one. Ties: the first task, by id, gets most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..events.orders import Allocation, Alternative

_SUM_BITS = 52
_IMPOSSIBLE = -(1 << 60)
Table = NDArray[np.int64]
Row = Sequence[tuple[int, int]]
"""(slots, gain as an integer) of one task."""
Found = tuple[tuple[int, ...], int]
"""Slots per row, and the sum of their gains."""


class Wish(Struct, frozen=True, kw_only=True):
    """What the planner must know of one task: `sizes[i]` slots earn `wafs[i]`, 0 slots earn 0."""

    task: int
    name: str
    now: int
    """Slots that it has."""
    hurt: bool
    """A worker of it failed: going on costs a transition whatever it gets."""
    sizes: tuple[int, ...]
    wafs: tuple[float, ...]


class Plan(Struct, frozen=True, kw_only=True):
    """Slots per task, in the order of the wishes."""

    slots: tuple[int, ...]
    objective: int
    waf: float


class Choice(Struct, frozen=True, kw_only=True):
    """The plan that was chosen, and what it beat."""

    plan: Plan
    allocations: tuple[Allocation, ...]
    alternatives: tuple[Alternative, ...]


def waf_of(wish: Wish, slots: int) -> float:
    """F(t, x) for a candidate x, 0 for 0."""
    return wish.wafs[wish.sizes.index(slots)] if slots in wish.sizes else 0.0


def gains(wishes: Sequence[Wish], *, num_slots: int, mtbf_gpu_s: float,
          transition_s: float) -> list[list[tuple[int, int]]]:
    """(x, G(t, x) as an integer) for each task, x ascending from 0; all on one scale."""
    running_s = mtbf_gpu_s / max(num_slots, 1)
    exact: list[list[tuple[int, float]]] = []
    for wish in wishes:
        row: list[tuple[int, float]] = []
        old = waf_of(wish, wish.now)
        for size in sorted({0, *wish.sizes}):
            changed = wish.hurt or size != wish.now
            row.append((size, waf_of(wish, size) * running_s - changed * old * transition_s))
        exact.append(row)
    top = math.fsum(max(abs(gain) for _, gain in row) for row in exact)
    shift = _SUM_BITS - 1 - math.frexp(top)[1] if top > 0 else 0
    return [[(size, round(math.ldexp(gain, shift))) for size, gain in row] for row in exact]


def best(rows: Sequence[Row], num_slots: int) -> Found | None:
    """The slots per row that maximise the sum within `num_slots`, or None if nothing fits.

    O(num_slots * sum of candidates).
    """
    after = _suffixes(rows, num_slots)
    if after[0][num_slots] <= _IMPOSSIBLE // 2:
        return None
    return _forward(rows, after, num_slots), int(after[0][num_slots])


def _best_of(row: Row, rest: Table) -> Table:
    """For each j: the most of gain + rest[j - size] over the row's candidates."""
    found = np.full_like(rest, _IMPOSSIBLE)
    for size, gain in row:
        if size < len(rest):
            head = rest[: len(rest) - size]
            np.maximum(found[size:], np.where(head > _IMPOSSIBLE // 2, head + gain, _IMPOSSIBLE),
                       out=found[size:])
    return found


def _suffixes(rows: Sequence[Row], num_slots: int) -> list[Table]:
    """after[i][j]: the best of rows i.. with j slots."""
    after: list[Table] = [np.zeros(num_slots + 1, dtype=np.int64)]
    for row in reversed(rows):
        after.append(_best_of(row, after[-1]))
    return after[::-1]


def _forward(rows: Sequence[Row], after: Sequence[Table],
             left: int) -> tuple[int, ...]:
    """The one backtracker: of all optima, the first row takes most."""
    chosen: list[int] = []
    for i, row in enumerate(rows):
        want = int(after[i][left])
        size = max(size for size, gain in row
                   if size <= left and int(after[i + 1][left - size]) + gain == want)
        chosen.append(size)
        left -= size
    return tuple(chosen)


def second_best(rows: Sequence[Row], num_slots: int,
                chosen: Sequence[int]) -> Found | None:
    """The best vector that differs from `chosen`. By prefix and suffix tables, one pass each."""
    after = _suffixes(rows, num_slots)
    before = _suffixes(list(reversed(rows)), num_slots)[::-1]
    found: tuple[int, int, int, int] | None = None
    for i, row in enumerate(rows):
        both = before[i][:, None] if num_slots == 0 else before[i]
        for size, gain in row:
            if size == chosen[i] or size > num_slots:
                continue
            left = num_slots - size
            value = np.ravel(both)[: left + 1] + after[i + 1][: left + 1][::-1]
            at = int(np.argmax(value))
            total = int(value[at]) + gain
            if value[at] > _IMPOSSIBLE // 2 and (found is None or total > found[0]):
                found = (total, i, size, at)
    if found is None:
        return None
    total, i, size, at = found
    head = list(reversed(rows[:i]))
    first = _forward(head, _suffixes(head, num_slots), at)[::-1]
    last = _forward(rows[i + 1:], after[i + 1:], num_slots - size - at)
    return (*first, size, *last), total


def choose(wishes: Sequence[Wish], *, num_slots: int, mtbf_gpu_s: float, transition_s: float,
           gain_min: float) -> Choice:
    """The best plan; a healthy task is changed only for `gain_min` of the cluster's WAF."""
    rows = gains(wishes, num_slots=num_slots, mtbf_gpu_s=mtbf_gpu_s, transition_s=transition_s)
    free = _plan(wishes, rows, best(rows, num_slots))
    assert free is not None, "0 slots for each always fits"
    held = [row if wish.hurt or wish.now == 0 else [x for x in row if x[0] == wish.now] or row
            for wish, row in zip(wishes, rows, strict=True)]
    steady = _plan(wishes, rows, best(held, num_slots))
    plan = free
    others: list[tuple[str, Plan | None]] = []
    if steady is not None and steady.slots != free.slots:
        if free.waf - steady.waf < gain_min * steady.waf:
            plan = steady
            others.append((f"the optimum, which changes healthy tasks for less than "
                           f"{gain_min:g} of the WAF", free))
        else:
            others.append(("healthy tasks stay as they are", steady))
    others += _named(wishes, rows, num_slots)
    others.append(("the next best", _plan(wishes, rows, second_best(rows, num_slots, plan.slots))))
    return Choice(plan=plan, allocations=_allocations(wishes, plan),
                  alternatives=_alternatives(wishes, plan, others))


def _named(wishes: Sequence[Wish], rows: Sequence[Row],
           num_slots: int) -> list[tuple[str, Plan | None]]:
    """The plans that a person would think of first."""
    keep = [[x for x in row if x[0] == wish.now] for wish, row in zip(wishes, rows, strict=True)]
    others: list[tuple[str, Plan | None]] = []
    if all(keep):
        others.append(("keep as it is", _plan(wishes, rows, best(keep, num_slots))))
    hurt = [wish.name for wish in wishes if wish.hurt]
    if hurt:
        shrink = [[x for x in row if x[0] <= wish.now] if wish.hurt else same
                  for wish, row, same in zip(wishes, rows, keep, strict=True)]
        if all(shrink):
            others.append((f"shrink only the hurt ({', '.join(hurt)})",
                           _plan(wishes, rows, best(shrink, num_slots))))
    return others


def _plan(wishes: Sequence[Wish], rows: Sequence[Row],
          found: Found | None) -> Plan | None:
    if found is None:
        return None
    slots = found[0]
    waf = math.fsum(waf_of(wish, x) for wish, x in zip(wishes, slots, strict=True))
    return Plan(slots=slots, objective=found[1], waf=waf)


def _allocations(wishes: Sequence[Wish], plan: Plan) -> tuple[Allocation, ...]:
    return tuple(Allocation(task=wish.task, slots_before=wish.now, slots=x, waf=waf_of(wish, x))
                 for wish, x in zip(wishes, plan.slots, strict=True))


def _alternatives(wishes: Sequence[Wish], plan: Plan,
                  others: Sequence[tuple[str, Plan | None]]) -> tuple[Alternative, ...]:
    found: list[Alternative] = []
    seen = [plan.slots]
    for what, other in others:
        if other is None or other.slots in seen:
            continue
        seen.append(other.slots)
        slots = tuple((wish.task, x) for wish, x in zip(wishes, other.slots, strict=True))
        found.append(Alternative(what=what, slots=slots, waf=other.waf,
                                 objective=other.objective))
    return tuple(found)
