"""The passes of this member's micro-batches, with the other members of its replica."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic

from ..communicators.operations import Operations
from ..model.engine import Passes
from ..model.losses import Losses
from ..model.stop_agreement import StopAgreement
from ..model.workload import Samples
from .own_part import E, OwnPart
from .progress import Interrupted, UnitPassed
from .results import Done, Ended, Result, Stopped
from .stats import Stats
from .sums import GradientSum


class PassRunner(Generic[E]):
    """Runs micro-batches of `text` into the local gradients of `part`."""

    def __init__(self, part: OwnPart[E], text: Samples) -> None:
        self.part, self.text = part, text

    def run(self, todo: Sequence[int], *, is_probe: bool = False) -> Ended | None:
        """Run the passes. None when all are done. A unit is one micro-batch, and the members agree
        to continue (StopAgreement). In a pipeline a unit is all micro-batches: its first stage
        decides where they stop. `is_probe`: no reduction follows."""
        part, engine, collectives = self.part, self.part.engine, self.part.collectives
        items, is_alone = tuple(todo), engine.replica_size == 1
        units = [items] if engine.axes.pp > 1 and items else [(item,) for item in items]
        operations = collectives.operations
        sum_ = part.sum
        agreement = None if is_alone else StopAgreement(operations, "mp", engine.device)
        for unit in units:
            if is_alone and collectives.must_stop():
                part.happened(Interrupted())
                return Stopped()
            run = partial(
                self.unit,
                unit,
                sum_,
                operations,
                agreement,
                is_last=unit == units[-1],
                is_probe=is_probe,
            )
            # A forward that gathers parameters waits for members of other replicas.
            result: Result[Passes] = (
                Done(run())
                if is_alone and engine.is_gathered
                else collectives.run(
                    run, frozenset() if is_alone else collectives.replica, holds_model=True
                )
            )
            part.notes.micro_batch = -1
            if not isinstance(result, Done):
                part.lose_passes()
                return result
            passes = result.value
            if passes.num_done:
                engine.set_gathered(is_gathered=True)
            part.losses.extend(passes.losses)
            part.happened(UnitPassed(unit[: passes.num_done]))
            if passes.num_done < len(unit):
                part.happened(Interrupted())
                return Stopped()
        return None

    def unit(
        self,
        unit: tuple[int, ...],
        sum_: GradientSum,
        operations: Operations,
        agreement: StopAgreement | None,
        *,
        is_last: bool,
        is_probe: bool,
    ) -> Passes:
        """Run a unit, or less of it if any member has an order to stop: then all of them return the
        same number of micro-batches. Raises RuntimeError. It may be abandoned: `sum_` and
        `operations` are of its own model and generation."""
        part, engine, collectives = self.part, self.part.engine, self.part.collectives
        if agreement is not None and engine.axes.pp == 1 and agreement.answer():
            return Passes(0, Losses())

        def begin(losses: Losses) -> None:
            if is_last:
                sum_.begin(operations, self.own_stats(), part.losses.with_losses(losses))
            elif agreement is not None:
                agreement.ask(must_stop=collectives.must_stop())

        return engine.run(
            operations,
            part.state.step_version,
            unit,
            self.sample,
            part.notes.note_pass,
            must_stop=collectives.must_stop,
            begin=None if is_last and is_probe else begin,
            backward=partial(sum_.backward, is_last=is_last and not is_probe),
        )

    def sample(self, item: int) -> Any:
        """A micro-batch of the current iteration."""
        train = self.part.engine.train
        return self.text.sample(
            train.seed,
            self.part.state.step_version,
            item,
            rows=train.batch.micro,
            sequence=train.model.sequence,
        )

    def own_stats(self) -> Stats:
        """What this member tells all others with the reduction, beside its losses."""
        checkpoints = self.part.checkpoints
        is_saving = checkpoints.is_saving()
        num_sending, num_unstored = checkpoints.copy_status()
        return Stats(
            num_saving=float(is_saving), num_sending=num_sending, num_unstored=num_unstored
        )
