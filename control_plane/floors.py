"""Floors: the fewest slots that a plan gives a task, and whose floors fit together.

Where not all do, they are given in order while they still fit: a higher priority first, then a
higher weight, then the earlier task. Who is not given one has none in this plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from .rows import Rows
from .wishes import PlanInput, Wish, waf_of


def are_asked(asked: PlanInput) -> bool:
    """Whether a plan of this input has floors to think of."""
    all_ask = asked.floor or asked.alpha >= 1
    return any((all_ask or wish.floor) and asks(asked, wish) for wish in asked.wishes)


def are_set(asked: PlanInput) -> bool:
    """Whether any of them is asked for by a job or the policy, and not by alpha alone."""
    return are_asked(replace(asked, alpha=0.0))


def is_plain(asked: PlanInput) -> bool:
    """Whether the plan is of the most WAF, without floors."""
    return not asked.alpha and not are_asked(asked)


def asks(asked: PlanInput, wish: Wish) -> tuple[int, ...]:
    """The floors that a task would have, the one that it asks for first; most have none or one.

    Where its own does not fit, it is given the smallest size that earns anything, if the policy
    gives each task that, or with nothing it would be worth minus infinity. A task that earns
    nothing on any size has none.
    """
    least = asked.floor or asked.alpha >= 1
    levels = (*([wish.floor] if wish.floor else []), *([0] if least else []))
    found = (next((size for size, waf in zip(wish.sizes, wish.wafs, strict=True)
                   if waf > 0 and size >= level), 0) for level in levels)
    return tuple(dict.fromkeys(floor for floor in found if floor))


def without(asked: PlanInput) -> PlanInput:
    """The same with no floor asked for but by alpha."""
    return replace(asked, floor=False, wishes=tuple(
        replace(wish, floor=0) if wish.floor else wish for wish in asked.wishes))


def given(asked: PlanInput) -> tuple[int, ...]:
    """By wish: its floor in this plan, 0 where it has none. Together they fit, also into quotas."""
    wishes, found = asked.wishes, [0] * len(asked.wishes)
    left, of_team = asked.num_slots, dict(asked.quotas)
    for i in sorted(range(len(wishes)), key=lambda i: _place(wishes[i])):
        for floor in asks(asked, wishes[i]):
            team = wishes[i].team
            if floor <= left and floor <= of_team.get(team, floor):
                found[i] = floor
                left -= floor
                if team in of_team:
                    of_team[team] -= floor
                break
    return tuple(found)


def _place(wish: Wish) -> tuple[int, float, int]:
    return -wish.priority, -wish.weight, wish.task


def kept(asked: PlanInput, rows: Rows) -> NDArray[np.bool_]:
    """By candidate: whether the floors leave it. From alpha 1 on, who has none has no slots."""
    least, row_of = np.array(given(asked), dtype=np.int64), rows.row_of
    found: NDArray[np.bool_] = rows.sizes >= least[row_of]
    if asked.alpha >= 1:
        earns = np.array([bool(asks(asked, wish)) for wish in asked.wishes], dtype=np.bool_)
        found &= (rows.sizes == 0) | (least > 0)[row_of] | ~earns[row_of]
    return found


def starved(asked: PlanInput, slots: Sequence[int]) -> tuple[int, ...]:
    """Tasks that could earn something, and do not."""
    return tuple(wish.task for wish, x in zip(asked.wishes, slots, strict=True)
                 if not waf_of(wish, x) and any(wish.wafs))


def short(asked: PlanInput, slots: Sequence[int]) -> dict[int, int]:
    """By task that a plan gives less than the floor that it asks for: the least that would be one.

    Where that is all that it has, there was no room for more.
    """
    found: dict[int, int] = {}
    for wish, x in zip(asked.wishes, slots, strict=True):
        wanted = asks(asked, wish)
        if wanted and x < wanted[0]:
            found[wish.task] = next(floor for floor in wanted[::-1] if floor > x)
    return found


def barred_by_quota(asked: PlanInput, tasks: Iterable[int]) -> tuple[int, ...]:
    """Those of `tasks` that would have a floor if their own team alone had no quota."""
    found: list[int] = []
    row_of = {wish.task: row for row, wish in enumerate(asked.wishes)}
    quotas, teams = dict(asked.quotas), dict[str, tuple[int, ...]]()
    for task in tasks:
        team = asked.wishes[row_of[task]].team
        if team not in quotas:
            continue
        if team not in teams:
            teams[team] = given(replace(asked, quotas=tuple(
                x for x in asked.quotas if x[0] != team)))
        if teams[team][row_of[task]]:
            found.append(task)
    return tuple(found)
