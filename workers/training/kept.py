"""The local sum of gradients, kept while Megatron reduces its buffers in place.

What is reduced is copied first, bucket by bucket. If the reduction comes to nothing, the copy takes
the place of Megatron's buffer: nothing is copied back, because a reduction that was left behind may
still write into the old memory, at any time. That memory goes when its last user does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import BufferType
from torch import Tensor

from .model import Trainee


class Kept:
    """Copies of what is being reduced. They cost as much memory as the gradients themselves."""

    def __init__(self, trainee: Trainee) -> None:
        self._buffers = trainee.buffers
        self._groups = trainee.bucket_groups
        self._home = {id(bucket): number for number, buffer in enumerate(self._buffers)
                      for bucket in buffer.buckets}
        self._copies: list[Tensor] = []
        self._kept: set[int] = set()

    def keep(self, group: Any) -> None:
        """Copy the local sums of a bucket group that is about to be reduced."""
        if not self._copies:
            self._copies = [torch.empty_like(buffer.grad_data) for buffer in self._buffers]
        for bucket in group.buckets:
            _part(bucket, self._copies[self._home[id(bucket)]]).copy_(bucket.grad_data)
            self._kept.add(id(bucket))

    def drop(self) -> None:
        """The reduction is whole: its result is what counts."""
        self._kept.clear()

    def put_back(self) -> None:
        """The reduction came to nothing: what was kept is the local sum again."""
        if not self._kept:
            return
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            for bucket in buffer.buckets:
                if id(bucket) not in self._kept:
                    _part(bucket, copy).copy_(bucket.grad_data)
                bucket.grad_data = _part(bucket, copy)
            buffer.grad_data = copy
            for param in buffer.params:
                start, _, _ = buffer.param_index_map[param]
                param.main_grad = buffer._get(param.data.shape, start, BufferType.GRAD)
        for group in self._groups:  # where Megatron keeps views of the old memory
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
        self._copies = []
        self._kept.clear()


def _part(bucket: Any, buffer: Tensor) -> Tensor:
    return buffer[bucket.offset: bucket.offset + bucket.grad_data.numel()]
