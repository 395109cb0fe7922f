"""One iteration: micro-batches into local gradients, their sum over all members, one step.

Every phase can be interrupted and repeated. Until the reduction, the local gradients only grow, by
whole micro-batches; a failed reduction leaves them unchanged. The step starts only when the whole
reduction is known to be good: a member with only a part knows it after the step barrier. README.md
has the phases.
"""

from typing import Generic

import structlog

from ....events.spec.parallelism import coordinates
from ...ipc.progress_page import ProgressWriter
from ..communicators.communicators import Communicators
from ..model.step_barrier import StepBarrier
from ..model.workload import Samples
from ..process.history import History
from ..process.orders import Orders
from ..process.trace import Marks, Trace
from ..recovery.settlement import assign_micro_batches
from .beside import Beside, stepped
from .checkpoints import Checkpoints, NoCheckpoints
from .corruption import CorruptionSearch
from .gathering import end_gather, expect_gather, gather
from .not_finite import raise_if_rejected, refuse_exactly, spoils_state, warn_of_losses
from .notes import Notes
from .own_part import E, OwnPart
from .passes import PassRunner
from .progress import (
    Assigned,
    BarrierEntered,
    Interrupted,
    IterationState,
    Overflowed,
    Reduced,
    ReductionBegan,
)
from .repeatability import RepeatabilityTest
from .results import Again, Done, Ended, Failed, Outcome, Stepped, Wrong
from .stats import Stats
from .sums import PassedBarrier, Sum

log = structlog.get_logger()


class Iteration(Generic[E]):
    """Runs the current iteration of this member to its end, again and again. `part` is the member's
    part of it: what a recovery changes."""

    def __init__(
        self,
        engine: E,
        control: Orders,
        communicators: Communicators,
        text: Samples,
        trace: Trace,
        pulse: ProgressWriter,
        history: History,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        state = IterationState()
        self.notes = Notes(trace, Marks(pulse, overlap=engine.train.overlap), state)
        self.part = OwnPart(
            *(engine, state, control, communicators, self.notes, history),
            checkpoints or NoCheckpoints(),
        )
        self.passes = PassRunner(self.part, text)
        self.corruption = CorruptionSearch(self.passes, communicators)
        self.beside = Beside(self.passes, self.corruption, communicators)
        """What the members do together between two iterations."""
        self._repeatability = RepeatabilityTest(self.passes)
        self._communicators = communicators

    @property
    def engine(self) -> E:
        return self.part.engine

    @property
    def step_version(self) -> int:
        """The iterations in the state; NO_STATE until the first settlement."""
        return self.part.state.step_version

    @property
    def history(self) -> History:
        return self.part.history

    # --- from its beginning to its end ---
    def run(self) -> Outcome:
        """Run this iteration to its end with the members of the current generation. Raises
        UsageError if the engine rejects a loss or a gradient of this member."""
        try:
            outcome = self._run()
        except RuntimeError as error:
            raise_if_rejected(self.part, str(error))
            raise
        if isinstance(outcome, Failed):
            raise_if_rejected(self.part, outcome.why)
        return outcome

    def _run(self) -> Outcome:
        is_first = self._begin()
        is_checked = self.corruption.is_due(self.step_version)
        if is_checked:
            self.part.checks.begin(self.step_version)
        while True:
            todo = self.part.state.todo
            ended = self._pass_all(todo, is_first=is_first, is_checked=is_checked)
            if ended is not None:
                return ended
            is_first = is_first and not todo
            outcome = self._reduce_and_step(is_checked=is_checked)
            if not isinstance(outcome, Again):
                return outcome

    def _begin(self) -> bool:
        """Begin the iteration, or go on with it. Returns whether it is the first in which this
        member trains in this generation."""
        part, generation = self.part, self._communicators.generation
        is_first = part.state.trained_in != generation
        self.notes.marks.pulse.begin(
            generation,
            self.step_version,
            "first"
            if is_first
            else "boundary"
            if part.checkpoints.is_read_after(self.step_version)
            else "usual",
        )
        part.begin(generation)
        part.engine.begin_iteration()
        return is_first

    def _pass_all(self, todo: list[int], *, is_first: bool, is_checked: bool) -> Ended | None:
        """Run all passes that this member must still run. None when they are done."""
        part, engine, exact = self.part, self.engine, self.engine.exact
        if exact is not None:
            exact.is_checked = is_checked
            exact.begin(engine.loss_scale, part.state.redone)
        ended = expect_gather(part, will_pass=bool(todo))
        if ended is None and is_checked and not part.state.done:
            ended = self.corruption.probe()
        if ended is None and is_first and todo and exact is not None:
            ended = self._repeatability.run(exact, todo[0])
        if ended is None:
            ended = self.passes.run(todo)
            if ended is not None and not engine.is_gathered:
                end_gather(part)
        return ended

    def _reduce_and_step(self, *, is_checked: bool) -> Outcome | Again:
        """Reduce, pass the step barrier, step. Again: no member steps."""
        part = self.part
        reduced = self._reduce()
        if not isinstance(reduced, Sum):
            return reduced
        passed: PassedBarrier | None = None
        if part.sum.needs_barrier(self.engine.axes):
            entered = self._pass_barrier(is_checked=is_checked)
            if not isinstance(entered, PassedBarrier):
                return entered
            passed = entered
        if spoils_state(part, reduced.stats):
            part.checkpoints.keep_last(reduced.stats)
        if passed is None:
            part.step()
        else:
            part.step(passed.barrier, passed.scale)
        self._assign_next()
        return self._end(reduced)

    def _reduce(self) -> Sum | Ended:
        """Add up the gradients of all members."""
        part = self.part
        part.happened(ReductionBegan())
        result = part.sum.run(self.passes.own_stats(), part.losses)
        if not isinstance(result, Done):
            is_kept = part.sum.undo()
            raise_if_rejected(part, result.why)
            part.happened(Interrupted(is_lost=not is_kept))
            return result
        part.happened(Reduced())
        part.reduced = result.value
        warn_of_losses(part, result.value.stats)
        return result.value

    def _pass_barrier(self, *, is_checked: bool) -> PassedBarrier | Ended | Again:
        """Enter the step barrier, and pass it once all members have entered it."""
        part = self.part
        enter = part.sum.barrier(self.corruption.own_values if is_checked else None)
        part.happened(BarrierEntered())
        result = enter()
        if not isinstance(result, Done):
            part.happened(Interrupted())
            return result
        passed = result.value
        judged = self.corruption.judge_barrier(passed)
        if isinstance(judged, Wrong):
            part.undo()
            if judged.in_own_replica:
                part.discard_passes()
            return judged.failed
        if isinstance(judged, Again):
            if isinstance(judged.because, Overflowed):
                self._warn_of_overflow(passed.barrier)
            part.begin_again(judged.because)
            return judged
        if passed.barrier.num_not_finite:
            refuse_exactly(self.engine, self.step_version)
        return passed

    def _assign_next(self) -> None:
        """Assign the micro-batches of the next iteration."""
        communicators = self._communicators
        axes = communicators.axes
        dp = coordinates(axes, communicators.place).dp
        owned = assign_micro_batches(self.engine.train.num_micro_batches, axes.dp, dp)
        self.part.happened(Assigned(owned, communicators.generation))

    def _end(self, reduced: Sum) -> Stepped | Ended:
        """End the iteration, which counts. The gather may wait for the next one."""
        if not self.engine.is_gathered and not self._may_gather_later(reduced.stats):
            ended = gather(self.part)
            if ended is not None:
                return ended
        self.notes.marks.pulse.finish()
        return stepped(reduced.stats, reduced.own)

    def _may_gather_later(self, told: Stats) -> bool:
        """Whether the gather may wait for the next forward."""
        return (
            self.engine.gathers_in_forward
            and not told.num_stopping
            and not self.part.checkpoints.is_read_after(self.step_version)
        )

    def _warn_of_overflow(self, barrier: StepBarrier) -> None:
        """The exact sum of some micro-batch was out of range, on any member: all run the iteration
        again from its start, with larger exponents."""
        log.warning(
            "a gradient is far above that of the last iteration, which is done again",
            iteration=self.step_version,
            num_parameters=int(barrier.num_overflows),
            times=self.part.state.redone + 1,
        )
