"""Whether the healthy stay as they are, by Lagrange's bound alone: then the plan is known at once.

At any price of a slot, what each task's best size leaves above its price, and the price of all
slots, are together more than any plan gains. Near the optimum the price is what the next slots
would earn most tasks, or what the last ones earn that are worth least. Where even that is too
little for healthy tasks to be changed, the best plan without a change is the plan; the optimum
itself need not be found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import Wish
from .solver.candidates import Found, Rows
from .solver.core import Ints

_PRODUCT_NUM_MAX = 1 << 61


def surely(wishes: Sequence[Wish], rows: Rows, earned: Ints, num_slots: int,
           gain_min: float) -> Found | None:
    """The best with the healthy as they are, where it is surely the plan; else None.

    Without limits and floors. At most one task may have a choice, among the slots that are left.
    """
    if not rows.num:
        return None
    firsts, row_of = rows.starts[:-1], rows.row_of
    now = np.array([wish.now for wish in wishes], dtype=np.int64)
    has = np.flatnonzero(rows.sizes == now[row_of])
    vector = firsts.copy()
    stays = np.zeros(rows.num, dtype=np.bool_)
    stays[row_of[has]] = np.array([not wish.hurt and wish.now > 0 for wish in wishes],
                                  dtype=np.bool_)[row_of[has]]
    kept = has[stays[row_of[has]]]
    vector[row_of[kept]] = kept
    left = num_slots - int(rows.sizes[vector].sum())
    if left < 0:
        return None
    ends = rows.starts[1:]
    choosing = [row for row in np.flatnonzero(~stays).tolist()
                if vector[row] + 1 < ends[row] and rows.sizes[vector[row] + 1] <= left]
    if len(choosing) > 1:
        return None
    for row in choosing:
        begin = int(firsts[row])
        fits = rows.gains[begin:begin + int(np.searchsorted(
            rows.sizes[begin:int(ends[row])], left, side="right"))]
        vector[row] = begin + len(fits) - 1 - int(np.argmax(fits[::-1]))  # of equals the largest
    gain = rows.sums(vector)[0]
    enough = gain_min * int(earned[vector].sum())
    for price in _prices(rows, vector):
        bound = _bound(rows, price, num_slots)
        if bound is not None and (bound <= gain or bound < gain + enough):
            return rows.slots(vector), gain
    return None


def _prices(rows: Rows, vector: Ints) -> tuple[int, int]:
    """Of a slot, by what tasks would earn with the next ones, in the middle of the tasks; by what
    they would lose with theirs, the least."""
    above = np.minimum(vector + 1, rows.starts[1:] - 1)
    below = np.maximum(vector - 1, rows.starts[:-1])
    more, less = _each(rows, vector, above), _each(rows, below, vector)
    return (int(more[len(more) // 2]) if len(more) else 0, int(less[0]) if len(less) else 0)


def _each(rows: Rows, few: Ints, many: Ints) -> Ints:
    """What each slot more gains, where there are some; the least first."""
    slots = rows.sizes[many] - rows.sizes[few]
    some = slots > 0
    return np.sort((rows.gains[many] - rows.gains[few])[some] // slots[some])


def _bound(rows: Rows, price: int, num_slots: int) -> int | None:
    """What no plan gains more than, at this price; None: the numbers are too large."""
    price = max(price, 0)
    if price * max(num_slots, int(rows.sizes.max())) >= _PRODUCT_NUM_MAX // rows.num:
        return None
    over = np.maximum.reduceat(rows.gains - price * rows.sizes, rows.starts[:-1])
    return int(over.sum()) + price * num_slots
