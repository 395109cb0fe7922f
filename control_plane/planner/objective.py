"""The planner's objective: what each number of slots is worth to each task.

The paper (section 4) maximises the sum over all tasks t, with x slots each, of

    G(t, x) = w(t) T(t, x) D_running  -  w(t) T(t, now) (D_transition(t, now -> x) + H(t, x))

- w T: weighted achieved FLOP/s (WAF); `Wish.wafs`.
- D_running: how long the plan is expected to hold; `PlanInput.running_s`.
- D_transition: how long the change holds the task up, by kind of change; `Wish.charged_s`. A
  healthy task that keeps its slots pays nothing; a hurt one pays in any case.
- H, our addition (hysteresis): `gain_min` D_running if the task is healthy, could keep its slots
  and x is another number, else 0. So a healthy task changes only if that earns `gain_min` of what
  the task earns now.

With alpha-fairness, U(T) replaces T in the first term, and T U'(T) in the second:
U(T) = T^(1 - alpha) / (1 - alpha), for alpha 1 the logarithm (Mo and Walrand, "Fair end-to-end
window-based congestion control", 2000).

The objective is computed in floats (`exact`), then rounded once to integers on one scale (`rows`):
every order of summing gives the same plan. Utilities use + - * / and the square root alone, which
are rounded correctly on every machine. FLOP here are weighted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .problem import PlanInput, Wish, charged_s, reshapes, waf_of
from .solver.candidates import Rows
from .solver.core import Ints

Floats = NDArray[np.float64]
SUM_BITS = 52
"""The largest |G| of each task add up to less than one bit more."""
RATIO_BITS = 200
"""With alpha: rates below 2^-200 of the unit count as that."""
_NO_SIZES, _NO_WAFS = np.zeros(0, np.int64), np.zeros(0, np.float64)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""Their sum is ln 2; a product of the first with an exponent is exact."""
_SERIES_NUM = 12
_SQRT_HALF_RATIO = 0.7071067811865476


# --- one plan, in FLOP ---------------------------------------------------------------------------
def objective_flop(asked: PlanInput, slots: Sequence[int]) -> float:
    """The objective of a plan in FLOP, not rounded to the planner's integers; alpha as if 0."""
    return math.fsum(part for wish, x in zip(asked.wishes, slots, strict=True)
                     for part in (waf_of(wish, x) * asked.running_s, -cost_flop(wish, x),
                                  -hysteresis_flop(asked, wish, x)))


def transition_flop(asked: PlanInput, slots: Sequence[int]) -> float:
    """What the changes of a plan cost, without the hysteresis."""
    return math.fsum(cost_flop(wish, x) for wish, x in zip(asked.wishes, slots, strict=True))


def cost_flop(wish: Wish, slots: int) -> float:
    """What D_transition costs: FLOP that the task does not achieve meanwhile."""
    return waf_of(wish, wish.now) * charged_s(wish, slots)


def hysteresis_flop(asked: PlanInput, wish: Wish, slots: int) -> float:
    """What a healthy task must earn more if it changes."""
    if wish.hurt or slots == wish.now or wish.now > asked.num_slots:
        return 0.0
    return waf_of(wish, wish.now) * asked.gain_min * asked.running_s


# --- every size of every task --------------------------------------------------------------------
class Exact(Struct, frozen=True, kw_only=True):
    """The objective before it is scaled, of each task's sizes and 0; `rows.Rows` of floats.

    A size that does not fit at all counts as the largest size that does: it needs no scale."""

    sizes: Ints
    earned: Floats
    """The first term; 0 where the size is 0."""
    losses: Floats
    """The second term."""
    starts: Ints
    shares: Floats | None = None
    """With alpha: T U'(T) D_running, what a rate that is higher by a share is worth by that share
    of. Else `earned`."""

    def most(self) -> list[float]:
        """By task: no |G| is larger."""
        if len(self.starts) == 1:
            return []
        parts = np.abs(self.earned) + self.losses
        if self.shares is not None:
            parts = np.maximum(np.abs(self.earned), self.shares) + self.losses
        most: list[float] = np.maximum.reduceat(parts, self.starts[:-1]).tolist()
        return most

    def rows(self, shift: int) -> tuple[Rows, Ints]:
        """The rows, and what each candidate earns before what it costs; both times 2^shift.

        Rounded by slot: throughput that is linear in slots stays so, to the last bit; and a size
        that earns as much as a smaller one stays so too. With alpha nothing is linear, and the
        second are the shares.
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
          alpha: float = 0.0, gain_min: float = 0.0) -> Exact:
    """`num_slots`: that there are. `free`: changes cost nothing."""
    counts = [len(wish.sizes) + 1 for wish in wishes]
    starts = np.cumsum([0, *counts], dtype=np.int64)
    sizes = np.concatenate([_NO_SIZES, *(wish.sizes_and_0 for wish in wishes)])
    worth = shares = np.concatenate([_NO_WAFS, *(wish.wafs_and_0 for wish in wishes)])
    now = np.repeat(np.array([wish.now for wish in wishes], dtype=np.int64), counts)
    fits = sizes <= num_slots
    if alpha:
        weights = np.repeat(np.array([wish.weight for wish in wishes]), counts)
        rates = in_units(np.where(fits | (sizes == now), shares / weights, 0.0))
        worth = weights * utility(rates, alpha)
        shares = weights * marginal(rates, alpha)
    places: Ints = np.array([wish.place for wish in wishes], dtype=np.int64)
    has = np.where(places > 0, shares[starts[:-1] + places], 0.0) if wishes else _NO_WAFS
    last = np.maximum.accumulate(np.where(fits, np.arange(len(fits)), 0))
    losses = np.zeros(len(sizes)) if free else np.where(fits, np.repeat(has, counts) * _held_up_s(
        wishes, sizes, now, counts, np.where(now <= num_slots, gain_min * running_s, 0.0)), 0.0)
    return Exact(sizes=sizes, starts=starts, earned=worth[last] * running_s, losses=losses,
                 shares=shares[last] * running_s if alpha else None)


def _held_up_s(wishes: Sequence[Wish], sizes: Ints, now: Ints, counts: Sequence[int],
               hysteresis_s: Floats) -> Floats:
    """By candidate: D_transition + H, in seconds of what the task earns now."""
    charged = np.concatenate([_NO_WAFS, *(wish.charged_s for wish in wishes)])
    hurt = np.repeat(np.array([wish.hurt for wish in wishes], dtype=np.bool_), counts)
    kind = np.where(sizes < now, np.where(sizes == 0, 3, 1),
                    np.where(sizes > now, 2, np.where(hurt, 0, 5)))
    if any(wish.shapes for wish in wishes):
        moves = [moves for wish in wishes for moves in (False, *reshapes(wish))]
        kind = np.where(np.array(moves, dtype=np.bool_), 4, kind)
    rows = np.repeat(np.arange(len(wishes)), counts)
    held_up_s: Floats = charged[6 * rows + kind]
    return held_up_s + np.where(hurt | (sizes == now), 0.0, hysteresis_s)


# --- utilities of alpha-fairness ----------------------------------------------------------------
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
