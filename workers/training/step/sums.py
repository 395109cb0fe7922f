"""The sum of the local gradients of all members: what an iteration asks of it.

The result counts only if the whole sum is known to be good, and no member had begun to abort it.
There are three ways: at once after the passes (at_once.py), overlapped with the last backward
(overlapped.py), and either of them in integers (exact.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ....events.spec.model import Axes
from ....events.spec.parallelism import is_fully_replicated
from ..communicators.operations import Operations
from ..model.engine import Engine, Gradients, SideSums
from ..model.losses import Losses
from ..model.step_barrier import StepBarrier
from ..process.trace import Note
from .collective import Collectives
from .results import Result
from .stats import Stats, on_device


class Sum(NamedTuple):
    """The sum of all members: it is in the engine's gradients. Beside it what all have told, what
    this one has told, and what their micro-batches have added up beside gradients."""

    stats: Stats
    own: Stats
    side_sums: SideSums


class PassedBarrier(NamedTuple):
    """All members have entered the step barrier, with their parts reduced. `barrier` has what they
    added, `scale` is the loss scale, and `checks` is what they compare (checks.py)."""

    barrier: StepBarrier
    scale: float = 1.0
    checks: tuple[int, ...] = ()


EnterBarrier = Callable[[], Result[PassedBarrier]]
OwnChecks = Callable[[bool], tuple[int, ...]]
"""What a member adds to `checks`; True: its local sum is as it was before the reduction."""


class GradientSum(Protocol):
    """The sum of one model's gradients. Only the training thread calls it. The local gradients are
    the engine's (Engine.gradients): from `run`, or `begin`, until `undo` or `done` they belong to
    the sum, and nobody else touches them."""

    @property
    def num_complete(self) -> int:
        """The buckets that the last reduction completed; 0 once its result counts."""
        ...

    def needs_barrier(self, axes: Axes) -> bool:
        """Whether members of this layout pass the step barrier before they step."""
        ...

    def begin(self, operations: Operations, mine: Stats, losses: Losses) -> None:
        """The last backward follows: it may take part of the reduction along. `losses` are those of
        all micro-batches of this member. `operations` are those of the passes: an abandoned pass
        may come here in another generation."""

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of every backward outside a pipeline."""
        ...

    def give_up(self) -> None:
        """The passes have failed, or do not count: the local gradients are lost. End the reduction
        if it has begun."""

    def run(self, mine: Stats, losses: Losses) -> Result[Sum]:
        """Reduce. After a failure the caller must `undo`."""
        ...

    def undo(self) -> bool:
        """The reduction failed, or its result does not count: restore the local gradients. False:
        they are lost (`train.kept_sum`)."""
        ...

    def done(self) -> None:
        """The result counts, or the local gradients no longer do: free their backup."""

    def free(self) -> None:
        """Between two generations: free the memory that only a reduction needs."""

    def barrier(self, checks: OwnChecks | None) -> EnterBarrier:
        """After `run`: compute what this member adds to the step barrier. The returned call enters
        it, and returns after all members have. All that pass it know the same values, and so
        decide the same: to step, whatever happens to the others, or not to."""
        ...

    def barrier_of_standby(self, checks: tuple[int, ...]) -> Result[PassedBarrier]:
        """As `barrier`, for a member that has no gradients."""
        ...

    def stepped(self, barrier: StepBarrier) -> None:
        """The iteration counts, with this sum. The optimizer may have skipped its step."""


class ReductionWatch:
    """Notes each bucket, counts the complete ones, and ends a reduction (RuntimeError) whose
    generation is being left."""

    def __init__(self, note: Note, check: Callable[[], None]) -> None:
        self.check = check
        self._note = note
        self._complete: list[bool] = []

    @property
    def num_complete(self) -> int:
        return sum(self._complete)

    def bucket_begins(self, bucket: int) -> None:
        self._note("bucket", bucket)
        self.check()
        self._complete.append(False)

    def bucket_ends(self, bucket: int) -> None:
        self._note("bucket_done", bucket)
        self.check()
        self._complete[-1] = True

    def tied_begins(self) -> None:
        self._note("embedding")
        self.check()

    def mirror_begins(self) -> None:
        self._note("mirror")
        self.check()


class BackedSum:
    """What a sum does whose gradients have a backup, until it is reduced and after that. Its step
    barrier is in fp64."""

    def __init__(self, engine: Engine, collectives: Collectives, note: Note) -> None:
        self.num_complete = 0
        self.engine, self.gradients = engine, engine.gradients
        self.collectives, self.note = collectives, note

    def needs_barrier(self, axes: Axes) -> bool:
        return not is_fully_replicated(axes, self.engine.train.parallel)

    @property
    def may_write_late(self) -> bool:
        """Whether an operation that outlives its generation writes into the local gradients. With a
        backup, the backup has taken their place."""
        return not self.gradients.has_backup

    def undo(self) -> bool:
        return self.gradients.restore()

    def done(self) -> None:
        self.gradients.drop()
        self.num_complete = 0

    def free(self) -> None:
        self.gradients.free()

    def barrier(self, checks: OwnChecks | None) -> EnterBarrier:
        scale, mine = self.engine.loss_scale, self.engine.step_barrier()
        return lambda: self._enter(mine, scale)

    def barrier_of_standby(self, checks: tuple[int, ...]) -> Result[PassedBarrier]:
        return self._enter(on_device((0.0, 0.0), self.engine.device), None)

    def stepped(self, barrier: StepBarrier) -> None:
        return

    def _enter(self, mine: Tensor, scale: Tensor | None) -> Result[PassedBarrier]:
        operations = self.collectives.operations

        def exchange() -> PassedBarrier:
            operations.all_reduce(mine)
            self.note("passed")
            if scale is None:
                return PassedBarrier(StepBarrier(*mine.tolist()))
            *values, read = torch.cat((mine, scale.detach().reshape(1).double())).tolist()
            return PassedBarrier(StepBarrier(*values), read)

        self.note("gate")
        return self.collectives.run(exchange)


def keep_all(gradients: Gradients) -> None:
    for bucket in range(gradients.num_buckets):
        gradients.keep(bucket)


def wait_until_computed(device: torch.device) -> None:
    """Wait until the device has computed all that was launched on it."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
