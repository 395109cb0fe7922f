"""Sums, norms and steps of training in plain Python: what tests compare the product's with.

Nothing here is imported from the product. The formulas are those of docs/guides/reproducible.md and
of the papers that are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

FP32_BITS, FP32_EXPONENT_MIN = 24, -126
FP32_ERROR_RATIO = 2.0**-FP32_BITS
"""The largest relative error of one rounding to fp32."""


def nearest_fp32(value: Fraction) -> float:
    """The nearest fp32 number, of two the even one. Source: IEEE 754, 4.3.1."""
    if not value:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, FP32_EXPONENT_MIN) - FP32_BITS + 1)
    return float(round(value / unit) * unit)


def unit_of(exponent: int, bits: int, num_micro_batches: int) -> Fraction:
    """The power of two of which a micro-batch's gradient becomes a multiple.

    No element is above 2^exponent. An integer of `bits` bits has one for the sign, and one so that
    2^exponent itself fits. The rest holds the sum of two uses (a tied embedding) in each
    micro-batch. No unit is below the smallest normal fp32 number.
    """
    summands = (2 * num_micro_batches - 1).bit_length()
    return Fraction(2) ** max(exponent - (bits - 2 - summands), FP32_EXPONENT_MIN)


def integer_sum(values: Iterable[float], unit: Fraction) -> Fraction:
    """Each value rounded to a multiple of `unit` (half to even), then the exact sum."""
    return sum((round(Fraction(value) / unit) for value in values), 0) * unit


def exponent_after(bits: int, peak: float, top: float) -> int:
    """The exponent that an iteration leaves to the next. `peak`: the largest element of the reduced
    gradient, `top`: of a micro-batch's."""
    return math.frexp(peak)[1] + 10 if bits == 64 else math.frexp(top)[1] + 6


def norm(values: Iterable[float]) -> float:
    """The Euclidean norm, from the exact sum of squares."""
    return math.sqrt(sum((Fraction(value) ** 2 for value in values), Fraction()))


class AdamW:
    """One element under AdamW, in fp64. Source: Loshchilov and Hutter, ICLR 2019, algorithm 2."""

    def __init__(self, value: float, betas: Sequence[float], eps: float) -> None:
        self.value, self.first, self.second, self.num_steps = value, 0.0, 0.0, 0
        self._betas, self._eps = betas, eps

    def step(self, gradient: float, rate: float, decay: float) -> None:
        one, other = self._betas
        self.num_steps += 1
        self.first = one * self.first + (1 - one) * gradient
        self.second = other * self.second + (1 - other) * gradient * gradient
        mean = self.first / (1 - one**self.num_steps)
        square = self.second / (1 - other**self.num_steps)
        self.value -= rate * decay * self.value
        self.value -= rate * mean / (math.sqrt(square) + self._eps)
