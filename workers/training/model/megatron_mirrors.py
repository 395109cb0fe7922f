"""Sends a member's shard of the reduced gradients to the next one, which mirrors it, and receives.

A received shard is written where a reduction of all gradients would have put it. On a GPU, in an
overlapped reduction, a bucket's shard leaves behind its reduction, during the last backward. What
the members of a replica add up among them afterwards leaves once more at the end: the mirror's
replica adds it up too, but may round otherwise.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communicators.operations import Operations, Role, Works
from .engine import Watch
from .random_draws import LAYER
from .trainee import TrainingModel

_ROLE: Role = "dp_cp"


class MirrorSends:
    """The sends of one model's buckets; nothing if it has no mirror. All data-parallel members call
    the same methods in the same order."""

    def __init__(self, trainee: TrainingModel, groups: Sequence[Any]) -> None:
        self._groups = groups if trainee.mirror is not None else ()
        self._at, self._num = trainee.at.dp, trainee.axes.dp
        self._device = trainee.device
        self._num_left = 0
        """The bucket groups whose shards have left before the end."""
        self._late: dict[int, list[slice]] = {}
        """By id of a bucket: the elements of its parameters that a replica adds up."""
        if self._groups:
            late = {
                id(param)
                for name, param in trainee.named_parameters()
                if _is_late(trainee, name, param)
            }
            for buffer in trainee.buffers:
                for bucket in buffer.buckets:
                    begins = [
                        buffer.param_index_map[param][:2]
                        for param in bucket.params
                        if id(param) in late
                    ]
                    self._late[id(bucket)] = [
                        slice(first - bucket.offset, last - bucket.offset)
                        for first, last in sorted(begins)
                    ]

    def launched(self, group: Any, works: Works, operations: Operations) -> Works:
        """The reduction of this bucket group is launched, the next in order: start to send its
        shards, if that may be done before the end."""
        if not self._groups or not self.follow(works):
            return []
        self._num_left += 1
        return self._start([group], operations)

    def follow(self, works: Works) -> bool:
        """Whether a send that is started now reads the results of these reductions. On a GPU the
        stream keeps the order. gloo writes them only when the host waits for the reduction."""
        return self._device.type == "cuda"

    def reset(self) -> None:
        """The reduction has failed."""
        self._num_left = 0

    def finish(self, operations: Operations, watch: Watch, *, is_overlapped: bool) -> None:
        """The reduction is complete: send the shards that have not left, and wait. `is_overlapped`:
        send what a replica has added up, too."""
        if not self._groups:
            return
        watch.mirror_begins()
        works = self._start(self._groups[self._num_left :], operations)
        self.reset()
        for work in works:
            work.wait()
        if is_overlapped:
            self._send_late(operations)
        watch.check()

    def _start(self, groups: Sequence[Any], operations: Operations) -> Works:
        pairs = [self._shards(bucket) for group in groups for bucket in group.buckets]
        return operations.start_ring(
            [own for own, _ in pairs], [previous for _, previous in pairs], _ROLE
        )

    def _shards(self, bucket: Any) -> tuple[Tensor, Tensor]:
        """This member's shard of a bucket, and the previous member's."""
        shards = bucket.grad_data.view(self._num, -1)
        return shards[self._at], shards[(self._at - 1) % self._num]

    def _send_late(self, operations: Operations) -> None:
        own, previous = (list(self._late_parts(at)) for at in (self._at, self._at - 1))
        sent = [torch.cat(own)] if own else []
        received = [torch.cat(previous)] if previous else []
        for work in operations.start_ring(sent, received, _ROLE):
            work.wait()
        begin = 0
        for part in previous:
            part.copy_(received[0][begin : begin + part.numel()])
            begin += part.numel()

    def _late_parts(self, at: int) -> Iterator[Tensor]:
        """What a replica adds up, in the shards of the data-parallel member `at`."""
        for group in self._groups:
            for bucket in group.buckets:
                size = bucket.grad_data.numel() // self._num
                begin = at % self._num * size
                for span in self._late[id(bucket)]:
                    first, last = max(span.start, begin), min(span.stop, begin + size)
                    if first < last:
                        yield bucket.grad_data[first:last]


def _is_late(trainee: TrainingModel, name: str, param: Any) -> bool:
    """Whether the members of a replica may add up its gradients after the reduction: those of norms
    and biases over tensor-parallel ranks, those of tied embeddings over stages."""
    is_split = bool(getattr(param, "tensor_model_parallel", False))
    return (trainee.axes.tp > 1 and not is_split) or (
        trainee.axes.pp > 1 and LAYER.fullmatch(name) is None
    )
