"""The price of a task that waits: what it would cost the others, and from which weight it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise

from msgspec import Struct
from msgspec.structs import replace

from . import floors
from .planner import Plan, gains, held, plan_of
from .tables import IMPOSSIBLE, Others
from .wishes import PlanInput

WORK_NUM_MAX = 1 << 24
"""Candidates times slots: about a tenth of a second, and 256 MB."""
VECTORS_NUM_MAX = 1 << 14
"""Tasks that are told a price times all tasks: about as long again."""


class Price(Struct, frozen=True, kw_only=True):
    """Of one task without slots, beside the plan that was chosen."""

    cost_waf: float
    """What all would earn less if it ran, at least 0."""
    times: float
    """At more than so many times its weight the next plan gives it slots; it may be below 1."""
    plan: Plan
    """The best plan in which it runs."""


def prices(asked: PlanInput, plan: Plan) -> dict[int, Price]:
    """By task: the price of each that `plan` gives nothing, where its smallest size would fit.

    It is the price once the plan is carried out, when every task is healthy on what it was given:
    then `choose` gives the task slots if its weight is more than `times` what it is, and none if
    it is less, all else equal. That counts `gain_min`: healthy tasks give slots only for so much.
    O(num_slots) for each size of each task: none where that is more than WORK_NUM_MAX; and where
    very many wait, only the first of them, by VECTORS_NUM_MAX. Nor under limits or floors, nor
    where a hot spare may be kept: there no single weight says it.
    """
    if asked.limits is not None or asked.spare_slots or floors.are_asked(asked):
        return {}
    num_slots = asked.num_slots
    after = tuple(replace(wish, now=slots, hurt=False)
                  for wish, slots in zip(asked.wishes, plan.slots, strict=True))
    rows = gains(replace(asked, wishes=after))
    if len(rows.sizes) * num_slots > WORK_NUM_MAX:
        return {}
    pairs = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    options = {i: sizes for i, (begin, end) in enumerate(pairwise(rows.starts.tolist()))
               if plan.slots[i] == 0
               and (sizes := [x for x in pairs[begin:end] if 0 < x[0] <= num_slots and x[1] > 0])}
    if not options:
        return {}
    options = dict(islice(options.items(), VECTORS_NUM_MAX // rows.num))
    free, steady = Others(rows, num_slots), Others(held(after, rows), num_slots)
    found: dict[int, Price] = {}
    for i, sizes in options.items():
        best: list[tuple[int, int, int]] = []
        for size, gain in sizes:
            value, at = free.without(i, num_slots - size)
            best.append((value + gain, size, at))
        value, size, at = max(best)
        runs = plan_of(after, (free.vector(i, size, num_slots - size, at), value))
        found[asked.wishes[i].task] = Price(
            cost_waf=max(plan.waf - runs.waf, 0.0), plan=runs,
            times=_times(sizes, num_slots, asked.gain_min, free=free.beside(i),
                         steady=steady.beside(i)))
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
