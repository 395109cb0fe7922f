"""What each size of each task is worth to a plan, and the one scale on which that is integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from . import fairness
from .core import Ints
from .fairness import Floats
from .rows import Rows
from .wishes import Wish, reshapes

SUM_BITS = 52
"""The largest |G| of each task add up to less than one bit more."""
_NO_SIZES, _NO_WAFS = np.zeros(0, np.int64), np.zeros(0, np.float64)


class Exact(Struct, frozen=True, kw_only=True):
    """G before it is scaled, of each task's sizes and 0; `rows.Rows` of floats.

    What does not fit at all counts as the largest size that does: it needs no scale."""

    sizes: Ints
    earned: Floats
    """Before what the change costs; 0 where the size is 0."""
    losses: Floats
    """What the change costs."""
    starts: Ints
    shares: Floats | None = None
    """With alpha: what running faster by a share is worth by that share of. Else `earned`."""

    def most(self) -> list[float]:
        """No |G| of the task is larger."""
        if len(self.starts) == 1:
            return []
        parts = np.abs(self.earned) + self.losses
        if self.shares is not None:
            parts = np.maximum(np.abs(self.earned), self.shares) + self.losses
        most: list[float] = np.maximum.reduceat(parts, self.starts[:-1]).tolist()
        return most

    def rows(self, shift: int) -> tuple[Rows, Ints]:
        """The rows, and what each candidate earns before what it costs; both times 2^shift.

        Rounded by slot: throughput that is linear in slots stays so, to the last bit; and what
        earns as much as a size less stays so too. With alpha nothing is linear, and the second are
        the shares.
        """
        if self.shares is not None:
            gains = scaled(self.earned, shift) - scaled(self.losses, shift)
            return (Rows(sizes=self.sizes, gains=gains, starts=self.starts),
                    scaled(self.shares, shift))
        new = np.ones(len(self.sizes), dtype=np.bool_)
        new[1:] = self.earned[1:] != self.earned[:-1]
        new[self.starts[:-1]] = True
        first = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
        earned = scaled(self.earned / np.maximum(self.sizes, 1), shift) * self.sizes
        earned = earned[first]
        gains = earned - scaled(self.losses, shift)
        return Rows(sizes=self.sizes, gains=gains, starts=self.starts), earned


def shift_of(most: Sequence[float]) -> int:
    """The scale on which the largest gains add up to less than 2^53."""
    total = math.fsum(most)
    return SUM_BITS - 1 - math.frexp(total)[1] if total > 0 else 0


def scaled(values: Floats, shift: int) -> Ints:
    """Rounded to integers on the scale 2^shift."""
    return np.rint(np.ldexp(values, shift)).astype(np.int64)


def exact(wishes: Sequence[Wish], running_s: float, num_slots: int, *, free: bool = False,
          alpha: float = 0.0) -> Exact:
    """`num_slots`: that there are. `free`: changes cost nothing."""
    counts = [len(wish.sizes) + 1 for wish in wishes]
    starts = np.cumsum([0, *counts], dtype=np.int64)
    sizes = np.concatenate([_NO_SIZES, *(wish.sizes_and_0 for wish in wishes)])
    worth = shares = np.concatenate([_NO_WAFS, *(wish.wafs_and_0 for wish in wishes)])
    now = np.repeat(np.array([wish.now for wish in wishes], dtype=np.int64), counts)
    hurt = np.repeat(np.array([wish.hurt for wish in wishes], dtype=np.bool_), counts)
    fits = sizes <= num_slots
    if alpha:
        weights = np.repeat(np.array([wish.weight for wish in wishes]), counts)
        rates = fairness.in_units(np.where(fits | (sizes == now), shares / weights, 0.0))
        worth = weights * fairness.utility(rates, alpha)
        shares = weights * fairness.marginal(rates, alpha)
    places: Ints = np.array([wish.place for wish in wishes], dtype=np.int64)
    has = np.where(places > 0, shares[starts[:-1] + places], 0.0) if wishes else _NO_WAFS
    last = np.maximum.accumulate(np.where(fits, np.arange(len(fits)), 0))
    losses = np.zeros(len(sizes)) if free else np.where(
        fits, _losses(wishes, has, sizes, now, hurt, counts), 0.0)
    return Exact(sizes=sizes, starts=starts, earned=worth[last] * running_s, losses=losses,
                 shares=shares[last] * running_s if alpha else None)


def _losses(wishes: Sequence[Wish], has: Floats, sizes: Ints, now: Ints,
            hurt: NDArray[np.bool_], counts: Sequence[int]) -> NDArray[np.float64]:
    """By candidate: what the change to it costs. `has`: what a second of each task is worth now."""
    charged = np.concatenate([_NO_WAFS, *(wish.charged_s for wish in wishes)])
    charged *= np.repeat(has, 6)
    kind = np.where(sizes < now, np.where(sizes == 0, 3, 1),
                    np.where(sizes > now, 2, np.where(hurt, 0, 5)))
    if any(wish.shapes for wish in wishes):
        moves = [moves for wish in wishes for moves in (False, *reshapes(wish))]
        kind = np.where(np.array(moves, dtype=np.bool_), 4, kind)
    rows = np.repeat(np.arange(len(wishes)), counts)
    losses: NDArray[np.float64] = charged[6 * rows + kind]
    return losses
