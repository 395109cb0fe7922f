"""The planner's objective: the value G(t, x) of x slots to task t.

The paper (section 4) maximises the sum of G over all tasks t:

    G(t, x) = F(t, x) D_running  -  F(t, now) (D_transition(t, now -> x) + H(t, x))

F(t, x) = w(t) T(t, x) is the weighted achieved FLOP/s (WAF) on x slots, and H our hysteresis.
docs/decisions/limits-of-plans.md has the terms, and what alpha-fairness puts in their place.

The objective is computed in floats (`objective_values`), then rounded once to integers of one scale
(`rows`). So the order of summation cannot change the plan. All FLOP in this module are weighted.
"""

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .problem import (
    GROW,
    NO_CHANGE,
    NUM_KINDS,
    RESHAPE,
    SAME,
    SHRINK,
    STOP,
    PlanProblem,
    TaskDemand,
    reshapes,
    transition_cost_s,
    waf_of,
)
from .solver.candidates import Candidates
from .solver.core import Ints

Floats = NDArray[np.float64]
SUM_BITS = 52
"""The scale is such that the sum over tasks of the largest |G| is below 2^(SUM_BITS + 1)."""
RATIO_BITS = 200
"""With alpha: lower rates, except 0, are raised to 2^-200 of the unit (`in_units`)."""
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""Their sum is ln 2. The product of _LN2_HIGH and an exponent is exact."""
_SERIES_NUM = 12
_SQRT_HALF_RATIO = 0.7071067811865476


# --- one plan, in FLOP ---
def objective_flop(problem: PlanProblem, slots: Sequence[int]) -> float:
    """The objective of a plan in FLOP, without rounding and without alpha."""
    return math.fsum(
        part
        for demand, x in zip(problem.demands, slots, strict=True)
        for part in (
            waf_of(demand, x) * problem.running_s,
            -cost_flop(demand, x),
            -hysteresis_flop(problem, demand, x),
        )
    )


def transition_flop(problem: PlanProblem, slots: Sequence[int]) -> float:
    """The second term of a plan without the hysteresis: FLOP lost to its transitions."""
    return math.fsum(cost_flop(demand, x) for demand, x in zip(problem.demands, slots, strict=True))


def cost_flop(demand: TaskDemand, slots: int) -> float:
    """F(t, now) D_transition: FLOP that the task loses to its transition."""
    return waf_of(demand, demand.now) * transition_cost_s(demand, slots)


def hysteresis_flop(problem: PlanProblem, demand: TaskDemand, slots: int) -> float:
    """F(t, now) H: the FLOP that a change of a healthy task must gain."""
    if demand.faulted or slots == demand.now or demand.now > problem.num_slots:
        return 0.0
    return waf_of(demand, demand.now) * problem.gain_min * problem.running_s


# --- all candidates ---
class Objective(Struct, frozen=True, kw_only=True):
    """The two terms of G in floats, by candidate: 0 and each task's sizes. A size above the number
    of slots gets the first term of the largest that fits, so that it does not affect the scale."""

    sizes: Ints
    running_flop: Floats
    """The first term; 0 for size 0."""
    change_flop: Floats
    """The second term."""
    starts: Ints
    marginal_flop: Floats | None = None
    """With alpha: T U'(T) D_running, the derivative of the first term by ln T. Else None."""

    def most(self) -> list[float]:
        """By task: an upper bound of |G|."""
        if len(self.starts) == 1:
            return []
        parts = np.abs(self.running_flop) + self.change_flop
        if self.marginal_flop is not None:
            parts = np.maximum(np.abs(self.running_flop), self.marginal_flop) + self.change_flop
        most: list[float] = np.maximum.reduceat(parts, self.starts[:-1]).tolist()
        return most

    def rows(self, shift: int) -> tuple[Candidates, Ints]:
        """(G by candidate, the first term by candidate), both times 2^shift. The first term is
        rounded per slot, so throughput that is linear in slots stays linear to the last bit. A size
        that has the first term of a smaller size keeps it exactly. With alpha nothing is linear:
        terms are rounded as they are, and the second result is `marginal_flop`."""
        changes = to_fixed_point(self.change_flop, shift)
        if self.marginal_flop is not None:
            gains = to_fixed_point(self.running_flop, shift) - changes
            return (
                Candidates(sizes=self.sizes, gains=gains, starts=self.starts),
                to_fixed_point(self.marginal_flop, shift),
            )
        new = np.ones(len(self.sizes), dtype=np.bool_)
        new[1:] = self.running_flop[1:] != self.running_flop[:-1]
        new[self.starts[:-1]] = True
        first = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
        running = to_fixed_point(self.running_flop / np.maximum(self.sizes, 1), shift) * self.sizes
        running = running[first]
        return Candidates(sizes=self.sizes, gains=running - changes, starts=self.starts), running


def fixed_point_shift(most: Sequence[float]) -> int:
    """The exponent of the scale on which the sum of the largest |G| is below 2^53."""
    total = math.fsum(most)
    return SUM_BITS - 1 - math.frexp(total)[1] if total > 0 else 0


def to_fixed_point(values: Floats, shift: int) -> Ints:
    """The values times 2^shift, rounded to integers."""
    return np.rint(np.ldexp(values, shift)).astype(np.int64)


def objective_values(
    demands: Sequence[TaskDemand],
    running_s: float,
    num_slots: int,
    *,
    free: bool = False,
    alpha: float = 0.0,
    gain_min: float = 0.0,
) -> Objective:
    """G of every candidate on `num_slots` slots. `free`: changes cost nothing."""
    counts = [len(demand.sizes) + 1 for demand in demands]
    starts = np.cumsum([0, *counts], dtype=np.int64)
    sizes = np.fromiter(chain.from_iterable((0, *one.sizes) for one in demands), np.int64)
    f = f_prime = np.fromiter(chain.from_iterable((0.0, *one.wafs) for one in demands), np.float64)
    now = np.repeat(np.array([demand.now for demand in demands], dtype=np.int64), counts)
    fits = sizes <= num_slots
    if alpha:  # U(T) and T U'(T) replace T
        weights = np.repeat(np.array([demand.weight for demand in demands]), counts)
        rates = in_units(np.where(fits | (sizes == now), f / weights, 0.0))
        f, f_prime = weights * utility(rates, alpha), weights * marginal(rates, alpha)
    f_now = np.add.reduceat(np.where(sizes == now, f_prime, 0.0), starts[:-1])
    last_fit = np.maximum.accumulate(np.where(fits, np.arange(len(fits)), 0))
    change_s = np.zeros(len(sizes))
    if not free:
        faulted = np.repeat(np.array([one.faulted for one in demands], dtype=np.bool_), counts)
        hysteresis_s = np.where(
            faulted | (sizes == now) | (now > num_slots), 0.0, gain_min * running_s
        )
        change_s = _transition_s(demands, sizes, now, faulted, counts) + hysteresis_s
    return Objective(
        sizes=sizes,
        starts=starts,
        running_flop=f[last_fit] * running_s,
        change_flop=np.where(fits, np.repeat(f_now, counts) * change_s, 0.0),
        marginal_flop=f_prime[last_fit] * running_s if alpha else None,
    )


def _transition_s(
    demands: Sequence[TaskDemand],
    sizes: Ints,
    now: Ints,
    faulted: NDArray[np.bool_],
    counts: Sequence[int],
) -> Floats:
    """D_transition by candidate."""
    kind = np.where(
        sizes < now,
        np.where(sizes == 0, STOP, SHRINK),
        np.where(sizes > now, GROW, np.where(faulted, SAME, NO_CHANGE)),
    )
    if any(demand.shapes for demand in demands):
        moves = [moves for demand in demands for moves in (False, *reshapes(demand))]
        kind = np.where(np.array(moves, dtype=np.bool_), RESHAPE, kind)
    costs_s = np.array(
        [
            cost_s
            for kinds in (demand.transition for demand in demands)
            for cost_s in (
                kinds.same_s,
                kinds.shrink_s,
                kinds.grow_s,
                kinds.stop_s,
                kinds.reshape_s,
                0.0,
            )
        ]
    )
    row_of = np.repeat(np.arange(len(demands)), counts)
    transition_s: Floats = costs_s[NUM_KINDS * row_of + kind]
    return transition_s


# --- utilities of alpha-fairness ---
def in_units(rates: Floats) -> Floats:
    """The rates divided by the power of two above the largest rate, so that no rate exceeds 1."""
    largest = float(rates.max(initial=0.0))
    unit_bits = int(np.frexp(largest)[1]) if largest > 0 else 0
    found: Floats = np.where(
        rates > 0, np.maximum(np.ldexp(rates, -unit_bits), 2.0**-RATIO_BITS), 0.0
    )
    return found


def utility(rates: Floats, alpha: float) -> Floats:
    """U(T). It is set to 0 for a rate of 0, where U is not defined if alpha is 1 or more."""
    known = np.where(rates > 0, rates, 1.0)
    found = (
        2.0 * np.sqrt(known)
        if alpha == 0.5
        else logarithm(known)
        if alpha == 1.0
        else -1.0 / known
        if alpha == 2.0
        else known
    )
    utilities: Floats = np.where(rates > 0, found, 0.0)
    return utilities


def marginal(rates: Floats, alpha: float) -> Floats:
    """T U'(T) = T^(1 - alpha), the derivative of U by ln T. It is 0 for a rate of 0."""
    known = np.where(rates > 0, rates, 1.0)
    found = (
        np.sqrt(known)
        if alpha == 0.5
        else np.ones_like(known)
        if alpha == 1.0
        else 1.0 / known
        if alpha == 2.0
        else known
    )
    marginals: Floats = np.where(rates > 0, found, 0.0)
    return marginals


def logarithm(values: Floats) -> Floats:
    """ln of numbers above 0, relative error below 2^-50. For m from sqrt(1/2) to sqrt(2), ln m = 2
    atanh(s), s = (m - 1) / (m + 1); s^2 < 0.0295: the truncated series is within 2^-60."""
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
