"""The exact sum: the integers of all members are added up, at once or overlapped.

Their sum is the same bits for any assignment of micro-batches (model/exact_sum.py). What the step
barrier adds up is exact as well.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ....events.spec.model import Axes
from ..communicators.operations import Operations
from ..model.engine import Engine, ExactGradients
from ..model.losses import Losses
from ..model.step_barrier import LIMBS_NUM, ExactBarrier, StepBarrier, norm_square_of
from ..process.trace import Note
from .collective import Collectives
from .results import Result
from .stats import Stats
from .sums import EnterBarrier, GradientSum, OwnChecks, PassedBarrier, Sum


class Exact:
    """A GradientSum of the integers of `engine`, which are added up as by `way`."""

    def __init__(
        self,
        way: GradientSum,
        integers: ExactGradients,
        engine: Engine,
        collectives: Collectives,
        note: Note,
    ) -> None:
        self._way, self._integers = way, integers
        self._engine, self._collectives, self._note = engine, collectives, note

    # --- as the sum in fp32 ---
    @property
    def num_complete(self) -> int:
        return self._way.num_complete

    def begin(self, operations: Operations, mine: Stats, losses: Losses) -> None:
        self._way.begin(operations, mine, losses)

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._way.backward(is_last=is_last)

    def give_up(self) -> None:
        self._way.give_up()

    def run(self, mine: Stats, losses: Losses) -> Result[Sum]:
        return self._way.run(mine, losses)

    def undo(self) -> bool:
        return self._way.undo()

    def done(self) -> None:
        self._way.done()

    def free(self) -> None:
        self._way.free()

    # --- the step barrier, in integers ---
    def needs_barrier(self, axes: Axes) -> bool:
        """Always: one member whose sum is out of range makes all begin again."""
        return True

    def barrier(self, checks: OwnChecks | None) -> EnterBarrier:
        scale, mine = self._engine.loss_scale, self._integers.barrier()
        if checks is not None:
            has_sum = (
                self._engine.train.kept_sum and not mine.num_overflows and not mine.num_not_finite
            )
            mine = mine._replace(checks=checks(has_sum))
        return lambda: self._enter(mine, scale)

    def barrier_of_standby(self, checks: tuple[int, ...]) -> Result[PassedBarrier]:
        return self._enter(ExactBarrier(0, 0, checks=checks), None)

    def stepped(self, barrier: StepBarrier) -> None:
        if not barrier.num_not_finite:
            self._integers.stepped()

    def _enter(self, mine: ExactBarrier, scale: Tensor | None) -> Result[PassedBarrier]:
        operations = self._collectives.operations

        def exchange() -> PassedBarrier:
            values = torch.tensor(
                [*mine[:2], *mine.limbs, *mine.checks], device=self._engine.device
            )
            operations.all_reduce(values)
            self._note("passed")
            overflows, not_finite, *rest = values.tolist()
            barrier = StepBarrier(norm_square_of(rest[:LIMBS_NUM]), not_finite, overflows)
            return PassedBarrier(
                barrier, 1.0 if scale is None else scale.item(), tuple(rest[LIMBS_NUM:])
            )

        self._note("gate")
        return self._collectives.run(exchange)
