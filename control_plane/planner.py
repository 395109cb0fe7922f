"""The plan: which task gets how many slots, exactly, and what was beaten.

A multiple-choice knapsack over the candidate sizes of each task, maximising the sum of G (our
reading of the paper, section 4). G is scaled by a power of two and rounded to integers, so that
every way of computing the optimum gives the same one. Ties: the first task, by id, gets most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..events.orders import Allocation, Alternative

NUM_BEATEN_MIN = 2
"""Plans that a plan is told to have beaten, where there are so many."""
IMPOSSIBLE = -(1 << 60)
"""Below half of it: no vector fits."""
_SUM_BITS = 52
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
    after = suffixes(rows, num_slots)
    if after[0][num_slots] <= IMPOSSIBLE // 2:
        return None
    return backtrack(rows, after, num_slots), int(after[0][num_slots])


def _best_of(row: Row, rest: Table) -> Table:
    """For each j: the most of gain + rest[j - size] over the row's candidates."""
    found = np.full_like(rest, IMPOSSIBLE)
    for size, gain in row:
        if size < len(rest):
            head = rest[: len(rest) - size]
            np.maximum(found[size:], np.where(head > IMPOSSIBLE // 2, head + gain, IMPOSSIBLE),
                       out=found[size:])
    return found


def suffixes(rows: Sequence[Row], num_slots: int) -> list[Table]:
    """after[i][j]: the best of rows i.. with j slots."""
    after: list[Table] = [np.zeros(num_slots + 1, dtype=np.int64)]
    for row in reversed(rows):
        after.append(_best_of(row, after[-1]))
    return after[::-1]


def backtrack(rows: Sequence[Row], after: Sequence[Table], left: int) -> tuple[int, ...]:
    """The one backtracker: of all optima, the first row takes most."""
    chosen: list[int] = []
    for i, row in enumerate(rows):
        want = int(after[i][left])
        size = max(size for size, gain in row
                   if size <= left and int(after[i + 1][left - size]) + gain == want)
        chosen.append(size)
        left -= size
    return tuple(chosen)


class Others:
    """The best that the rows before and after one row make of j slots, exactly."""

    def __init__(self, rows: Sequence[Row], num_slots: int) -> None:
        self.rows = rows
        self.after: list[Table] = suffixes(rows, num_slots)
        self.before: list[Table] = suffixes(list(reversed(rows)), num_slots)[::-1]

    def without(self, i: int, left: int) -> tuple[int, int]:
        """(the best sum within `left` slots, how many of them go to the rows before i)."""
        value = self.before[i][: left + 1] + self.after[i + 1][: left + 1][::-1]
        at = int(np.argmax(value))
        return int(value[at]), at

    def beside(self, i: int) -> Callable[[int], int]:
        """The best sum of all rows but i, by the slots that are left for them."""
        return lambda left: self.without(i, left)[0]

    def vector(self, i: int, size: int, left: int, at: int) -> tuple[int, ...]:
        """The slots behind `without`, with `size` for row i."""
        first = backtrack(list(reversed(self.rows[:i])), self.before[i::-1], at)[::-1]
        return (*first, size, *backtrack(self.rows[i + 1:], self.after[i + 1:], left - at))


def runners_up(rows: Sequence[Row], num_slots: int,
               chosen: Sequence[int]) -> Iterator[tuple[int, int, Found]]:
    """For each row and each size that was not chosen, the best vector with it; best first."""
    others = Others(rows, num_slots)
    found: list[tuple[int, int, int, int]] = []
    for i, row in enumerate(rows):
        for size, gain in row:
            if size != chosen[i] and size <= num_slots:
                value, at = others.without(i, num_slots - size)
                if value > IMPOSSIBLE // 2:
                    found.append((-value - gain, i, size, at))
    for total, i, size, at in sorted(found, key=lambda x: x[:2]):
        yield i, size, (others.vector(i, size, num_slots - size, at), -total)


def choose(wishes: Sequence[Wish], *, num_slots: int, mtbf_gpu_s: float, transition_s: float,
           gain_min: float) -> Choice:
    """The best plan; a healthy task is changed only for `gain_min` of what the cluster earns.

    Both are compared by the sum of G, so what the changes themselves cost is counted. What the
    hurt cost in every plan is no part of what is earned, and does not lower the bar.
    """
    rows = gains(wishes, num_slots=num_slots, mtbf_gpu_s=mtbf_gpu_s, transition_s=transition_s)
    free = plan_of(wishes, best(rows, num_slots))
    assert free is not None, "0 slots for each always fits"
    steady = plan_of(wishes, best(held(wishes, rows), num_slots))
    plan, others = free, _named(wishes, rows, num_slots)
    if steady is not None and steady.slots != free.slots:
        anyway = sum(row[0][1] for wish, row in zip(wishes, rows, strict=True) if wish.hurt)
        enough = steady.objective + gain_min * (steady.objective - anyway)
        if free.objective < enough or free.objective == steady.objective:
            plan = steady
            others.append((f"the optimum, which changes healthy tasks for less than "
                           f"{100 * gain_min:g} % of the WAF", free))
        else:
            others.append(("healthy tasks stay as they are", steady))
    others += _next(wishes, rows, num_slots, [plan, *(other for _, other in others)])
    return Choice(plan=plan, allocations=_allocations(wishes, plan),
                  alternatives=_alternatives(wishes, plan, others))


def held(wishes: Sequence[Wish], rows: Sequence[Row]) -> list[Row]:
    """The rows without what would change a healthy task that has slots."""
    return [row if wish.hurt or wish.now == 0 else [x for x in row if x[0] == wish.now] or row
            for wish, row in zip(wishes, rows, strict=True)]


def _next(wishes: Sequence[Wish], rows: Sequence[Row], num_slots: int,
          known: Sequence[Plan | None]) -> list[tuple[str, Plan | None]]:
    """The next best plan, and as many more as make NUM_BEATEN_MIN that were beaten."""
    chosen, *others = dict.fromkeys(plan.slots for plan in known if plan is not None)
    found: list[tuple[str, Plan | None]] = []
    for place, (i, size, vector) in enumerate(runners_up(rows, num_slots, chosen)):
        if place and len(others) >= NUM_BEATEN_MIN:
            break
        what = f"the best with {wishes[i].name} on {size}" if place else "the next best"
        found.append((what, plan_of(wishes, vector)))
        if vector[0] not in others:
            others.append(vector[0])
    return found


def ideal_waf(wishes: Sequence[Wish], num_slots: int) -> float:
    """What the best plan of all would earn on `num_slots`, were changes free."""
    rows = gains(wishes, num_slots=num_slots, mtbf_gpu_s=1.0, transition_s=0.0)
    plan = plan_of(wishes, best(rows, num_slots))
    return plan.waf if plan is not None else 0.0


def _named(wishes: Sequence[Wish], rows: Sequence[Row],
           num_slots: int) -> list[tuple[str, Plan | None]]:
    """The plans that a person would think of first."""
    keep = [[x for x in row if x[0] == wish.now] for wish, row in zip(wishes, rows, strict=True)]
    others: list[tuple[str, Plan | None]] = []
    if all(keep):
        others.append(("keep as it is", plan_of(wishes, best(keep, num_slots))))
    hurt = [wish.name for wish in wishes if wish.hurt]
    if hurt:
        shrink = [[x for x in row if x[0] <= wish.now] if wish.hurt else same
                  for wish, row, same in zip(wishes, rows, keep, strict=True)]
        if all(shrink):
            others.append((f"shrink only the hurt ({', '.join(hurt)})",
                           plan_of(wishes, best(shrink, num_slots))))
    return others


def plan_of(wishes: Sequence[Wish], found: Found | None) -> Plan | None:
    """What was found, with what it earns."""
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
