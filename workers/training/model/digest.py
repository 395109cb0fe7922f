"""Digests of tensors: sums over their elements, the same for any split of a tensor.

Each element's bits, as an integer, are multiplied by a weight and added in 64 bits that wrap
around. The weight is a product of odd numbers, one for each dim, which follow from the element's
index there and the tensor's name. So one element with other bits always changes the digest, and the
digest of a sum of integers is the sum of their digests.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687
"""Odd constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), as signed integers."""


def salt_of(name: str) -> int:
    """A number for a name, 63 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def digest(values: Tensor, offset: Sequence[int], salt: int) -> Tensor:
    """The digest of a block of a tensor, an int64 on its device. `offset`: its first element."""
    sums = values.view(_BITS[values.element_size()])
    for dim in reversed(range(len(offset))):
        places = torch.arange(offset[dim], offset[dim] + values.shape[dim], device=values.device)
        weights = places.add_(dim << 48).mul_(_SPREAD).add_(salt)
        sums = (sums * weights.bitwise_xor_(weights >> 32).mul_(_MIX).bitwise_or_(1)).sum(-1)
    return sums.sum() * (salt | 1)
