"""This member's part of the current iteration: its model, its local gradients, how far it is.

Here is what is done with the tensors when something happens (progress.py), and how a member goes on
after a fault: it claims what it has, takes or undoes the step for which it is ready, and takes what
the settlement assigns.
"""

import math
from time import monotonic as clock
from typing import Generic, Protocol, TypeVar

from ....events.spec.job import Train
from ....events.spec.model import Axes
from ...ipc.progress_page import COLLECTIVE_CODE, OWN_CODE
from ..communicators.communicators import Communicators
from ..model.engine import Engine
from ..model.losses import Losses
from ..model.step_barrier import StepBarrier
from ..process.history import History
from ..process.orders import Orders
from ..recovery.settlement import MemberAssignment, Settlement
from ..recovery.state_sources import Claim, HeldState
from .at_once import AtOnce
from .checkpoints import Checkpoints
from .checks import Checks
from .collective import Collectives
from .exact import Exact
from .notes import Notes
from .overlapped import Overlapped
from .progress import (
    Began,
    Happening,
    Interrupted,
    IterationState,
    ModelReplaced,
    Row,
    Settled,
    StateReplaced,
    StepBegan,
    StepTaken,
    SumDiscarded,
    Undone,
    advance,
)
from .sums import GradientSum, Sum

E = TypeVar("E", bound=Engine)


class OwnPart(Generic[E]):
    """The model is `engine`, the progress `state`. `history` receives the loss and the time of each
    step. The time begins with the iteration's first micro-batch and includes a recovery, so a rate
    computed from it is never too high.

    `collectives`, `sum` and `checks` are those of the model, and are replaced with it.
    """

    def __init__(
        self,
        engine: E,
        state: IterationState,
        control: Orders,
        communicators: Communicators,
        notes: Notes,
        history: History,
        checkpoints: Checkpoints,
    ) -> None:
        self.state, self.notes, self.history, self.losses = state, notes, history, Losses()
        self.checkpoints = checkpoints
        self.reduced: Sum | None = None
        """The last sum of all members; its gradients count in the phases `reduced` and `ready`."""
        self._control, self._communicators = control, communicators
        self._began_s: float | None = None
        self._use(engine)
        self.happened(ModelReplaced(is_lost=True))

    def happened(self, happening: Happening) -> Row:
        """Advance the progress. Zeroes the local gradients if they no longer count. Raises
        IllegalStep; and what the engine raises for want of memory: it then has no gradients."""
        row = advance(self.state, happening)
        if row.clears:
            self.losses.clear()
            if not self.collectives.is_stuck:
                self._clear_gradients()
        return row

    def _clear_gradients(self) -> None:
        """The progress counts no micro-batch any more, and tensors of the state may have changed.
        So gradients that cannot be zeroed do not stay, and the next settlement (`has_sum`) clears
        again."""
        try:
            self.engine.clear()
        except BaseException:
            self.engine.release_gradients()
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether an abandoned pass still waits in a detached thread and holds the model."""
        return self.collectives.is_stuck

    @property
    def kept(self) -> tuple[int, ...]:
        """The micro-batches whose sum this member has, or will have if a reduction is undone."""
        if self.state.phase == "ready" and not self.engine.train.kept_sum:
            return ()
        return tuple(sorted(self.state.done))

    # --- the model ---
    def set_model(self, engine: E) -> None:
        """Train `engine` from now on, with no local gradients. Frees the previous model."""
        before = self.engine
        self._use(engine)
        before.release()
        self.happened(ModelReplaced(is_lost=True))
        self._began_s = None

    def replace_model(self, engine: E) -> None:
        """As `set_model`, for a model with the same state. It gets the local gradients if it is the
        same part of the model and no abandoned pass holds the previous one."""
        before = self.engine
        if (
            self.is_stuck
            or not before.has_gradients
            or held_by(before).part_of_model != held_by(engine).part_of_model
        ):
            self.set_model(engine)
            return
        self._use(engine)
        engine.take_gradients(before)
        self.happened(ModelReplaced(is_lost=False))
        before.release()

    def free_gradients(self) -> None:
        """Free the local gradients and their backup, of which the settlement keeps none. `take`
        allocates them again. If an abandoned pass may still use them, they stay."""
        if not self.is_stuck:
            advance(self.state, SumDiscarded())
            self.losses.clear()
            self.sum.done()
            self.sum.free()
            self.engine.release_gradients()

    def _use(self, engine: E) -> None:
        notes = self.notes
        self.engine = engine
        self.checks = Checks(engine)
        self.collectives = Collectives(self._control, self._communicators, notes.marks)
        notes.marks.passes = COLLECTIVE_CODE if engine.replica_size > 1 else OWN_CODE
        kind = Overlapped if engine.train.overlap else AtOnce
        way = kind(engine, self.collectives, notes, notes.marks)
        integers = engine.exact_gradients
        self.sum: GradientSum = (
            way if integers is None else Exact(way, integers, engine, self.collectives, notes)
        )
        engine.watch(notes)
        notes.trace.watch(engine, notes)

    # --- an iteration ---
    def begin(self, generation: int) -> None:
        """The iteration begins, or goes on, in this generation."""
        self._began_s = clock() if self._began_s is None else self._began_s
        self.happened(Began(generation))

    def lose_passes(self) -> None:
        """The passes have failed: their local gradients are lost."""
        self.sum.give_up()
        self.happened(Interrupted(is_lost=True))

    def discard_passes(self) -> None:
        """The passes do not count: so do none of the local gradients."""
        self.happened(SumDiscarded())

    def begin_again(self, happening: Happening) -> None:
        """All members begin the iteration again."""
        self.sum.done()
        self.happened(happening)

    def step(self, barrier: StepBarrier | None = None, scale: float | None = None) -> None:
        """Compute the next state from the reduced gradients; waits for no other member. `barrier`
        and `scale`: from the step barrier, if it was passed."""
        assert self.reduced is not None, "a step without a sum"
        stats, side_sums = self.reduced.stats, self.reduced.side_sums
        skips = self.engine.train.skip_not_finite and not math.isfinite(stats.loss_sum)
        self.checkpoints.before_change()
        self.happened(StepBegan())
        self.sum.done()
        norm = self.engine.step(
            stats.num_tokens,
            side_sums,
            self.notes,
            norm_square=None if barrier is None else barrier.norm_square,
            found_inf=barrier is not None and barrier.num_not_finite > 0,
            scale=scale,
            skips=skips,
        )
        if barrier is not None:
            self.sum.stepped(barrier)
        loss = stats.loss_sum / self.engine.divisor(stats.num_tokens)
        self.history.add(self.state.step_version, loss, clock() - (self._began_s or clock()))
        if norm is not None:
            self.history.spoilt_by = _spoilt_by(loss, norm)
        self.happened(StepTaken(tuple(barrier or ())))
        self._began_s = None

    # --- after a fault ---
    def claim(self) -> Claim:
        """What this member brings into a new generation."""
        state = self.state
        return Claim(
            step_version=state.step_version,
            kept=self.kept,
            owned=state.owned,
            assigned_in=state.assigned_in,
            begun=state.is_begun,
            trained_in=state.trained_in,
            ready=state.phase == "ready",
            barrier=state.barrier,
            held=held_by(self.engine),
            stale=not self.engine.is_gathered,
            reduced=self._reduced_part(),
            redone=state.redone,
        )

    def _reduced_part(self) -> tuple[float, ...]:
        """What this member's part of the model adds to the step barrier, whichever of its holders
        survive; empty without the reduced sum of a whole part."""
        engine = self.engine
        if self.state.phase != "ready" or engine.is_sharded or engine.exact is not None:
            return ()
        return StepBarrier(*engine.step_barrier(dp=0).tolist())

    def finish_step(self, settlement: Settlement, share: MemberAssignment) -> None:
        """If the settlement says so, take the step for which this member is ready."""
        if share.steps:
            self.step(StepBarrier(*settlement.barrier))
            self.notes.marks.pulse.finish()
        else:
            self.undo()
        self.sum.free()  # a recovery needs memory of its own

    def undo(self) -> None:
        """If this member is ready for a step that it will not take, undo the reduction."""
        if self.state.phase == "ready":
            self.happened(Undone(is_lost=not self.sum.undo()))

    def reset_to(self, step_version: int) -> None:
        """The member's state was replaced by a state of `step_version` steps, without gradients."""
        self.undo()
        self.happened(StateReplaced(step_version))
        self._began_s = None
        self.checks.forget(state=True)

    def take(
        self,
        step_version: int,
        share: MemberAssignment,
        generation: int,
        *,
        begun: bool,
        redone: int = 0,
    ) -> None:
        """Resume from a settlement, with the local gradients that it keeps."""
        row = self.happened(
            Settled(
                step_version=step_version,
                kept=share.kept,
                todo=share.todo,
                generation=generation,
                is_begun=begun,
                redone=redone,
                has_sum=self.engine.has_gradients,
            )
        )
        if row.clears:
            self._began_s = None
        self.checks.forget()


class _Placed(Protocol):
    """What has a part of a model: an Engine, and what it is made of."""

    @property
    def train(self) -> Train: ...

    @property
    def axes(self) -> Axes: ...

    @property
    def place(self) -> int: ...


def held_by(placed: _Placed) -> HeldState:
    """The part of the model whose state it has."""
    return HeldState(
        axes=placed.axes, optimizer=placed.train.parallel.optimizer, place=placed.place
    )


def _spoilt_by(loss: float, norm: float) -> str:
    """The loss of a step that has made the state NaN or infinite, in words; "" if it has not."""
    if math.isfinite(loss) and math.isfinite(norm):
        return ""
    return repr(loss) if not math.isfinite(loss) else f"{loss:.4g}, with a gradient of {norm!r}"
