"""A reduction in flight: launched bucket by bucket while the last backward makes the gradients.

Megatron launches a bucket as soon as its gradients are there. In which order that happens follows
from the graph of the backward, and a member in its first iteration, or with nothing left to run,
goes by none: so a bucket waits here for its turn, the same on all members, as in torch's own DDP
(reducer.cpp, mark_bucket_ready).

Nothing that goes wrong at a launch is raised through a backward: it is remembered, nothing more is
launched, and the backward ends, so that its micro-batch is whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import BufferType
from torch import Tensor

from ..model.trainee import Trainee
from ..process.trace import Note

# --- The local sum of gradients, kept while Megatron reduces its buffers in place. ---
#
# What is reduced is copied first, bucket by bucket. If the reduction comes to nothing, the copy
# takes the place of Megatron's buffer: nothing is copied back, because a reduction that was left
# behind may still write into the old memory, at any time. That memory goes when its last user does.


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

END_S_MAX = 1.0
"""What was launched has this long to end, once the connections of its generation are closed."""
END_S = 0.001

Works = list[Any]
"""torch's handles of what was launched."""


class Flight:
    """What was launched of one reduction: the stats of all members first, then each bucket.

    Only `land` may be called from another thread than the one that launches. `is_over` says that
    the reduction is to be left. `why` is what went wrong at a launch.
    """

    def __init__(self, stats: Tensor, num_buckets: int, is_over: Callable[[], bool]) -> None:
        self.why = ""
        self.num_complete = 0
        """How many buckets were seen whole before anybody here began to abort anything."""
        self._stats = stats
        self._is_over = is_over
        self._ready = [False] * num_buckets
        self._works: list[Works] = []
        # gloo's group waits for its works before it goes. So it must not be the main thread that
        # drops it while a work is stuck, but who waits for that work.
        self._group = dist.group.WORLD
        self._try(lambda: [dist.all_reduce(stats, async_op=True)])

    def ready(self, bucket: int, launch: Callable[[int], Works]) -> None:
        """The gradients of this bucket are whole: launch it, and those that waited for it."""
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

    def land(self, note: Note, goes_on: Callable[[], None]) -> list[float]:
        """Wait for all that was launched, which is all; the stats. Raises RuntimeError.

        `goes_on` raises it as soon as the reduction is to be left: what was aborted looks
        finished too.
        """
        if self.why:
            raise RuntimeError(self.why)
        assert len(self._works) == 1 + len(self._ready), "all is launched"
        self._wait(self._works[0])
        goes_on()
        for bucket, works in enumerate(self._works[1:]):
            self._wait(works)
            note("bucket_done", bucket)
            goes_on()
            self.num_complete += 1
        stats: list[float] = self._stats.tolist()
        return stats

    def _wait(self, works: Works) -> None:
        for work in works:
            work.wait()
        if self._stats.is_cuda:  # there `wait` holds the stream, not the host
            torch.cuda.current_stream().synchronize()

    def end(self, wake: Callable[[], None]) -> threading.Thread | None:
        """See all that was launched end; what does not is left behind in the thread returned."""
        last_s = time.monotonic() + END_S_MAX
        while not all(work.is_completed() for works in self._works for work in works):
            wake()
            if time.monotonic() > last_s:
                left = threading.Thread(target=self._outlive, name="left behind", daemon=True)
                left.start()
                return left
            time.sleep(END_S)
        return None

    def _outlive(self) -> None:
        for works in self._works:
            with suppress(RuntimeError):
                self._wait(works)


class Buckets:
    """Megatron's bucket groups: they are launched as it is their turn in the flight under way."""

    def __init__(self, groups: Sequence[Any], kept: Kept, note: Note) -> None:
        self.flight: Flight | None = None
        self._groups = groups
        self._kept = kept
        self._note = note
        self._starts = [group.start_grad_sync for group in groups]
        for index, group in enumerate(groups):
            group.start_grad_sync = partial(self._ready, index)

    def begin(self, stats: Tensor, is_over: Callable[[], bool]) -> None:
        """Launch the stats. From now on a backward launches buckets."""
        self.flight = Flight(stats, len(self._groups), is_over)

    def launch_rest(self) -> None:
        """Launch what no backward has launched."""
        for index in range(len(self._groups)):
            self._ready(index)

    def _ready(self, bucket: int, force_all_reduce: bool = False) -> None:
        assert self.flight is not None, "only the last backward makes whole buckets"
        self.flight.ready(bucket, self._launch)

    def _launch(self, bucket: int) -> Works:
        self._note("bucket", bucket)
        group = self._groups[bucket]
        self._kept.keep(group)
        self._starts[bucket]()
        works: Works = group.grad_reduce_handle.works
        return works

    def reset(self) -> None:
        """Have Megatron's groups forget what came to nothing: it expects none of that."""
        self.flight = None
        for group in self._groups:
            group.grad_reduce_handle = None
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
