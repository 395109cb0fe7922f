"""The step barrier: what each member adds to it, and what all members then know.

A member that has only a part of the gradients steps after it. What is added is either in fp64, or
exact: integers, whose sum is the same in any order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .exact_sum import power_of_two

# --- An exact sum of squares, over any partition of the elements ---
#
# Each square is cut into two integers, in units that follow from the parameter's largest element.
# Their sum over all parameters is one large integer in units of 2^-UNIT_BITS, sent in limbs.

SQUARE_BITS = 32
"""Bits of a square above the point of its first integer; the second has as many below it. The sum
of 2^30 elements fits into 63 bits."""
UNIT_BITS = 400
LIMB_BITS, LIMBS_NUM = 40, 18
"""The smallest square is 2^-298, the sum of the largest below 2^290."""


class StepBarrier(NamedTuple):
    """Values over all gradients that a step needs if a member has only a part.
    `num_overflows`: the parameters whose exact sum does not count; the iteration runs again."""

    norm_square: float
    num_not_finite: float = 0.0
    num_overflows: float = 0.0


class ExactBarrier(NamedTuple):
    """What a member adds to the step barrier, as integers: parameters with an element above its
    bound, and with one that is not finite; then the limbs of the sum of squares, and what the
    members compare (step/checks.py)."""

    num_overflows: int
    num_not_finite: int
    limbs: tuple[int, ...] = (0,) * LIMBS_NUM
    checks: tuple[int, ...] = ()


def norm_square_of(limbs: Sequence[int]) -> float:
    """The exact sum of squares, rounded once."""
    return sum(limb << (LIMB_BITS * number) for number, limb in enumerate(limbs)) / (1 << UNIT_BITS)


def limbs_of(total: int) -> tuple[int, ...]:
    """A large integer in limbs, of which 2^23 members' can be added up."""
    return tuple(
        (total >> (LIMB_BITS * number)) & ((1 << LIMB_BITS) - 1) for number in range(LIMBS_NUM)
    )


def square_sums(values: Tensor, exponent: Tensor) -> Tensor:
    """The two integers of the sum of squares of these elements, which are below 2^exponent."""
    squares = values.double().mul_(power_of_two(SQUARE_BITS // 2 - exponent)).square_()
    whole = squares.round()
    rest = squares.sub_(whole).mul_(2.0**SQUARE_BITS).round_()
    return torch.stack((whole.to(torch.int64).sum(), rest.to(torch.int64).sum()))
