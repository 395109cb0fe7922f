"""The price of a task that waits: what it would cost the others, and from which weight it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise

from msgspec import Struct
from msgspec.structs import replace

from . import constraints, floors
from .constraints import Limits
from .planner import Plan, gains, held, plan_of
from .rows import Found, Rows
from .tables import IMPOSSIBLE, Others
from .wishes import PlanInput

WORK_NUM_MAX = 5 << 22
"""Candidates times slots, as `prices` counts them: about a tenth of a second, and 100 MB."""
_SLOTS_NUM, _SIZES_NUM = 1 << 12, 4
"""What a candidate takes beside its slots, in slots; what a row's memory takes, in candidates."""
VECTORS_NUM_MAX = 1 << 13
"""Tasks that are told a price times all tasks: half as long again."""

LIMITED_WORK_NUM_MAX = 1 << 24
"""States times candidates of all searches under limits that prices may take: some 30 ms."""
CANDIDATE_NUM = 8192
"""States that take as long as all else that a search does with a candidate."""


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
    very many wait, only the first of them, by VECTORS_NUM_MAX; under limits those for which
    LIMITED_WORK_NUM_MAX is enough. None under floors or alpha, where priorities differ, nor where a
    hot spare may be kept: there no single weight says it.
    """
    if (asked.limits is not None and asked.limits.priorities) or (
            asked.spare_slots or not floors.is_plain(asked)):
        return {}
    num_slots, num_rows = asked.num_slots, len(asked.wishes)
    num_sizes = sum(len(wish.sizes) + 1 for wish in asked.wishes)
    work = num_sizes * (num_slots + _SLOTS_NUM) + _SIZES_NUM * num_rows * num_slots
    if work > WORK_NUM_MAX:
        return {}
    after = tuple(replace(wish, now=slots, hurt=False)
                  for wish, slots in zip(asked.wishes, plan.slots, strict=True))
    rows = gains(replace(asked, wishes=after))
    pairs = list(zip(rows.sizes.tolist(), rows.gains.tolist(), strict=True))
    options = {i: sizes for i, (begin, end) in enumerate(pairwise(rows.starts.tolist()))
               if plan.slots[i] == 0
               and (sizes := [x for x in pairs[begin:end] if 0 < x[0] <= num_slots and x[1] > 0])}
    if not options:
        return {}
    if asked.limits is not None:
        return _limited(replace(asked, wishes=after), rows, plan, options)
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


def _limited(after: PlanInput, rows: Rows, plan: Plan,
             options: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, Price]:
    """The same under limits: the best of all others beside each size, by a search for each.

    None of a task that no weight lets run.
    """
    limits, left, found = after.limits, LIMITED_WORK_NUM_MAX, dict[int, Price]()
    assert limits is not None
    same = held(after.wishes, rows)
    for i, sizes in options.items():
        left -= 2 * (len(sizes) + 1) * limited_work(after)
        if left < 0:
            break
        free, steady = (_beside(of, i, sizes, after.num_slots, limits) for of in (rows, same))
        runs = [(one[1], one[0]) for size, _ in sizes if (one := free[size]) is not None]
        if not runs:
            continue
        value, slots = max(runs)
        best, num = plan_of(after.wishes, (slots, value)), after.num_slots
        gain_of = {0: 0, **dict(sizes)}
        rest, rest_held = ({num - size: one[1] - gain_of[size] if one is not None else IMPOSSIBLE
                            for size, one in every.items()} for every in (free, steady))
        found[after.wishes[i].task] = Price(
            cost_waf=max(plan.waf - best.waf, 0.0), plan=best,
            times=_times(sizes, num, after.gain_min, free=rest.__getitem__,
                         steady=rest_held.__getitem__))
    return found


def _beside(rows: Rows, row: int, sizes: Sequence[tuple[int, int]], num_slots: int,
            limits: Limits) -> dict[int, Found | None]:
    """By size of a row, 0 too: the best plan that gives it so many."""
    return {size: constraints.within(
        rows.only((rows.row_of != row) | (rows.sizes == size)), num_slots, limits)
        for size in (0, *(size for size, _ in sizes))}


def limited_work(asked: PlanInput) -> int:
    """States times candidates of one search under limits, with what a candidate costs besides."""
    num = sum(len(wish.sizes) + 1 for wish in asked.wishes)
    num_moves = min(asked.moves_max or 0, len(asked.wishes)) + 1
    num_priorities = len({wish.priority for wish in asked.wishes})
    return num * (CANDIDATE_NUM + (asked.num_slots + 1) * num_moves * num_priorities)


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
