"""The exact local sum of gradients, in integers: it is the same in any order of micro-batches.

The gradient of each micro-batch is rounded to a multiple of a power of two, the same for all
elements of a parameter, and added as an integer. Integer addition is exact, so the sum of all
members is the same bits for any assignment of micro-batches. docs/guides/reproducible.md has the
reasons and the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .digest import digest

HEADROOM_BITS = 10
"""A micro-batch's gradient may be 2^10 times the largest element of the last reduced gradient."""
HEADROOM_OF_32_BITS = 6
"""With 32 bits it may be 2^6 times the largest element of a micro-batch's gradient in the last
iteration. That of the reduced gradient, which is up to as many times larger as an iteration has
micro-batches, with 2^10 left an integer so few bits that with 256 micro-batches a quarter of all
elements became 0."""
FIRST_BITS = 9
"""Before the first step: no element of a micro-batch's gradient is above 2^9."""
USES_NUM_MAX = 2
"""A tied embedding has two uses. The gradient of each is rounded on its own."""


class ExactSum:
    """The integers of one model part, in flat buffers of the `sizes` of those that receive the
    result in fp32.

    `exponents` [parameters], int32, is state: for each parameter the power of two that no element
    of a micro-batch's gradient may exceed, without the loss scale. If one does, the iteration runs
    again with 2^10 times as much. `spans`: each parameter's buffer and its elements there.
    `on_added` is called with a parameter whose gradient a backward has added here. If `is_checked`,
    `check` adds up the digests of all summands: the digest of the sum, unless its memory has
    changed.
    """

    def __init__(
        self,
        params: Sequence[Any],
        spans: Sequence[tuple[int, slice]],
        sizes: Sequence[int],
        device: torch.device,
        *,
        bits: int,
        num_summands: int,
        on_added: Callable[[Any], None],
    ) -> None:
        self.params = tuple(params)
        self.dtype = torch.int64 if bits == 64 else torch.int32
        self.exponents = torch.full((len(params),), FIRST_BITS, dtype=torch.int32, device=device)
        self.spans = list(spans)
        self._sizes = list(sizes)
        self._device = device
        self._range_bits = bits - 2 - (num_summands * USES_NUM_MAX - 1).bit_length()
        self.is_checked = False
        self.check = torch.zeros((), dtype=torch.int64, device=device)
        self.flat: list[Tensor] = []
        """The integers, by buffer."""
        self._views: list[Tensor] = []
        zeros = torch.zeros(len(params), device=device)
        self._tops, self._scales = zeros.clone(), zeros.clone()
        self._top_of, self._scale_of = self._tops.unbind(), self._scales.unbind()
        for index, param in enumerate(params):
            param.register_post_accumulate_grad_hook(partial(self._take, index, on_added))

    @property
    def tops(self) -> Tensor:
        """By parameter: a micro-batch's largest element; infinite if one is not finite."""
        return torch.where(self._tops.isfinite(), self._tops, torch.inf)

    @property
    def bounds(self) -> Tensor:
        """By parameter: what an element of a micro-batch's gradient may be at most."""
        return power_of_two(self._limits).float()

    def next_exponents(self, peaks: Tensor, tops: Tensor) -> Tensor:
        """The exponents after a step whose reduced gradients have the largest elements `peaks`, and
        whose micro-batches have `tops`, over all members."""
        most, headroom = (
            (peaks, HEADROOM_BITS) if self.dtype == torch.int64 else (tops, HEADROOM_OF_32_BITS)
        )
        exponents = torch.frexp(most)[1] + headroom - self._loss_exponent
        return torch.where(most > 0, exponents, self.exponents).to(torch.int32)

    def begin(self, loss_scale: Tensor | None, redone: int) -> None:
        """Called before the micro-batches of an iteration, which has been begun `redone` times
        before; again if the iteration goes on after a fault."""
        self._loss_exponent = (
            0 if loss_scale is None else torch.frexp(loss_scale.detach().reshape(()))[1]
        )
        self._limits = self.exponents + HEADROOM_BITS * redone + self._loss_exponent
        shift = (self._range_bits - self._limits).clamp(-126, 126)
        self._scales.copy_(power_of_two(shift))
        self.inverse_scales = power_of_two(-shift).unbind()

    def clear(self) -> None:
        """Zero the sum, which gets memory if it has none."""
        if self.flat:
            for flat in self.flat:
                flat.zero_()
        else:
            self.flat = [
                torch.zeros(size, dtype=self.dtype, device=self._device) for size in self._sizes
            ]
            self._views = [self.flat[at][span] for at, span in self.spans]
        self._tops.zero_()
        self.check.zero_()

    def digest(self) -> Tensor:
        """The digest of the sum, on the device."""
        return torch.stack([self._digest(*item) for item in enumerate(self._views)]).sum()

    def _digest(self, index: int, integers: Tensor) -> Tensor:
        shape = self.params[index].shape
        return digest(integers.view(shape), (0,) * len(shape), index)

    def release(self) -> None:
        """Free the memory of the sum."""
        self.flat, self._views = [], []

    def take_over(self, other: ExactSum) -> None:
        """Copy the sum of another model of the same part."""
        self.clear()
        for mine, theirs in zip(self._views, other._views, strict=True):
            mine.copy_(theirs)
        self._tops.copy_(other._tops)
        self.check.copy_(other.check)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a micro-batch's gradient of parameter `index`, without a wait for the device."""
        flat = gradient.reshape(-1).float()
        top = self._top_of[index]
        torch.maximum(top, largest(flat), out=top)
        integers = (flat * self._scale_of[index]).round_().to(self.dtype)
        self._views[index].add_(integers)
        if self.is_checked:
            self.check.add_(self._digest(index, integers))

    def negate(self) -> None:
        """From now on gradients are subtracted, or added again."""
        self._scales.neg_()

    def left(self) -> list[int]:
        """The parameters whose sum is not zero, apart from those with a gradient out of range."""
        is_left = torch.stack([view.any() for view in self._views]) & (self.tops <= self.bounds)
        found: list[int] = is_left.nonzero().flatten().tolist()
        return found

    def _take(self, index: int, on_added: Callable[[Any], None], param: Any) -> None:
        self.add(index, param.grad)
        on_added(param)


def part_tied_uses(module: Any, add: Callable[[Any, Tensor], None]) -> None:
    """Let the two uses of a tied embedding in one module give their gradients apart, as in a
    pipeline. `add(weight, gradient)` gets that of the output layer."""

    def before(layer: Any, args: Any, options: dict[str, Any]) -> Any:
        weight = options.get("weight")
        if weight is None or not (torch.is_grad_enabled() and weight.requires_grad):
            return None

        def took(gradient: Tensor) -> Tensor:
            add(weight, gradient)
            return torch.zeros_like(gradient)

        other = weight.view_as(weight)
        other.register_hook(took)
        return args, {**options, "weight": other}

    for part in module.modules():
        if (
            getattr(part, "share_embeddings_and_output_weights", False)
            and getattr(part, "pre_process", False)
            and getattr(part, "post_process", False)
        ):
            part.output_layer.register_forward_pre_hook(before, with_kwargs=True)


def largest(values: Tensor) -> Tensor:
    """The largest absolute value; NaN if any is NaN. `aminmax` is ten times as fast as `abs`."""
    low, high = torch.aminmax(values)
    return torch.maximum(high, -low)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in fp64, exactly, for integers from -1022 to 1023."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
