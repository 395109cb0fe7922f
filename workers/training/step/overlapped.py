"""The overlapped sum: launched bucket by bucket during the last backward.

An engine's order may differ in a member's first iteration, so a bucket waits for its turn, which is
the same on all members. docs/decisions/overlapped-reduction.md has the rules.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from ..communicators.operations import Operations, Works
from ..model.engine import Engine
from ..model.losses import Losses
from ..process.trace import Marks, Note
from . import stats
from .collective import Collectives
from .results import Done, Result, Stopped
from .stats import Stats
from .sums import BackedSum, ReductionWatch, Sum, wait_until_computed


class LaunchedReduction:
    """The launched operations of one reduction: the stats of all members, then each bucket. Only
    `wait_all` may run outside the launching thread. `is_over` returns whether the reduction must be
    left.

    An error at a launch is not raised through the backward. It is stored in `why` and nothing more
    is launched, but the backward ends, so that its micro-batch is complete.
    """

    def __init__(
        self,
        mine: Stats,
        values: Tensor,
        num_buckets: int,
        is_over: Callable[[], bool],
        operations: Operations,
    ) -> None:
        self.why = ""
        self.mine = mine
        """What this member tells; `values` is its tensor."""
        self.num_complete = 0
        """Number of buckets completed before this member began to abort anything."""
        self.operations = operations
        self.world = operations.group("world")
        self._values = values
        self._is_over = is_over
        self._ready = [False] * num_buckets
        self._works: list[Works] = []
        self._try(lambda: operations.start_all_reduce(values))

    @property
    def works(self) -> Works:
        return [work for works in self._works for work in works]

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

    def wait_all(self, note: Note, check: Callable[[], None]) -> list[float]:
        """Wait for all operations; returns the stats. Raises RuntimeError. `check` raises it after
        an aborted wait: such an operation looks complete."""
        if self.why:
            raise RuntimeError(self.why)
        assert len(self._works) == 1 + len(self._ready), "all is launched"
        self._wait(self._works[0])
        check()
        for bucket, works in enumerate(self._works[1:]):
            self._wait(works)
            note("bucket_done", bucket)
            check()
            self.num_complete += 1
        values: list[float] = self._values.tolist()
        return values

    def _wait(self, works: Works) -> None:
        for work in works:
            work.wait()
        if self._values.is_cuda:  # on CUDA, `wait` blocks the stream, not the host
            torch.cuda.current_stream().synchronize()


class Overlapped(BackedSum):
    """A GradientSum: the last backward launches each bucket that it completes."""

    def __init__(self, engine: Engine, collectives: Collectives, note: Note, marks: Marks) -> None:
        super().__init__(engine, collectives, note)
        self._marks = marks
        self._launched: LaunchedReduction | None = None
        self.gradients.on_complete(self._ready)

    def begin(self, operations: Operations, mine: Stats, losses: Losses) -> None:
        """Launch the stats; from now on a backward launches buckets. The stats cover the last
        micro-batch already: if a member dies after that, stats and buckets are lost together. Does
        nothing if this member has an order to stop at once."""
        if self.collectives.must_stop():
            return
        self.note("reduce")
        if self.collectives.must_stop():  # the order arrived meanwhile
            return
        self.note("stats")
        self._launched = LaunchedReduction(
            mine,
            stats.own_values(self.engine, mine, losses, stops=self.collectives.stops()),
            self.gradients.num_buckets,
            self.collectives.must_stop,
            operations,
        )

    @contextmanager
    def backward(self, *, is_last: bool) -> Generator[None]:
        """Only the last backward launches buckets."""
        with ExitStack() as stack:
            if not is_last:
                stack.enter_context(self.gradients.without_launch())
            yield

    def give_up(self) -> None:
        if self._launched is not None:
            self._end(self._launched)
            self.gradients.restore()  # a late write must not reach what is used next
        self._reset()  # a pipeline's last backward may have counted its gradients

    def run(self, mine: Stats, losses: Losses) -> Result[Sum]:
        if self._launched is None:
            self.begin(self.collectives.operations, mine, losses)
        launched = self._launched
        if launched is None:
            self._reset()  # the last backward has launched nothing, but counted its gradients
            return Stopped()
        for bucket in range(self.gradients.num_buckets):  # those that no backward has launched
            self._ready(bucket)
        watch = ReductionWatch(self.note, self.collectives.activity_check())
        result = self.collectives.run(
            partial(self._wait, launched, watch), holds_model=self.may_write_late
        )
        self.num_complete = launched.num_complete
        if isinstance(result, Done):
            self._launched = None
            self.note("reduced")
        elif isinstance(result, Stopped) and result.is_abandoned:
            self._reset()  # its waiting thread cleans up
        else:
            self._end(launched)
        return result

    def _wait(self, launched: LaunchedReduction, watch: ReductionWatch) -> Sum:
        wait_until_computed(self.engine.device)
        self._marks.wait_begins()
        told = stats.read(launched.wait_all(self.note, watch.check))
        self.gradients.finish(launched.operations, watch)
        watch.check()
        side_sums = self.engine.side_sums(launched.operations)
        watch.check()
        return Sum(told, launched.mine, side_sums)

    def _ready(self, bucket: int) -> None:
        if self._launched is not None:  # None: this member has an order to stop
            self._launched.ready(bucket, self._launch)

    def _launch(self, bucket: int) -> Works:
        assert self._launched is not None
        self.note("bucket", bucket)
        self.gradients.keep(bucket)
        return self.gradients.launch(bucket, self._launched.operations)

    def _end(self, launched: LaunchedReduction) -> None:
        self.collectives.end(launched.works, launched.world, holds_model=self.may_write_late)
        self._reset()

    def _reset(self) -> None:
        self._launched = None
        self.gradients.reset()
