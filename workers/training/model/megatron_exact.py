"""The reduction of exact sums (exact_sum.py): integers over all members, then fp32 for Megatron.

Each bucket is reduced in a copy, and the sum of all members is written to Megatron's buffers: the
local integers are their own backup. Without `train.kept_sum` they are reduced in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..communicators.operations import MAX, Operations, Role, Works
from ..dependencies.private_megatron import set_gathered
from .engine import Watch
from .exact_sum import ExactSum, largest
from .megatron_gradients import Buckets
from .megatron_mirrors import MirrorSends
from .megatron_step import is_first_holder
from .optimizers import ranges
from .step_barrier import SQUARE_BITS, UNIT_BITS, ExactBarrier, limbs_of, square_sums
from .trainee import TrainingModel


class MegatronExactGradients(Buckets):
    """ExactGradients (engine.py): the integers `sums` of a model with Megatron's buffers."""

    def __init__(self, trainee: TrainingModel, sums: ExactSum) -> None:
        super().__init__(trainee)
        self._trainee, self._sums = trainee, sums
        self._mirrors = MirrorSends(trainee, self.groups)
        owned = ranges(trainee.optimizer)
        self._is_scattered = trainee.is_sharded
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

    # --- the backup: the integers themselves ---
    @property
    def has_backup(self) -> bool:
        return self._trainee.train.kept_sum

    def keep(self, bucket: int) -> None:
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
    def reduce(self, operations: Operations, watch: Watch) -> None:
        for bucket in range(self.num_buckets):
            watch.bucket_begins(bucket)
            for work in self.launch(bucket, operations):
                work.wait()
            watch.check()
            self._finish_bucket(self.groups[bucket])
            watch.bucket_ends(bucket)
        self._finish_replica(operations, watch)

    def launch(self, bucket: int, operations: Operations) -> Works:
        works: Works = []
        members = operations.group("dp_cp")
        for each in self.groups[bucket].buckets:
            at, num = self._buffer_of[id(each)], each.grad_data.numel()
            own = self._sums.flat[at][each.offset : each.offset + num]
            reduced = own.clone() if self._trainee.train.kept_sum else own
            self._reduced[id(each)] = reduced
            if self._is_scattered:
                size = num // members.size()
                part = reduced[members.rank() * size : (members.rank() + 1) * size]
                works += operations.start_reduce_scatter(part, reduced, "dp_cp")
            else:
                works += operations.start_all_reduce(reduced, "dp_cp")
        return works

    def finish(self, operations: Operations, watch: Watch) -> None:
        for group in self.groups:
            self._finish_bucket(group)
        self._finish_replica(operations, watch)

    def _finish_bucket(self, group: Any) -> None:
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

    def _finish_replica(self, operations: Operations, watch: Watch) -> None:
        """Add up what the ranks of a replica share, in integers too: the tied embedding's two uses,
        and norms in sequence parallelism."""
        if self._tied:
            watch.tied_begins()
        shared: tuple[tuple[list[int], Role], ...] = ((self._tied, "embd"), (self._split, "tp"))
        for indices, role in shared:
            for index in indices:
                operations.all_reduce(self._late[index], role)
        for index, integers in self._late.items():
            self._write(index, integers)
        self._late = {}
        self._mirrors.finish(operations, watch, is_overlapped=False)
        self._agree_on_peaks(operations)
        watch.check()

    def _write(self, index: int, integers: Tensor) -> None:
        own = self._own[index]
        self._sums.params[index].main_grad.view(-1)[own].copy_(
            integers[own].double() * self._sums.inverse_scales[index]
        )

    def _agree_on_peaks(self, operations: Operations) -> None:
        """Find each parameter's largest elements over the members that have a part of it."""
        none = torch.zeros((), device=self._trainee.device)
        peaks = torch.stack([largest(part) if part.numel() else none for part in self._parts()])
        both = torch.stack((self._sums.tops, peaks))
        roles: tuple[Role, ...] = ("dp_cp", "tp")
        for role in roles:
            if operations.group(role).size() > 1:
                operations.all_reduce(both, role, MAX)
        if self._tied and self._sums.dtype == torch.int32:  # each stage has seen one of two uses
            tied = both[:, self._tied]
            operations.all_reduce(tied, "embd", MAX)
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
