"""The overlapped reduction: launched bucket by bucket during the last backward.

Megatron's order differs in a member's first iteration, so a bucket waits for its turn, which is the
same on all members. docs/decisions/overlapped-reduction.md has the rules.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dependencies import private_megatron
from ..model.trainee import TrainingModel
from ..process.trace import Note
from .exact_reduction import ExactReduction

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


END_S_MAX = 1.0
"""Time for launched collectives to end once the connections of their generation are closed."""
END_S = 0.001

Works = list[Any]
"""torch's handles of launched collectives."""


class OverlappedReduction:
    """The launched collectives of one reduction: the stats of all members, then each bucket. Only
    `wait_all` may run outside the launching thread. `is_over` returns whether the reduction must be
    left.

    An error at a launch is not raised through the backward. It is stored in `why` and nothing more
    is launched, but the backward ends, so that its micro-batch is complete.
    """

    def __init__(self, stats: Tensor, num_buckets: int, is_over: Callable[[], bool]) -> None:
        self.why = ""
        self.num_complete = 0
        """Number of buckets completed before this member began to abort anything."""
        self._stats = stats
        self._is_over = is_over
        self._ready = [False] * num_buckets
        self._works: list[Works] = []
        self._group = dist.group.WORLD
        self._try(lambda: [dist.all_reduce(stats, async_op=True)])

    def ready(self, bucket: int, launch: Callable[[int], Works]) -> None:
        """This bucket's gradients are complete: launch it, and the buckets that waited for it."""
        self._ready[bucket] = True
        while (turn := len(self._works) - 1) < len(self._ready) and self._ready[turn]:
            if self.why or self._is_over():
                return
            self._try(partial(launch, turn))

    def _try(self, launch: Callable[[], Works]) -> None:
        try:
            self._works.append(launch())
        except RuntimeError as error:
            self.why = f"{type(error).__name__}: {error}".strip()

    def wait_all(self, note: Note, check_active: Callable[[], None]) -> list[float]:
        """Wait for all collectives; returns the stats. Raises RuntimeError. `check_active` raises
        it after an aborted wait: such a collective looks complete."""
        if self.why:
            raise RuntimeError(self.why)
        assert len(self._works) == 1 + len(self._ready), "all is launched"
        self._wait(self._works[0])
        check_active()
        for bucket, works in enumerate(self._works[1:]):
            self._wait(works)
            note("bucket_done", bucket)
            check_active()
            self.num_complete += 1
        stats: list[float] = self._stats.tolist()
        return stats

    def _wait(self, works: Works) -> None:
        for work in works:
            work.wait()
        if self._stats.is_cuda:  # on CUDA, `wait` blocks the stream, not the host
            torch.cuda.current_stream().synchronize()

    def end(self, wake: Callable[[], None]) -> threading.Thread | None:
        """Wait until all collectives end; returns the thread of an abandoned wait, if any."""
        return end_all([work for works in self._works for work in works], wake, self._group)


def end_all(works: Works, wake: Callable[[], None], group: Any) -> threading.Thread | None:
    """Wait until these launched collectives end, once `wake` has closed their connections; returns
    the thread of an abandoned wait, if any.

    That thread holds `group` until the wait ends. A gloo group waits for its works before it is
    destroyed. If a work is stuck, the thread that waits for it must drop the group last, not the
    main thread.
    """
    deadline_s = time.monotonic() + END_S_MAX
    while not all(work.is_completed() for work in works):
        wake()
        if time.monotonic() > deadline_s:
            waiter = threading.Thread(
                target=_wait_abandoned, args=(works, group), name="abandoned", daemon=True
            )
            waiter.start()
            return waiter
        time.sleep(END_S)
    return None


def _wait_abandoned(works: Works, group: Any) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()


class BucketLauncher:
    """Launches Megatron's bucket groups when it is their turn in the current reduction."""

    def __init__(
        self, groups: Sequence[Any], backup: GradientBackup | ExactReduction, note: Note
    ) -> None:
        self.current: OverlappedReduction | None = None
        self._groups = groups
        self._backup = backup
        self._note = note
        self._starts = [group.start_grad_sync for group in groups]
        for index, group in enumerate(groups):
            group.start_grad_sync = partial(self._ready, index)

    def begin(self, stats: Tensor, is_over: Callable[[], bool]) -> None:
        """Launch the stats. From now on a backward launches buckets."""
        self.current = OverlappedReduction(stats, len(self._groups), is_over)

    def launch_rest(self) -> None:
        """Launch the buckets that no backward has launched."""
        for index in range(len(self._groups)):
            self._ready(index)

    def _ready(self, bucket: int, force_all_reduce: bool = False) -> None:
        if self.current is not None:  # None: this member has an order to stop
            self.current.ready(bucket, self._launch)

    def _launch(self, bucket: int) -> Works:
        self._note("bucket", bucket)
        group = self._groups[bucket]
        self._backup.keep(group)
        if isinstance(self._backup, ExactReduction):
            return self._backup.launch(group)
        self._starts[bucket]()
        return private_megatron.reduction_works(group)

    def reset(self) -> None:
        """Clear a failed reduction from Megatron's groups."""
        self.current = None
        for group in self._groups:
            private_megatron.reset_reduction(group)
