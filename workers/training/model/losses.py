"""The losses of complete micro-batches. They stay on the device: to read one makes the host wait.

The sums of all members are read once in an iteration, together (step/stats.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NumTokens = int | Tensor
"""A number of tokens: an int, or a tensor with one element on the training device."""


class Losses:
    """What a member's micro-batches of one iteration add to the loss, and their tokens."""

    def __init__(self) -> None:
        self._items: list[int] = []
        self._values: list[Tensor] = []
        self._num_tokens: list[NumTokens] = []

    def add(self, item: int, loss: Tensor, num_tokens: NumTokens) -> None:
        self._items.append(item)
        self._values.append(loss.detach().reshape(()).double())
        self._num_tokens.append(num_tokens)

    def extend(self, others: Losses) -> None:
        self._items += others._items
        self._values += others._values
        self._num_tokens += others._num_tokens

    def with_losses(self, others: Losses) -> Losses:
        both = Losses()
        both.extend(self)
        both.extend(others)
        return both

    def clear(self) -> None:
        self._items, self._values, self._num_tokens = [], [], []

    def write(self, sums: Tensor) -> None:
        """Write the sums of losses and tokens into `sums[:2]`, zeros in float64, without a wait."""
        if not self._items:
            return
        torch.sum(torch.stack(self._values), 0, out=sums[0])
        self.write_num_tokens(sums[1])

    def write_num_tokens(self, sum_: Tensor) -> None:
        """The number of tokens, which is exact in any order."""
        sum_.fill_(sum(num for num in self._num_tokens if isinstance(num, int)))
        for num in self._num_tokens:
            if isinstance(num, Tensor):
                sum_.add_(num.detach().reshape(()))

    def by_micro_batch(self, num: int, device: torch.device) -> Tensor:
        """The loss of each of the `num` micro-batches of an iteration, 0 for those of others."""
        values = [torch.zeros((), dtype=torch.float64, device=device)] * num
        for item, value in zip(self._items, self._values, strict=True):
            if item >= 0:  # not padding
                values[item] = value
        return torch.stack(values)

    def not_finite(self) -> list[tuple[int, float]]:
        """The micro-batches whose loss is NaN or infinite, with it. Waits for the device."""
        if not self._items:
            return []
        values = torch.stack(self._values).tolist()
        return [
            (item, value)
            for item, value in zip(self._items, values, strict=True)
            if not math.isfinite(value)
        ]
