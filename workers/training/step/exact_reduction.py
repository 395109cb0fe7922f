"""The reduction of exact sums (model/exact_sum.py): integers over all members, then fp32.

The local integers stay as they are: each bucket is reduced in a copy, and the sum of all members is
written to Megatron's buffers. So nothing must be restored after a failed reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators.communicators import Communicators
from ..dependencies.private_megatron import set_gathered
from ..model.exact_sum import ExactSum, largest, power_of_two
from ..model.optimizers import ranges
from ..model.trainee import TrainingModel
from .optimizer_step import is_first_holder

Works = list[Any]

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


class ExactBarrier(NamedTuple):
    """What a member adds to the step barrier, as integers: parameters with an element above its
    bound, and with one that is not finite; then the limbs of the sum of squares, and what the
    members compare (corruption.py)."""

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


class ExactReduction:
    """The reduction of the exact sums of `trainee`. It takes the place of GradientBackup."""

    is_kept = True

    def __init__(
        self, trainee: TrainingModel, sums: ExactSum, communicators: Communicators
    ) -> None:
        self._trainee, self._sums, self._communicators = trainee, sums, communicators
        owned = ranges(trainee.optimizer)
        self._is_scattered = trainee.is_sharded and trainee.mirror is None
        self._number = {id(param): index for index, param in enumerate(sums.params)}
        self._own = [
            owned.get(id(param), slice(0, 0)) if self._is_scattered else slice(0, param.numel())
            for param in sums.params
        ]
        config = trainee.ddps[0].config
        names = {id(param): name for name, param in trainee.named_parameters()}
        has_norms = bool(getattr(config, "qk_layernorm", False))
        self._tied = [
            index
            for index, param in enumerate(sums.params)
            if trainee.axes.pp > 1 and getattr(param, "shared_embedding", False)
        ]
        self._split = [
            index
            for index, param in enumerate(sums.params)
            if trainee.axes.tp > 1
            and (
                (config.sequence_parallel and getattr(param, "sequence_parallel", False))
                or (
                    has_norms
                    and any(part in names[id(param)] for part in ("q_layernorm", "k_layernorm"))
                )
            )
        ]
        """The parameters whose gradients are added up over the ranks of a replica."""
        self._buffer_of = {
            id(bucket): at for at, buffer in enumerate(trainee.buffers) for bucket in buffer.buckets
        }
        self._reduced: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}
        self._is_begun = False
        self._next_exponents: Tensor | None = None

    # --- as GradientBackup ---
    def keep(self, group: Any) -> None:
        self._is_begun = True

    def drop(self) -> None:
        self._reduced, self._late, self._is_begun = {}, {}, False

    def free(self) -> None:
        """The copies are freed as soon as their result is known."""

    def restore(self) -> bool:
        """The local sums are as they were, unless they were reduced in place."""
        has_lost = self._is_begun and not self._trainee.train.kept_sum
        self.drop()
        if has_lost:
            self._trainee.release_gradients()
        return not has_lost

    # --- the reduction ---
    def launch(self, group: Any) -> Works:
        """Launch the reduction of a bucket group. Returns its works."""
        works: Works = []
        members = self._communicators.groups.dp_cp
        for bucket in group.buckets:
            at, num = self._buffer_of[id(bucket)], bucket.grad_data.numel()
            own = self._sums.flat[at][bucket.offset : bucket.offset + num]
            reduced = own.clone() if self._trainee.train.kept_sum else own
            self._reduced[id(bucket)] = reduced
            if self._is_scattered:
                size = num // members.size()
                part = reduced[members.rank() * size : (members.rank() + 1) * size]
                # Its successor in torch 2.13 is not in 2.11.
                works.append(
                    dist.reduce_scatter_tensor(  # pyright: ignore[reportDeprecated]
                        part, reduced, group=members, async_op=True
                    )
                )
            else:
                works.append(dist.all_reduce(reduced, group=members, async_op=True))
        return works

    def finish(self, group: Any) -> None:
        """Write the sums of a reduced bucket group to Megatron's buffers, and free the copy."""
        set_gathered(group, is_gathered=False)  # as at the end of Megatron's own reduction
        late = {*self._tied, *self._split}
        for bucket in group.buckets:
            reduced = self._reduced.pop(id(bucket))
            for param in bucket.params:
                index = self._number[id(param)]
                _, span = self._sums.spans[index]
                integers = reduced[span.start - bucket.offset : span.stop - bucket.offset]
                if index in late:
                    self._late[index] = integers.clone()
                else:
                    self._write(index, integers)

    def finish_replica(self, embedding_begins: Callable[[], None]) -> None:
        """Add up what the ranks of a replica share, in integers too: the tied embedding's two uses,
        and norms in sequence parallelism."""
        groups = self._communicators.groups
        if self._tied:
            embedding_begins()
        for indices, group in ((self._tied, groups.embd), (self._split, groups.tp)):
            for index in indices:
                dist.all_reduce(self._late[index], group=group)
        for index, integers in self._late.items():
            self._write(index, integers)
        self._late = {}
        self._agree_on_peaks()

    def _write(self, index: int, integers: Tensor) -> None:
        own = self._own[index]
        self._sums.params[index].main_grad.view(-1)[own].copy_(
            integers[own].double() * self._sums.inverse_scales[index]
        )

    def _agree_on_peaks(self) -> None:
        """Find each parameter's largest elements over the members that have a part of it."""
        groups = self._communicators.groups
        none = torch.zeros((), device=self._trainee.device)
        peaks = torch.stack([largest(part) if part.numel() else none for part in self._parts()])
        both = torch.stack((self._sums.tops, peaks))
        for group in (groups.dp_cp, groups.tp):
            if group.size() > 1:
                dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        if self._tied and self._sums.dtype == torch.int32:  # each stage has seen one of two uses
            tied = both[:, self._tied]
            dist.all_reduce(tied, dist.ReduceOp.MAX, group=groups.embd)
            both[:, self._tied] = tied
        self._tops, self._peaks = both

    def _parts(self) -> list[Tensor]:
        """The reduced gradient of each parameter, as far as this member has it."""
        return [
            param.main_grad.view(-1)[own]
            for param, own in zip(self._sums.params, self._own, strict=True)
        ]

    # --- the step barrier ---
    def barrier(self) -> ExactBarrier:
        """What this member adds to the step barrier. Waits for the device."""
        exponents = torch.frexp(self._peaks)[1]
        self._next_exponents = self._sums.next_exponents(self._peaks, self._tops)
        counted = [
            index
            for index, param in enumerate(self._sums.params)
            if (self._is_scattered or not self._trainee.at.dp)
            and is_first_holder(self._trainee, param)
        ]
        parts = self._parts()
        sums = [square_sums(parts[index], exponents[index]) for index in counted]
        is_finite = self._tops.isfinite() & self._peaks.isfinite()
        flags = torch.stack(((self._tops > self._sums.bounds).sum(), (~is_finite).sum()))
        values: list[int] = torch.cat((flags, exponents.to(torch.int64), *sums)).tolist()
        if values[1]:
            return ExactBarrier(0, values[1])
        own = values[2 : 2 + len(exponents)]
        pairs = values[2 + len(exponents) :]
        total = sum(
            ((whole << SQUARE_BITS) + rest) << (2 * own[index] - 2 * SQUARE_BITS + UNIT_BITS)
            for index, whole, rest in zip(counted, pairs[::2], pairs[1::2], strict=True)
            if whole or rest
        )
        return ExactBarrier(values[0], 0, limbs_of(total))

    def stepped(self) -> None:
        """The optimizer has stepped with this reduced gradient."""
        assert self._next_exponents is not None
        self._sums.exponents.copy_(self._next_exponents)
        self._next_exponents = None
