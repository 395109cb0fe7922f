"""The price of a task that waits: what it would cost the others, and from which weight it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from .planner import (
    IMPOSSIBLE,
    Plan,
    Row,
    Table,
    Wish,
    backtrack,
    gains,
    held,
    plan_of,
    suffixes,
)


class Price(Struct, frozen=True, kw_only=True):
    """Of one task without slots, beside the plan that was chosen."""

    cost_waf: float
    """What all would earn less if it ran, at least 0."""
    times: float
    """At more than so many times its weight the next plan gives it slots; it may be below 1."""
    plan: Plan
    """The best plan in which it runs."""


class _Others:
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


def prices(wishes: Sequence[Wish], plan: Plan, *, num_slots: int, mtbf_gpu_s: float,
           transition_s: float, gain_min: float) -> dict[int, Price]:
    """By task: the price of each that `plan` gives nothing, where its smallest size would fit.

    It is the price once the plan is carried out, when every task is healthy on what it was given:
    then `choose` gives the task slots if its weight is more than `times` what it is, and none if
    it is less, all else equal. That counts `gain_min`: healthy tasks give slots only for so much.
    O(num_slots) for each size of each such task, beyond two passes of the planner.
    """
    after = [replace(wish, now=slots, hurt=False)
             for wish, slots in zip(wishes, plan.slots, strict=True)]
    rows = gains(after, num_slots=num_slots, mtbf_gpu_s=mtbf_gpu_s, transition_s=transition_s)
    waiting = [i for i, row in enumerate(rows) if plan.slots[i] == 0
               and any(0 < size <= num_slots and gain > 0 for size, gain in row)]
    if not waiting:
        return {}
    free, steady = _Others(rows, num_slots), _Others(held(after, rows), num_slots)
    found: dict[int, Price] = {}
    for i in waiting:
        sizes = [x for x in rows[i] if 0 < x[0] <= num_slots and x[1] > 0]
        options: list[tuple[int, int, int]] = []
        for size, gain in sizes:
            value, at = free.without(i, num_slots - size)
            options.append((value + gain, size, at))
        value, size, at = max(options)
        runs = plan_of(after, (free.vector(i, size, num_slots - size, at), value))
        assert runs is not None
        found[wishes[i].task] = Price(
            cost_waf=max(plan.waf - runs.waf, 0.0), plan=runs,
            times=_times(sizes, num_slots, gain_min, free=free.beside(i), steady=steady.beside(i)))
    return found


def _times(sizes: Sequence[tuple[int, int]], num_slots: int, gain_min: float, *,
           free: Callable[[int], int], steady: Callable[[int], int]) -> float:
    """Where `choose` turns, as a factor on the gains of `sizes`.

    At factor f the optimum is F = max(free(n), free(n - x) + f g(x)), what keeps the healthy as
    they are S = max(steady(n), steady(n - x) + f g(x)), and F is taken if F >= (1 + gain_min) S.
    Both are convex in f and never fall, so each question has one turning point.
    """
    def reaches(level: float, rest: Callable[[int], int]) -> float:
        return min(((level - value) / gain for size, gain in sizes
                    if (value := rest(num_slots - size)) > IMPOSSIBLE // 2), default=float("inf"))

    without, without_held = free(num_slots), steady(num_slots)
    free_gives, steady_gives = reaches(without, free), reaches(without_held, steady)
    if steady_gives <= free_gives:
        return max(steady_gives, min(free_gives, reaches(without / (1 + gain_min), steady)))
    return min(steady_gives, max(free_gives, reaches((1 + gain_min) * without_held, free)))
