"""What a planner is asked: of each task what it may have, earns and pays, and what binds a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...events.records.decisions import Allocation
from ..throughput.transition_cost import Transition


class Limits(Struct, frozen=True, kw_only=True):
    """What a plan must keep, in the order of the rows."""

    now: tuple[int, ...]
    """By row: the slots that its task has."""
    healthy: tuple[bool, ...]
    """By row: it trains on them, undisturbed; another number is a move."""
    moves_max: int | None
    teams: tuple[tuple[tuple[int, ...], int], ...]
    """Rows that have at most so many slots together; no row in two of them."""
    priorities: tuple[int, ...]
    """By row; a higher one comes first. Empty: there is one alone."""

    def allow(self, slots: Sequence[int]) -> bool:
        """Whether a plan keeps the moves and the quotas."""
        return self.allow_moves(slots) and self.allow_quotas(slots)

    def allow_moves(self, slots: Sequence[int]) -> bool:
        return self.moves_max is None or self.num_moves(slots) <= self.moves_max

    def allow_quotas(self, slots: Sequence[int]) -> bool:
        return all(sum(slots[row] for row in rows) <= quota for rows, quota in self.teams)

    def num_moves(self, slots: Sequence[int]) -> int:
        """Healthy tasks that would have other slots."""
        return sum(healthy and x != now for x, now, healthy in
                   zip(slots, self.now, self.healthy, strict=True))


class Wish(Struct, frozen=True, kw_only=True, dict=True):
    """What the planner must know of one task: `sizes[i]` slots earn `wafs[i]`, 0 slots earn 0."""

    task: int
    name: str
    now: int
    """Slots that it has."""
    hurt: bool
    """A worker of it failed: going on costs a transition whatever it gets."""
    transition: Transition
    sizes: tuple[int, ...]
    """Ascending, each once, above 0."""
    wafs: tuple[float, ...]
    priority: int = 0
    team: str = ""
    weight: float = 1.0
    """It is in `wafs` already."""
    shapes: tuple[int, ...] = ()
    """By size: a number for how its layout there splits a replica; empty: all are alike."""
    floor: int = 0
    """It asks for no fewer slots; 0: for none."""

    @cached_property
    def sizes_and_0(self) -> NDArray[np.int64]:
        """0, and `sizes`."""
        return np.array((0, *self.sizes), dtype=np.int64)

    @cached_property
    def place(self) -> int:
        """Of what it has, in `sizes_and_0`; 0 also where it is none of them."""
        return self.sizes.index(self.now) + 1 if self.now in self.sizes else 0

    @cached_property
    def charged_s(self) -> NDArray[np.float64]:
        """What each kind of change costs, none last."""
        kinds = self.transition
        return np.array((kinds.same_s, kinds.shrink_s, kinds.grow_s, kinds.stop_s,
                         kinds.reshape_s, 0.0) if self.now else (0.0,) * 6)

    @cached_property
    def as_it_is(self) -> Allocation:
        """What it has, as a plan tells it that leaves it so."""
        return _allocation(self, self.now)

    @cached_property
    def wafs_and_0(self) -> NDArray[np.float64]:
        """What 0 slots earn, and `wafs`."""
        return np.array((0.0, *self.wafs), dtype=np.float64)


class PlanInput(Struct, frozen=True, kw_only=True):
    """All that a plan follows from."""

    wishes: tuple[Wish, ...]
    """By task id: ties go to the first."""
    num_slots: int
    """n' of the paper."""
    mtbf_gpu_s: float
    gain_min: float = 0.0
    """A healthy task is changed only for this share of what the cluster earns."""
    moves_max: int | None = None
    """So many healthy tasks may a plan change at most."""
    quotas: tuple[tuple[str, int], ...] = ()
    """Team, and how many slots its tasks have at most together."""
    floor: bool = False
    """Each task asks for no fewer slots than it earns anything with."""
    alpha: float = 0.0
    """Of alpha-fairness (fairness.py); 0: the sum of what all earn."""
    spare_slots: int = 0
    """Slots of a node: whether so many stay idle is decided beside the plan (spare.py); 0: no."""
    repair_s: float = 0.0
    """How long a lost node is away."""
    kept_slots: int = 0
    """Beside `num_slots`, kept idle: they fail as often as the others."""

    @property
    def running_s(self) -> float:
        """D_running(n')."""
        return self.mtbf_gpu_s / max(self.num_slots + self.kept_slots, 1)

    @property
    def limits(self) -> Limits | None:
        """What the plan must keep beside `num_slots`; None: nothing."""
        priorities = tuple(wish.priority for wish in self.wishes)
        found = [(tuple(i for i, wish in enumerate(self.wishes) if wish.team == team), quota)
                 for team, quota in self.quotas]
        teams = tuple((rows, quota) for rows, quota in found if rows)
        differ = any(priority != priorities[0] for priority in priorities)
        if self.moves_max is None and not teams and not differ:
            return None
        return Limits(now=tuple(wish.now for wish in self.wishes),
                      healthy=tuple(wish.now > 0 and not wish.hurt for wish in self.wishes),
                      moves_max=self.moves_max, teams=teams,
                      priorities=priorities if differ else ())


def allocation(wish: Wish, slots: int) -> Allocation:
    """So many slots for the task, as a plan tells it."""
    return wish.as_it_is if slots == wish.now else _allocation(wish, slots)


def _allocation(wish: Wish, slots: int) -> Allocation:
    return Allocation(task=wish.task, slots_before=wish.now, slots=slots, waf=waf_of(wish, slots),
                      waf_before=waf_of(wish, wish.now), transition_s=charged_s(wish, slots))


def waf_of(wish: Wish, slots: int) -> float:
    """F(t, x) for a candidate x, 0 for 0."""
    if slots == wish.now:
        return wish.wafs[wish.place - 1] if wish.place else 0.0
    return wish.wafs[wish.sizes.index(slots)] if slots in wish.sizes else 0.0


def reshapes(wish: Wish) -> tuple[bool, ...]:
    """By size: whether all of the state moves, since its layout splits a replica in another way."""
    has = [kind for size, kind in zip(wish.sizes, wish.shapes, strict=False) if size <= wish.now]
    if not has:
        return (False,) * len(wish.sizes)
    return tuple(kind != has[-1] for kind in wish.shapes)


def charged_s(wish: Wish, slots: int) -> float:
    """D_transition from what the task has to so many slots; 0 where it simply goes on."""
    kinds = wish.transition
    if not wish.now or (slots == wish.now and not wish.hurt):
        return 0.0
    if slots and reshapes(wish)[wish.sizes.index(slots)]:
        return kinds.reshape_s
    return (kinds.same_s if slots == wish.now else kinds.grow_s if slots > wish.now
            else kinds.shrink_s if slots else kinds.stop_s)
