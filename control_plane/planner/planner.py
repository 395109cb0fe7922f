"""The plan: which task gets how many slots, exactly, and what was beaten.

A multiple-choice knapsack over the candidate sizes of each task, maximising the sum of G (our
reading of the paper, section 4), or of utilities where fairness is asked for. What a slot earns is
scaled by a power of two and rounded to an integer, and so is what a change costs: every way of
computing the optimum gives the same one, and what earns alike by slot is alike. Ties: the first
task, by id, gets most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ...events.records.decisions import Allocation, Alternative, HotSpare
from . import constraints
from . import steady as planner_steady
from .alternative_names import ALPHALESS, FLOORLESS, LIMITS, OTHERS_WAIT_NUM
from .objective import SUM_BITS, exact, shift_of
from .problem import Limits, PlanInput, Wish, allocation, waf_of
from .solver.candidates import Found, Rows
from .solver.core import LOSS_NUM_MAX, Ints
from .solver.knapsack import Solved, best

# --- Who moves where some of the healthy must: as few as can be, those with whom a slot is dearest.
# ---

Bools = NDArray[np.bool_]
_PRICE_BITS = 58
"""Price times size fits into 64 bits beside a gain."""
_FINE_BITS = 8
"""To so many is the price known in the end."""


class _Rest(Struct, frozen=True):
    """By row, at a price of a slot: the most that is left of any gain, and the size of that."""

    left: Ints
    sizes: Ints


def kept(rows: Rows, moves: Bools, num_slots: int) -> Bools:
    """By candidate: whether it is left, if as few rows as can be have one of `moves`.

    Which rows they are follows from a price of a slot, the least at which what each row would
    choose fits: those that then gain most by a move. All must fit with the smallest candidates.
    """
    row_of, firsts = rows.row_of, rows.starts[:-1]
    moves = moves & np.logical_or.reduceat(~moves, firsts)[row_of]  # else it has no choice
    num = _fewest(rows, moves, num_slots)
    may = np.logical_or.reduceat(moves, firsts)
    least = _size_least(rows, ~moves) - _size_least(rows, moves)
    found = _first(np.where(may, least, -LOSS_NUM_MAX), num)

    def at(price: int) -> Bools | None:
        stay, move = (_rest(rows, some, price, num_slots) for some in (~moves, moves))
        some = _first(np.where(may, move.left - stay.left, -LOSS_NUM_MAX), num)
        taken = int(np.where(some, move.sizes, stay.sizes).sum())
        return some if taken <= num_slots else None

    low, high = 0, ((1 << _PRICE_BITS) // max(num_slots, 1)).bit_length() - 1
    while low < high:
        bits = (low + high) // 2
        fits = at(1 << bits)
        low, high, found = (bits + 1, high, found) if fits is None else (low, bits, fits)
    price = 1 << low
    for bit in range(low - 1, max(low - _FINE_BITS, 0) - 1, -1):
        fits = at(price - (1 << bit))
        if fits is not None:
            price, found = price - (1 << bit), fits
    return ~moves | found[row_of]


def _fewest(rows: Rows, moves: Bools, num_slots: int) -> int:
    """Rows that must move: those first that then take fewest slots."""
    least, stays = _size_least(rows, np.ones_like(moves)), _size_least(rows, ~moves)
    saved = np.sort(stays - least)[::-1]
    over = int(stays.sum()) - num_slots
    return int(np.searchsorted(np.cumsum(saved), over)) + 1 if over > 0 else 0


def _size_least(rows: Rows, some: Bools) -> Ints:
    """By row: the smallest of these candidates, LOSS_NUM_MAX // rows where it has none."""
    none = LOSS_NUM_MAX // max(rows.num, 1)
    return np.minimum.reduceat(np.where(some, rows.sizes, none), rows.starts[:-1])


def _rest(rows: Rows, some: Bools, price: int, num_slots: int) -> _Rest:
    """Of these candidates that fit at all."""
    some = some & (rows.sizes <= num_slots)
    left = np.where(some, rows.gains - price * np.minimum(rows.sizes, num_slots), -LOSS_NUM_MAX)
    most = np.maximum.reduceat(left, rows.starts[:-1])
    own = some & (left == most[rows.row_of])
    return _Rest(most, _size_least(rows, own))


def _first(values: Ints, num: int) -> Bools:
    """By row: whether it is among those of the largest values, of equal ones the first."""
    found = np.zeros(len(values), dtype=np.bool_)
    found[np.argsort(-values, kind="stable")[:num]] = True
    return found

NUM_BEATEN_MIN = 2
"""Plans that a plan is told to have beaten, where there are so many."""
NEAREST = "the best found that changes two tasks"
"""Where the next best would take too long to be found."""
SIZES_NUM_MAX = 1 << 13
"""Of all tasks, for which those that change for floors are searched for exactly."""
RUNNERS_WORK_NUM_MAX = 1 << 24
"""Candidates times states, to find the next best: about a twentieth of a second."""


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
    spare: HotSpare | None = None
    optimum: Plan | None = None
    """Where `gain_min` kept healthy tasks as they are: the plan that it is not."""
    limitless: Plan | None = None
    """The optimum without limits, where those cost something."""


def gains(asked: PlanInput) -> Rows:
    """G(t, x) of each task and each size that its floor leaves, 0 too; integers on one scale.

    With alpha: what it is worth by that."""
    return _floored(asked, *all_rows(asked))[0]


def wanted(asked: PlanInput) -> tuple[int, ...]:
    """What would suit each task best, were there slots for all, and for all floors."""
    most = sum(wish.sizes[-1] for wish in asked.wishes if wish.sizes)
    found = exact(asked.wishes, asked.running_s, most, alpha=asked.alpha)
    rows = _floored(replace(asked, num_slots=most), *found.rows(shift_of(found.most())))[0]
    return tuple(int(rows.sizes[begin + int(np.argmax(rows.gains[begin:end]))])
                 for begin, end in pairwise(rows.starts.tolist()))


def all_rows(asked: PlanInput) -> tuple[Rows, Ints]:
    """Of every candidate, whatever floors leave."""
    found = exact(asked.wishes, asked.running_s, asked.num_slots, alpha=asked.alpha)
    return found.rows(shift_of(found.most()))


def _floored(asked: PlanInput, every: Rows, earned: Ints) -> tuple[Rows, Ints]:
    """Of the candidates that floors leave."""
    if not constraints.are_asked(asked):
        return every, earned
    kept = constraints.kept(asked, every)
    return every.only(kept), earned[kept]


def choose(asked: PlanInput, known: Found | None = None) -> Choice:
    """The best plan; a healthy task is changed only for `gain_min` of what the cluster earns.

    Both are compared by the sum of G, so what the changes themselves cost is counted. `known` is
    the optimum where it is known already (foreseen.py); the choice is the same.
    """
    wishes, limits = asked.wishes, asked.limits
    every, earned = all_rows(asked)
    rows, left = _floored(asked, every, earned)
    made = _decide(asked, rows, left, known)
    plan, others = made.plan, list[tuple[str, Plan | None]]()
    if made.free.slots != made.limitless.slots:  # told as that, also where it is as things are
        others.append((_limitless(limits, made.limitless), made.limitless))
    others += _named(wishes, rows, asked.num_slots, limits)
    if made.plan is not made.free:
        others.append((f"the optimum, which changes healthy tasks for less than "
                       f"{100 * asked.gain_min:g} %{' of the WAF' * (not asked.alpha)}",
                       made.free))
    elif made.steady is not None:
        others.append(("healthy tasks stay as they are" if made.is_steady else
                       "healthy tasks change for the floors alone", made.steady))
    if made.free.slots == made.limitless.slots:
        others += [(what, other) for what, other in
                   _next(wishes, made.solved, [plan, *(other for _, other in others)])
                   if limits is None or other is None or limits.allow(other.slots)]
    if constraints.are_set(asked):
        bare = constraints.without(asked)
        bare_plan = _decide(bare, *_floored(bare, every, earned)).plan
        others.append((FLOORLESS, _as_here(asked, every, plan, bare_plan)))
    if asked.alpha:
        others.append((ALPHALESS, _as_here(asked, every, plan, planned(replace(asked, alpha=0.0)))))
    share = int(earned[every.vector(plan.slots)].sum()) if asked.alpha else 0
    return Choice(plan=plan, allocations=_allocations(wishes, plan),
                  alternatives=_alternatives(wishes, plan, others, share),
                  optimum=made.free if plan is not made.free else None,
                  limitless=made.limitless if made.limitless.objective > plan.objective else None)


def _limitless(limits: Limits | None, plan: Plan) -> str:
    """What `plan`, the optimum without limits, is called."""
    assert limits is not None, "without limits it is the optimum"
    if limits.allow(plan.slots):
        return "without priorities"
    there = {"moves_max": limits.moves_max is not None, "quotas": bool(limits.teams),
             "priorities": bool(limits.priorities)}
    some = tuple(name for name, is_there in there.items() if is_there)
    return next(what for what, names in LIMITS.items() if names == some)


def _as_here(asked: PlanInput, every: Rows, plan: Plan, other: Plan) -> Plan:
    """A plan that was made for another objective, by this one, where the two compare."""
    if asked.alpha >= 1 and constraints.starved(asked, plan.slots) != constraints.starved(
        asked, other.slots
    ):
        return replace(other, objective=OTHERS_WAIT_NUM)
    return replace(other, objective=every.sums(every.vector(other.slots))[0])


def planned(asked: PlanInput, known: Found | None = None) -> Plan:
    """The plan of `choose` alone, without those that it beat."""
    every, earned = all_rows(asked)
    if asked.limits is None and not constraints.are_asked(asked):
        sure = planner_steady.surely(asked.wishes, every, earned, asked.num_slots, asked.gain_min)
        if sure is not None:
            return plan_of(asked.wishes, sure)
    return _decide(asked, *_floored(asked, every, earned), known).plan


class _Made(Struct, frozen=True, kw_only=True):
    """How a plan was decided upon."""

    plan: Plan
    """`free`, or `steady` where that gains too little."""
    free: Plan
    """The optimum."""
    limitless: Plan
    """The optimum without limits."""
    solved: Solved
    """Without limits."""
    steady: Plan | None
    """The best with the healthy as they are, if there is one; else with as few of them changed as
    the floors ask."""
    is_steady: bool
    """It changes no healthy task."""


def _decide(asked: PlanInput, rows: Rows, earned: Ints, known: Found | None = None) -> _Made:
    wishes, num_slots, limits = asked.wishes, asked.num_slots, asked.limits
    solved = Solved.of(rows, num_slots, known)
    assert solved is not None, "0 slots for each fit, and so do the floors that are given"
    free = limitless = plan_of(wishes, (rows.slots(solved.vector), solved.gain))
    if limits is not None and (limits.priorities or not limits.allow(free.slots)):
        found = constraints.best(rows, num_slots, limits)
        assert found is not None, "0 slots for each, and the floors, are within every quota"
        free = plan_of(wishes, found)
    still = held(wishes, rows)
    nobody = limits is None and len(still.sizes) == len(rows.sizes)
    fits = (free.slots, free.objective) if nobody else _within(still, num_slots, limits)
    is_steady = fits is not None
    if fits is None and constraints.are_asked(asked):
        fits = _least_moved(asked, rows)
    steady = plan_of(wishes, fits) if fits is not None else None
    stay = steady is not None and steady.slots != free.slots and stays(
        asked, rows, earned, (free.slots, free.objective), (steady.slots, steady.objective))
    return _Made(plan=steady if stay and steady is not None else free, free=free,
                 limitless=limitless, solved=solved, steady=steady, is_steady=is_steady)


def _least_moved(asked: PlanInput, rows: Rows) -> Found | None:
    """With as few healthy tasks changed as can be, the best, on a scale as much coarser as the
    number of changes needs above it; of very many sizes the best for those whom the price of a
    slot changes."""
    limits = asked.limits
    if limits is not None:
        return constraints.best(rows, asked.num_slots, replace(limits, moves_max=0))
    wishes = asked.wishes
    healthy = np.array([wish.now > 0 and not wish.hurt for wish in wishes], dtype=np.bool_)
    moves = healthy[rows.row_of] & ~_same(wishes, rows)
    if len(rows.sizes) > SIZES_NUM_MAX:
        return best(rows.only(kept(rows, moves, asked.num_slots)), asked.num_slots)
    bits = int(healthy.sum()).bit_length() + 2
    found = exact(wishes, asked.running_s, asked.num_slots, alpha=asked.alpha)
    coarse = found.rows(shift_of(found.most()) - bits)[0]
    coarse = coarse.only(constraints.kept(asked, coarse))
    few = best(replace(coarse, gains=coarse.gains - (
        moves.astype(np.int64) << SUM_BITS + 1 - bits)), asked.num_slots)
    return None if few is None else (few[0], rows.sums(rows.vector(few[0]))[0])


def _within(rows: Rows, num_slots: int, limits: Limits | None) -> Found | None:
    """The best that fits and keeps the limits, None if nothing does."""
    found = best(rows, num_slots) if limits is None or not limits.priorities else None
    if limits is None or (found is not None and limits.allow(found[0])):
        return found
    return constraints.best(rows, num_slots, limits)


def stays(asked: PlanInput, rows: Rows, earned: Ints, free: Found, steady: Found) -> bool:
    """Whether the healthy stay as they are, where the optimum changes them.

    The share is of what is earned before the costs: what the hurt cost does not lower the bar. It
    is asked for in the first priority in which the two differ.
    """
    limits = asked.limits

    def worth(by_candidate: Ints, slots: Sequence[int]) -> tuple[int, ...]:
        found = by_candidate[rows.vector(slots)].tolist()
        return limits.by_priority(found) if limits is not None else (sum(found),)

    many = limits is not None and limits.priorities
    ours = worth(rows.gains, free[0]) if many else (free[1],)
    theirs = worth(rows.gains, steady[0]) if many else (steady[1],)
    for most, least, share_of in zip(ours, theirs, worth(earned, steady[0]), strict=True):
        if most != least:
            return most < least + asked.gain_min * share_of
    return True


def held(wishes: Sequence[Wish], rows: Rows) -> Rows:
    """The rows without what would change a healthy task that has slots."""
    row_of, same = rows.row_of, _same(wishes, rows)
    may = np.array([wish.hurt or wish.now == 0 for wish in wishes], dtype=np.bool_)
    known = np.bincount(row_of[same], minlength=rows.num) > 0
    return rows.only(same | (may | ~known)[row_of])


def _same(wishes: Sequence[Wish], rows: Rows) -> NDArray[np.bool_]:
    """By candidate: whether it is what the task has."""
    now = np.array([wish.now for wish in wishes], dtype=np.int64)
    same: NDArray[np.bool_] = rows.sizes == now[rows.row_of]
    return same


def _next(wishes: Sequence[Wish], solved: Solved,
          known: Sequence[Plan | None]) -> list[tuple[str, Plan | None]]:
    """The next best plan, and as many more as make NUM_BEATEN_MIN that were beaten."""
    chosen, *others = dict.fromkeys(plan.slots for plan in known if plan is not None)
    found: list[tuple[str, Plan | None]] = []
    told = solved.runners_up(chosen, NUM_BEATEN_MIN + 1, RUNNERS_WORK_NUM_MAX)
    for place, (i, size, vector) in enumerate(told):
        if place and len(others) >= NUM_BEATEN_MIN:
            break
        what = f"the best with {wishes[i].name} on {size}" if place else "the next best"
        found.append((what, plan_of(wishes, vector)))
        if vector[0] not in others:
            others.append(vector[0])
    return found or [(NEAREST, plan_of(wishes, vector)) for vector in solved.swaps(chosen)[:1]]


def ideal_waf(wishes: Sequence[Wish], num_slots: int) -> float:
    """What the best plan of all would earn on `num_slots`, were changes free."""
    every = exact(wishes, 1.0 / max(num_slots, 1), num_slots, free=True)
    found = best(every.rows(shift_of(every.most()))[0], num_slots)
    return plan_of(wishes, found).waf if found is not None else 0.0


def _named(wishes: Sequence[Wish], rows: Rows, num_slots: int,
           limits: Limits | None) -> list[tuple[str, Plan | None]]:
    """The plans that a person would think of first."""
    same, row_of = _same(wishes, rows), rows.row_of
    others = [("keep as it is", _best_of(wishes, rows, same, num_slots, limits))]
    hurt = [wish.name for wish in wishes if wish.hurt]
    if hurt:
        of_hurt = np.array([wish.hurt for wish in wishes], dtype=np.bool_)[row_of]
        now = np.array([wish.now for wish in wishes], dtype=np.int64)[row_of]
        shrink = np.where(of_hurt, rows.sizes <= now, same)
        others.append((f"shrink only the hurt ({', '.join(hurt)})",
                       _best_of(wishes, rows, shrink, num_slots, limits)))
    return others


def _best_of(wishes: Sequence[Wish], rows: Rows, kept: NDArray[np.bool_],
             num_slots: int, limits: Limits | None) -> Plan | None:
    """The best plan with these candidates alone, None if a task has none or nothing fits."""
    if (np.bincount(rows.row_of[kept], minlength=rows.num) == 0).any():
        return None
    found = _within(rows.only(kept), num_slots, limits)
    return plan_of(wishes, found) if found is not None else None


def plan_of(wishes: Sequence[Wish], found: Found) -> Plan:
    """What was found, with what it earns."""
    slots = found[0]
    waf = math.fsum(waf_of(wish, x) for wish, x in zip(wishes, slots, strict=True))
    return Plan(slots=slots, objective=found[1], waf=waf)


def _allocations(wishes: Sequence[Wish], plan: Plan) -> tuple[Allocation, ...]:
    return tuple(allocation(wish, x) for wish, x in zip(wishes, plan.slots, strict=True))


def _alternatives(wishes: Sequence[Wish], plan: Plan,
                  others: Sequence[tuple[str, Plan | None]],
                  share: int) -> tuple[Alternative, ...]:
    """`share`: of the plan, where others are to be told how far behind they are."""
    found: list[Alternative] = []
    seen = [plan.slots]
    for what, other in others:
        if other is None or other.slots in seen:
            continue
        seen.append(other.slots)
        slots = tuple((wish.task, x) for wish, x in zip(wishes, other.slots, strict=True))
        behind = plan.objective - other.objective if other.objective != OTHERS_WAIT_NUM else 0
        found.append(Alternative(what=what, slots=slots, waf=other.waf, objective=other.objective,
                                 behind_share=behind / share if share > 0 else 0.0))
    return tuple(found)
