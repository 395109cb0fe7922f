"""Alpha-fairness: what a task's FLOP/s are worth where the sum of all alone does not count.

U(T) = T^(1 - alpha) / (1 - alpha), the logarithm for alpha 1 (Mo and Walrand, "Fair end-to-end
window-based congestion control", 2000). Computed with + - * / and the square root alone, each
rounded correctly on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
