"""The local sum of gradients in Megatron's flat buffers: its backup, and Megatron's reduction."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from ..communicators.operations import Operations, Works
from ..dependencies import private_megatron
from .engine import Watch
from .megatron_hooks import PhaseHooks
from .megatron_mirrors import MirrorSends
from .trainee import TrainingModel

# --- Backup of the local gradients while Megatron reduces its buffers in place ---
#
# Each bucket is copied before its reduction. If the reduction fails, the copy replaces Megatron's
# buffer. Nothing is copied back, because an abandoned reduction may still write into the old memory
# at any time; that is freed when nothing uses it any more. Without a copy, new memory
# replaces the buffer, and the local gradients are lost.


class GradientBackup:
    """Copies of the gradients under reduction, with `train.kept_sum`. Their memory is used again
    until `free` is called: to take it anew costs five times the copy (measured on the CPU)."""

    def __init__(self, trainee: TrainingModel) -> None:
        self.is_kept = trainee.train.kept_sum
        self._trainee = trainee
        self._buffers = trainee.buffers
        self._buffer_of = {
            id(bucket): number
            for number, buffer in enumerate(self._buffers)
            for bucket in buffer.buckets
        }
        self._copies: list[Tensor] = []
        self._saved: set[int] = set()

    def keep(self, group: Any) -> None:
        """Copy the local gradients of a bucket group that is about to be reduced."""
        if self.is_kept and not self._copies:
            self._copies = [torch.empty_like(buffer.grad_data) for buffer in self._buffers]
        for bucket in group.buckets:
            if self.is_kept:
                copy = self._copies[self._buffer_of[id(bucket)]]
                _part(bucket, copy).copy_(bucket.grad_data)
            self._saved.add(id(bucket))

    def drop(self) -> None:
        """The result of the reduction counts: the copies are worthless."""
        self._saved.clear()

    def free(self) -> None:
        """Free the memory of the copies, unless they count."""
        if not self._saved:
            self._copies = []

    def restore(self) -> bool:
        """Make the copies the local gradients again. False: there are none, so these are lost."""
        if not self._saved:
            return True
        if self.is_kept:
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                for bucket in buffer.buckets:
                    if id(bucket) not in self._saved:
                        _part(bucket, copy).copy_(bucket.grad_data)
            self._trainee.set_gradients(self._copies)
        else:
            self._trainee.release_gradients()
        self._copies = []
        self._saved.clear()
        return self.is_kept


def _part(bucket: Any, buffer: Tensor) -> Tensor:
    return buffer[bucket.offset : bucket.offset + bucket.grad_data.numel()]


# --- What an overlapped reduction needs of Megatron's bucket groups, also with exact sums ---


class Buckets:
    """Megatron's bucket groups, the units of the reduction, in its order."""

    def __init__(self, trainee: TrainingModel) -> None:
        self._ddps = trainee.ddps
        self.groups: Sequence[Any] = trainee.bucket_groups
        self.starts: list[Callable[[], None]] = []
        """Megatron's own start of each group's reduction, once `on_complete` stands before it."""

    @property
    def num_buckets(self) -> int:
        return len(self.groups)

    def on_complete(self, ready: Callable[[int], None]) -> None:
        """Megatron calls `start_grad_sync` as a backward has completed a bucket: call `ready`."""

        def completed(bucket: int, force_all_reduce: bool = False) -> None:
            ready(bucket)

        self.starts = [group.start_grad_sync for group in self.groups]
        for index, group in enumerate(self.groups):
            group.start_grad_sync = partial(completed, index)

    @contextmanager
    def without_launch(self) -> Generator[None]:
        with ExitStack() as stack:
            for ddp in self._ddps:
                stack.enter_context(ddp.no_sync())
            yield

    def reset(self) -> None:
        """Clear a failed reduction from Megatron's groups."""
        for group in self.groups:
            private_megatron.reset_reduction(group)


class MegatronGradients(Buckets):
    """Gradients (engine.py) in fp32, which Megatron reduces by itself."""

    def __init__(self, trainee: TrainingModel) -> None:
        super().__init__(trainee)
        self._trainee = trainee
        self._backup = GradientBackup(trainee)
        self._hooks = PhaseHooks(trainee)
        self._mirrors = MirrorSends(trainee, self.groups)

    @property
    def has_backup(self) -> bool:
        return self._backup.is_kept

    def keep(self, bucket: int) -> None:
        self._backup.keep(self.groups[bucket])

    def restore(self) -> bool:
        return self._backup.restore()

    def drop(self) -> None:
        self._backup.drop()

    def free(self) -> None:
        self._backup.free()

    def reduce(self, operations: Operations, watch: Watch) -> None:
        """Megatron's own reduction.

        After an abandoned wait it could still change gradients that count. So it leaves Megatron's
        division by the token count out, uses the groups of its own generation, and `watch` ends it
        before each phase once the generation has ended.
        """
        self.finish(operations, watch)

    def launch(self, bucket: int, operations: Operations) -> Works:
        group = self.groups[bucket]
        self.starts[bucket]()
        works = private_megatron.reduction_works(group)
        return [*works, *self._mirrors.launched(group, works, operations)]

    def finish(self, operations: Operations, watch: Watch) -> None:
        """Megatron records the end of all buckets, and then adds up over the ranks of a replica
        what these share: tied embeddings, norms in sequence parallelism."""
        with self._hooks.reduction(watch):
            finalize_model_grads(self._trainee.ddps, None, pg_collection=operations.groups)
        self._mirrors.finish(operations, watch, is_overlapped=self._trainee.train.overlap)

    def reset(self) -> None:
        super().reset()
        self._mirrors.reset()
