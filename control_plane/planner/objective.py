"""What each size of each task is worth to a plan, and the one scale on which that is integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .problem import Wish, reshapes
from .solver.candidates import Rows
from .solver.core import Ints

# --- Alpha-fairness: what a task's FLOP/s are worth where the sum of all alone does not count. ---
#
# U(T) = T^(1 - alpha) / (1 - alpha), the logarithm for alpha 1 (Mo and Walrand, "Fair end-to-end
# window-based congestion control", 2000). Computed with + - * / and the square root alone, each
# rounded correctly on every machine.

Floats = NDArray[np.float64]
RATIO_BITS = 200
"""Rates below 2^-200 of the unit count as that."""
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""Their sum is ln 2; a product of the first with an exponent is exact."""
_SERIES_NUM = 12
_SQRT_HALF_RATIO = 0.7071067811865476


def in_units(rates: Floats) -> Floats:
    """At most 1: by the power of two above the largest of them."""
    largest = float(rates.max(initial=0.0))
    unit_bits = int(np.frexp(largest)[1]) if largest > 0 else 0
    found: Floats = np.where(rates > 0, np.maximum(np.ldexp(rates, -unit_bits), 2.0**-RATIO_BITS),
                             0.0)
    return found


def utility(rates: Floats, alpha: float) -> Floats:
    """U(T); 0 for a rate of 0, which from alpha 1 on has none."""
    known = np.where(rates > 0, rates, 1.0)
    found = (2.0 * np.sqrt(known) if alpha == 0.5 else logarithm(known) if alpha == 1.0
             else -1.0 / known if alpha == 2.0 else known)
    worth: Floats = np.where(rates > 0, found, 0.0)
    return worth


def marginal(rates: Floats, alpha: float) -> Floats:
    """T U'(T) = T^(1 - alpha): of a rate that is a share larger, the worth is by that share of this
    more; 0 for a rate of 0."""
    known = np.where(rates > 0, rates, 1.0)
    found = (np.sqrt(known) if alpha == 0.5 else np.ones_like(known) if alpha == 1.0
             else 1.0 / known if alpha == 2.0 else known)
    worth: Floats = np.where(rates > 0, found, 0.0)
    return worth


def logarithm(values: Floats) -> Floats:
    """ln of numbers above 0, to within 2^-50 of itself.

    By 2 atanh(s), s = (m - 1) / (m + 1), of a mantissa m from sqrt(1/2) to sqrt(2): s^2 is below
    0.0295, so that what the series leaves out is below 2^-60 of it.
    """
    mantissas, exponents = np.frexp(values)
    low = mantissas < _SQRT_HALF_RATIO
    mantissas = np.where(low, 2.0 * mantissas, mantissas)
    powers = (exponents - low).astype(np.float64)
    s = (mantissas - 1.0) / (mantissas + 1.0)
    square = s * s
    rest = np.zeros_like(s)
    for k in range(_SERIES_NUM, 0, -1):
        rest = (rest + 1.0 / (2 * k + 1)) * square
    found: Floats = powers * _LN2_HIGH + (2.0 * s + (2.0 * s * rest + powers * _LN2_LOW))
    return found

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
        rates = in_units(np.where(fits | (sizes == now), shares / weights, 0.0))
        worth = weights * utility(rates, alpha)
        shares = weights * marginal(rates, alpha)
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
