"""The sum at once: the gradients of all members are added up after the passes."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..communicators.operations import Operations
from ..model.engine import Engine
from ..model.losses import Losses
from ..process.trace import Marks, Note
from . import stats
from .collective import Collectives
from .results import Result
from .stats import Stats
from .sums import BackedSum, ReductionWatch, Sum, keep_all, wait_until_computed


class AtOnce(BackedSum):
    """A GradientSum: the stats, then all buckets."""

    def __init__(self, engine: Engine, collectives: Collectives, note: Note, marks: Marks) -> None:
        super().__init__(engine, collectives, note)
        self._marks = marks

    def begin(self, operations: Operations, mine: Stats, losses: Losses) -> None:
        return

    @contextmanager
    def backward(self, *, is_last: bool) -> Generator[None]:
        yield

    def give_up(self) -> None:
        return

    def run(self, mine: Stats, losses: Losses) -> Result[Sum]:
        self.note("reduce")
        if self.gradients.has_backup:
            keep_all(self.gradients)
        watch = ReductionWatch(self.note, self.collectives.activity_check())
        own = stats.own_values(self.engine, mine, losses, stops=self.collectives.stops())
        result = self.collectives.run(
            partial(self._reduce, mine, own, self.collectives.operations, watch),
            holds_model=self.may_write_late,
        )
        self.num_complete = watch.num_complete
        return result

    def _reduce(
        self, mine: Stats, own: Tensor, operations: Operations, watch: ReductionWatch
    ) -> Sum:
        """Exchange the stats, then reduce. After an abandoned wait this could still change
        gradients that count: so it checks before each phase that its generation is active."""
        wait_until_computed(self.engine.device)
        self.note("stats")
        watch.check()
        operations.all_reduce(own)
        told = stats.read(own.tolist())
        self._marks.stats_received()
        watch.check()
        if not self.gradients.has_backup:
            keep_all(self.gradients)  # the local gradients are lost from here on, not before
        self.gradients.reduce(operations, watch)
        watch.check()
        side_sums = self.engine.side_sums(operations)
        if self.engine.device.type == "cuda":
            self._marks.wait_begins()  # on CUDA, a wait blocks the stream, not the host
            torch.cuda.synchronize()
        watch.check()
        self.note("reduced")
        return Sum(told, mine, side_sums)
