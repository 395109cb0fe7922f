"""One iteration: micro-batches into local gradients, their reduction over all members, one step.

Every phase can be interrupted and repeated. Until the reduction, the local gradients only grow, by
whole micro-batches; a failed reduction leaves them unchanged. The step starts only when the whole
reduction is known to be good: a member with only a part knows it after the step barrier.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic as clock

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from ....events.errors import UsageError
from ....events.spec.parallelism import coordinates, is_fully_replicated
from ....events.words import listed
from ...ipc.progress_page import COLLECTIVE_CODE, OWN_CODE, ProgressWriter
from ..communicators.communicators import Communicators
from ..dependencies.private_megatron import set_gathered, take_gather_works
from ..model.exact_sum import ExactSum
from ..model.trainee import TrainingModel
from ..model.workload import Samples
from ..process.control_thread import Control
from ..process.history import History
from ..process.trace import Event, Marks, Trace
from ..recovery.settlement import MemberAssignment, Settlement, assign_micro_batches
from ..recovery.state_sources import NO_STATE, Claim, HeldState
from . import forward_backward
from .corruption import Checks, CorruptionError, no_values
from .exact_reduction import ExactBarrier
from .gradient_reduction import Outcome, Reduction, Stats, StepBarrier, on_device
from .losses import Losses
from .optimizer_step import gather, scale_of, step, step_barrier
from .overlapped_reduction import end_all
from .pipeline import Passes, StopAgreement

log = structlog.get_logger()
_REJECTED = re.compile(r"Unexpected result (\S+) \(message='(.*?)'\)")
"""What Megatron raises for a loss or a gradient that is not finite, if it is asked to check."""


class Iteration:
    """The current iteration of this member, and its progress in it. `step_version` is NO_STATE
    until the first settlement. `history` receives the loss and the time of each step. The time
    begins with the iteration's first micro-batch and includes a recovery, so a rate computed from
    it is never too high. `keep_last` is called on all members, before a step that the loss says
    will make a finite state NaN or infinite."""

    def __init__(
        self,
        trainee: TrainingModel,
        control: Control,
        communicators: Communicators,
        text: Samples,
        trace: Trace,
        pulse: ProgressWriter,
        history: History,
        *,
        keep_last: Callable[[Stats], None] = lambda stats: None,
    ) -> None:
        self._control, self._communicators = control, communicators
        self._keep_last = keep_last
        self.text = text
        self.history = history
        self.trace = trace
        self.step_version = NO_STATE
        self.done: list[int] = []
        self.owned: tuple[int, ...] = ()
        self.assigned_in = 0
        self.begun = False
        self.trained_in = 0
        self.losses = Losses()
        self.forward_calls = 0
        self.copy_status: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        """This member's `num_sending` and `num_unstored` (Stats)."""
        self.may_copy = self.is_copied = False
        """Whether all members can take an in-memory checkpoint now, and have stored the last."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before the state changes: a snapshot may read it."""
        self.is_read_after: Callable[[int], bool] = lambda at: False
        """Whether the state is read after this many iterations, for a checkpoint or at the end: a
        gather must then not wait for the next forward. The same on all members."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether this member still writes its share of a checkpoint."""
        self.num_saving = 0
        """The members that did so at the end of the last iteration."""
        self.is_ready = False
        """Whether it has entered the step barrier, but not stepped: it has the reduced sum."""
        self._is_tested = False
        """Whether this process has compared two runs of a micro-batch (`_test`)."""
        self.redone = 0
        """How often the members have begun this iteration anew after an overflow of exact sums."""
        self.is_stuck = False
        """Whether an abandoned pass still waits in a detached thread and holds the model."""
        self._was_saving = False
        self._reduced = Stats(0.0, 0.0)
        self._gate: StepBarrier | None = None
        """The values of the step barrier at the last step in the current generation."""
        self.marks = Marks(pulse, overlap=trainee.train.overlap)
        self._began_s: float | None = None
        self._item = -1
        self.trainee = trainee
        self.set_model(trainee)

    def set_model(self, trainee: TrainingModel) -> None:
        """Train `trainee` from now on, with no local gradients. Frees the previous model."""
        before = self.trainee
        self._use_model(trainee)
        if before is not trainee:
            before.release()
        self._clear()

    def replace_model(self, trainee: TrainingModel) -> None:
        """As `set_model`, for a model with the same state. It gets the local gradients if it is the
        same part of the model and no abandoned pass holds the previous one."""
        before = self.trainee
        if (
            self.is_stuck
            or not before.has_gradients
            or held_by(before).part_of_model != held_by(trainee).part_of_model
        ):
            self.set_model(trainee)
            return
        sums = before.experts.sums()
        self._use_model(trainee)
        trainee.clear()
        trainee.experts.take(sums)
        if trainee.exact is not None and before.exact is not None:
            trainee.exact.take_over(before.exact)
        for (_, old), (_, new) in zip(
            before.named_parameters(), trainee.named_parameters(), strict=True
        ):
            new.main_grad.copy_(old.main_grad)
        before.release()

    def free_gradients(self) -> None:
        """Free the local gradients and their backup, of which the settlement keeps none. `take`
        allocates them again. If an abandoned pass may still use them, they stay."""
        if not self.is_stuck:
            self._forget_sums()
            self.reduction.done()
            self.reduction.free()
            self.trainee.release_gradients()

    def _use_model(self, trainee: TrainingModel) -> None:
        self.trainee = trainee
        self._checks = Checks(trainee)
        self.is_stuck = self.is_ready = False
        self.marks.passes = COLLECTIVE_CODE if trainee.replica_size > 1 else OWN_CODE
        self.reduction = Reduction(
            trainee, self._control, self._communicators, self._note, self.marks
        )
        self.trace.watch(trainee, self._note)

    @property
    def kept(self) -> tuple[int, ...]:
        """The micro-batches whose sum this member has, or will have if a reduction is undone."""
        if self.is_ready and not self.trainee.train.kept_sum:
            return ()
        return tuple(sorted(self.done))

    @property
    def num_others_saving(self) -> int:
        """The other members that still wrote at the end of the last iteration."""
        return self.num_saving - self._was_saving

    def claim(self) -> Claim:
        return Claim(
            step_version=self.step_version,
            kept=self.kept,
            owned=self.owned,
            assigned_in=self.assigned_in,
            begun=self.begun,
            trained_in=self.trained_in,
            ready=self.is_ready,
            gate=tuple(self._gate or ()),
            held=held_by(self.trainee),
            stale=not self.trainee.is_gathered,
            reduced=self._reduced_part(),
            redone=self.redone,
        )

    def _reduced_part(self) -> tuple[float, ...]:
        """What this member's part of the model adds to the step barrier, whichever of its holders
        survive; empty without the reduced sum of a whole part."""
        if not self.is_ready or self.trainee.is_sharded or self.trainee.exact is not None:
            return ()
        return StepBarrier(*step_barrier(self.trainee, dp=0).tolist())

    def reset_to(self, step_version: int) -> None:
        """The member's state was replaced by a state of `step_version` steps, without gradients."""
        self._undo()
        self._clear()
        self.step_version = step_version
        self.owned, self.begun, self._gate, self.redone = (), False, None, 0
        self._checks.forget(state=True)

    def finish_step(self, settlement: Settlement, share: MemberAssignment) -> None:
        """If the settlement says so, take the step for which this member is ready."""
        if share.steps:
            self._step(StepBarrier(*settlement.gate))
            self.marks.pulse.finish()
        else:
            self._undo()
        self.reduction.free()  # a recovery needs memory of its own

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
        if (
            step_version != self.step_version
            or sorted(self.done) != list(share.kept)
            or not self.trainee.has_gradients
        ):
            assert not share.kept
            self._clear()
        self.step_version, self.redone = step_version, redone
        self._checks.forget()
        self.owned = tuple(sorted((*share.kept, *share.todo)))
        self.assigned_in = generation
        # A member that is assigned a part of a begun iteration has begun it too.
        self.begun = begun

    def run(self) -> Outcome:
        """Run this iteration to its end with the members of the current generation. Raises
        UsageError if Megatron rejects a loss or a gradient of this member."""
        try:
            outcome = self._run()
        except RuntimeError as error:
            self._raise_if_rejected(str(error))
            raise
        if outcome == "failed":
            self._raise_if_rejected(self.reduction.why)
        return outcome

    def _run(self) -> Outcome:
        generation = self._communicators.generation
        self.begun = True
        self._began_s = clock() if self._began_s is None else self._began_s
        self.marks.pulse.begin(
            generation,
            self.step_version,
            "first"
            if self.trained_in != generation
            else "boundary"
            if self.is_read_after(self.step_version)
            else "usual",
        )
        is_first = self.trained_in != generation
        if is_first:
            self.trained_in, self._gate = generation, None
        self.trainee.scale_auxiliary_losses()
        exact, is_checked = self.trainee.exact, self._is_checked(self.step_version)
        if is_checked:
            self._checks.begin(self.step_version)
        while True:
            todo = [item for item in self.owned if item not in self.done]
            if exact is not None:
                exact.is_checked = is_checked
                exact.begin(scale_of(self.trainee.optimizer), self.redone)
            outcome = self._expect_gather(will_pass=bool(todo))
            if outcome is None and is_checked and not self.done:
                outcome = self._probe()
            if outcome is None and is_first and todo and exact is not None:
                is_first, outcome = False, self._test(exact, todo[0])
            if outcome is None:
                outcome = self._pass(todo)
                if outcome is not None and not self.trainee.is_gathered:
                    self._end_gather()
            outcome = outcome or self._reduce_and_step()
            if outcome is not None:
                return outcome

    def run_as_standby(self, iteration: int) -> Outcome:
        """Run the iteration as a standby member: only the collectives of all members."""
        self.marks.pulse.begin(self._communicators.generation, iteration, "first")
        while True:
            stats = self.reduction.meet(self._stats())
            if isinstance(stats, str):
                return stats
            if self.trainee.exact is not None:
                found = self.reduction.exact_barrier(
                    ExactBarrier(
                        0,
                        0,
                        checks=no_values(self._communicators.axes)
                        if self._is_checked(iteration)
                        else (),
                    )
                )
                if not isinstance(found, str) and self.reduction.checks:
                    outcome = self._judge(has_probes=not found[0].num_overflows)
                    if outcome == "stepped":
                        continue
                    if outcome is not None:
                        return outcome
            elif not is_fully_replicated(self._communicators.axes, self.trainee.train.parallel):
                found = self.reduction.step_barrier(
                    on_device((0.0, 0.0), self.trainee.device)
                )  # as optimizer_step.step_barrier
            else:
                break
            if isinstance(found, str):
                return found
            if not found[0].num_overflows:
                break
        self.marks.pulse.finish()
        return self._boundary(stats)

    def meet(self, *, has_saved: bool = True) -> Outcome:
        """After the last iteration: wait until every member is done. Then `num_saving` counts the
        members that have not saved."""
        stats = self.reduction.meet(self._stats()._replace(num_saving=float(not has_saved)))
        if isinstance(stats, str):
            return stats
        self.num_saving = round(stats.num_saving)
        return "boundary" if stats.num_stopping else "stepped"

    def beside(self, call: Callable[[], None]) -> Outcome | None:
        """Run `call`, which needs all members, between two iterations. None if it succeeded."""
        outcome = self._expect_gather(will_pass=False)
        if outcome is not None:
            return outcome
        found = self.reduction.run_collectively(call)
        self.is_stuck = self.is_stuck or self.reduction.was_abandoned
        return found

    # --- silent data corruption (corruption.py) ---
    @property
    def digest_every(self) -> int:
        return 0 if self.trainee.exact is None else self.trainee.train.digest_every

    def _is_checked(self, step_version: int) -> bool:
        """Whether the members compare their states in this iteration, before its step."""
        return self.digest_every > 0 and step_version > 0 and step_version % self.digest_every == 0

    def check_end(self, *, is_standby: bool) -> Outcome | None:
        """After the last iteration: compare the states. None if all are well."""

        def exchange() -> None:
            values = torch.tensor(
                no_values(self._communicators.axes)
                if is_standby
                else self._checks.values(self.step_version, has_sum=False),
                device=self.trainee.device,
            )
            dist.all_reduce(values)
            self.reduction.checks = tuple(values.tolist())

        if not self.digest_every:
            return None
        return self.beside(exchange) or self._judge(has_probes=False)

    def _judge(self, *, has_probes: bool) -> Outcome | None:
        """Compare what all members have told. "failed": one of them is wrong, and if it is this
        one, CorruptionError is raised. "stepped": all must run the iteration again."""
        axes, own = self._communicators.axes, self._communicators.place
        wrong, repeats = self._checks.judge(self.reduction.checks, axes, has_probes=has_probes)
        if own in wrong:
            raise CorruptionError(
                f"silent data corruption in rank {self.trace.rank}, iteration "
                f"{self.step_version}: {wrong[own]}"
            )
        if wrong:
            self._undo()
            if coordinates(axes, own).dp in {coordinates(axes, place).dp for place in wrong}:
                self._clear_sums()
            self.reduction.why = "; ".join(
                f"silent data corruption at position {place}: {why}" for place, why in wrong.items()
            )
            return "failed"
        if repeats:
            log.warning(
                "replicas differ in the gradient of a micro-batch: the iteration is done again",
                iteration=self.step_version,
            )
            return "stepped"
        if self.step_version != NO_STATE:
            self.history.digests[self.step_version] = f"{self.reduction.checks[0] % 2**64:016x}"
        return None

    def _probe(self) -> Outcome | None:
        """Compute the gradient of one micro-batch, the same on all replicas, and its digest."""
        exact, axes = self.trainee.exact, self.trainee.axes
        if exact is None or axes.dp == 1:
            return None
        train = self.trainee.train
        outcome = self._pass(
            [self.step_version // train.digest_every % train.num_micro_batches], is_probe=True
        )
        if outcome is None:
            self._checks.probe = exact.digest()
        self._clear_sums()
        return outcome

    # --- passes ---
    def _pass(self, todo: Sequence[int], *, is_probe: bool = False) -> Outcome | None:
        """Run the passes, with the other members of this replica. None when all are done. A unit is
        one micro-batch, and the members agree to continue (StopAgreement). In a pipeline a unit
        is all micro-batches: its first stage decides where they stop (pipeline.py)."""
        items, is_alone = tuple(todo), self.trainee.replica_size == 1
        units = [items] if self.trainee.axes.pp > 1 and items else [(item,) for item in items]
        agreement = (
            None if is_alone else StopAgreement(self._communicators.groups.mp, self.trainee.device)
        )
        for unit in units:
            if is_alone and self._must_stop():
                return "quiesced"
            run = partial(self._unit, unit, agreement, is_last=unit == units[-1], is_probe=is_probe)
            # A forward that gathers parameters waits for members of other replicas.
            found = (
                run()
                if is_alone and self.trainee.is_gathered
                else (
                    self.reduction.run_collectively(
                        run, frozenset() if is_alone else self._communicators.replica
                    )
                )
            )
            self._item = -1
            if isinstance(found, str):
                self.is_stuck = self.reduction.was_abandoned
                self.reduction.give_up()
                self._clear_sums()
                return found
            self.trainee.is_gathered = self.trainee.is_gathered or found.num_done > 0
            self.losses.extend(found.losses)
            self.done.extend(unit[: found.num_done])
            if found.num_done < len(unit):
                return "quiesced"
        return None

    def _test(self, exact: ExactSum, item: int) -> Outcome | None:
        """In the first iteration of a process, it and its replica run a micro-batch twice: added
        and then subtracted, its gradient must leave nothing. Raises UsageError if it does."""
        is_alone = self.trainee.replica_size == 1
        if is_alone and (self._is_tested or self._must_stop()):
            return None

        def left() -> list[int] | None:
            groups = self._communicators.groups
            if not is_alone:
                agreement = StopAgreement(groups.mp, self.trainee.device)
                agreement.ask(must_stop=not self._is_tested)
                if not agreement.answer():
                    return None
            for _ in range(2):
                forward_backward.run(
                    self.trainee,
                    groups,
                    self.step_version,
                    (item,),
                    self._sample,
                    lambda event, item: self.marks.note(event),
                    backward=partial(self.reduction.backward, is_last=False),
                )
                exact.negate()
            return exact.left()

        found = (
            left()
            if is_alone and self.trainee.is_gathered
            else (
                self.reduction.run_collectively(
                    left, frozenset() if is_alone else self._communicators.replica
                )
            )
        )
        if found is None:
            return None
        if isinstance(found, str):
            self.is_stuck = self.reduction.was_abandoned
        self.reduction.give_up()
        self._clear_sums()
        if isinstance(found, str):
            return found
        self.trainee.is_gathered = self._is_tested = True
        if found:
            names = {id(param): name for name, param in self.trainee.named_parameters()}
            differ = listed([names[id(exact.params[index])] for index in found])
            raise UsageError(
                f"rank {self.trace.rank}: run twice, micro-batch {item} of iteration "
                f"{self.step_version} gives other gradients of {differ}",
                "a kernel is not deterministic: replace it, or set reproducible: rounding",
            )
        return None

    def _must_stop(self) -> bool:
        return self._control.pending_quiesce(self._communicators.generation) == "now"

    def _unit(
        self,
        unit: tuple[int, ...],
        agreement: StopAgreement | None,
        *,
        is_last: bool,
        is_probe: bool,
    ) -> Passes:
        """Run a unit, or less of it if any member has an order to stop: then all of them return the
        same number of micro-batches. Raises RuntimeError."""
        if agreement is not None and self.trainee.axes.pp == 1:
            if agreement.answer():
                return Passes(0, Losses())
            if not is_last:
                agreement.ask(must_stop=self._must_stop())

        def begin(losses: Losses) -> None:
            self.reduction.begin(self._stats(), self.losses.with_losses(losses))

        return forward_backward.run(
            self.trainee,
            self._communicators.groups,
            self.step_version,
            unit,
            self._sample,
            self._note_of,
            must_stop=self._must_stop,
            begin=begin if is_last and not is_probe else None,
            backward=partial(self.reduction.backward, is_last=is_last and not is_probe),
        )

    def _sample(self, item: int) -> Tensor:
        train = self.trainee.train
        found: Tensor = self.text.sample(
            train.seed,
            self.step_version,
            item,
            rows=train.batch.micro,
            sequence=train.model.sequence,
        )
        return found

    def _note_of(self, event: Event, item: int) -> None:
        self._item = item
        self.forward_calls += event == "forward"
        self._note(event)

    def _note(self, event: Event, bucket: int = -1) -> None:
        # The step that the gather belongs to has already been counted.
        iteration = self.step_version - (event == "gather")
        self.trace.note(event, self.trained_in, iteration, micro_batch=self._item, bucket=bucket)
        self.marks.note(event)

    # --- reduction and step ---
    def _reduce_and_step(self) -> Outcome | None:
        """Reduce and step. None if the iteration must run again, with larger exponents."""
        stats = self.reduction.run(self._stats(), self.losses)
        if isinstance(stats, str):
            self._raise_if_rejected(self.reduction.why)
            if self.reduction.has_lost_sum:
                self._clear_sums()
            return stats
        self._reduced = stats
        if not math.isfinite(stats.loss_sum):
            for item, loss in self.losses.not_finite():
                log.warning(
                    f"the loss is {loss}",
                    rank=self.trace.rank,
                    iteration=self.step_version,
                    micro_batch=item,
                )
        gate, scale = None, 1.0
        if self.trainee.exact is not None or not self.trainee.is_plain:
            found = self._pass_barrier()
            if isinstance(found, str):
                return found
            gate, scale = found
            if self.reduction.checks:
                outcome = self._judge(has_probes=not gate.num_overflows)
                if outcome == "stepped":
                    self._begin_again()
                    return None
                if outcome is not None:
                    return outcome
            if gate.num_overflows:
                self._redo(gate)
                return None
            if (
                gate.num_not_finite
                and scale_of(self.trainee.optimizer) is None
                and (self.trainee.exact is not None)
            ):
                raise UsageError(
                    f"a gradient of iteration {self.step_version} is NaN or infinite, which an "
                    "exact sum cannot hold",
                    "correct the data or lower the learning rate; with "
                    "train.reproducible: rounding the step is taken with it",
                )
        if self._spoils(stats):
            self._keep_last(stats)
        self._step(gate, scale)
        axes = self._communicators.axes
        self.owned = assign_micro_batches(
            self.trainee.train.num_micro_batches,
            axes.dp,
            coordinates(axes, self._communicators.place).dp,
        )
        self.assigned_in = self._communicators.generation
        may_wait = (
            self.trainee.gathers_in_forward
            and not stats.num_stopping
            and not self.is_read_after(self.step_version)
        )
        if not self.trainee.is_gathered and not may_wait:
            failed = self._gather()
            if failed is not None:
                return failed
        self.marks.pulse.finish()
        return self._boundary(stats)

    def _spoils(self, stats: Stats) -> bool:
        """Whether the loss says that this step, the first of a series, makes a finite state NaN or
        infinite. A loss scaler skips such a step, and so does `skip_not_finite`. The same on all
        members."""
        at, history = self.step_version, self.history
        return (
            not math.isfinite(stats.loss_sum)
            and at > 0
            and not history.spoilt_by
            and history.is_finite(at - 1)
            and scale_of(self.trainee.optimizer) is None
            and not self.trainee.train.skip_not_finite
        )

    def _pass_barrier(self) -> tuple[StepBarrier, float] | Outcome:
        scale = scale_of(self.trainee.optimizer)
        if self.reduction.exact is not None:
            exact = self.reduction.exact.barrier()
            if self._is_checked(self.step_version):
                exact = exact._replace(
                    checks=self._checks.values(
                        self.step_version,
                        has_sum=(
                            self.trainee.train.kept_sum
                            and not exact.num_overflows
                            and not exact.num_not_finite
                        ),
                    )
                )
            self.is_ready = True
            return self.reduction.exact_barrier(exact, scale)
        mine = step_barrier(self.trainee)
        self.is_ready = True
        return self.reduction.step_barrier(mine, scale)

    def _redo(self, gate: StepBarrier) -> None:
        """The exact sum of some micro-batch was out of range, on any member: run the iteration
        again from its start, with larger exponents."""
        self.redone += 1
        log.warning(
            "a gradient is far above that of the last iteration, which is done again",
            iteration=self.step_version,
            num_parameters=int(gate.num_overflows),
            times=self.redone,
        )
        self._begin_again()

    def _begin_again(self) -> None:
        self.is_ready = False
        self.reduction.done()
        self._clear_sums()

    def _gather(self) -> Outcome | None:
        """Gather the parameters that the other replicas have stepped. None if all arrived. If not,
        the step still counts: the next settlement recovers the rest."""
        self._note("gather")
        found = self.reduction.run_collectively(partial(gather, self.trainee))
        if isinstance(found, str):
            self.is_stuck = self.reduction.was_abandoned
            self._end_gather()
            return found
        self.trainee.is_gathered = True
        return None

    def _expect_gather(self, *, will_pass: bool) -> Outcome | None:
        """Tell Megatron whether the next forward gathers the parameters. Without a pass, gather
        them now. None if that succeeds."""
        if not self.trainee.gathers_in_forward:
            return None
        for group in self.trainee.bucket_groups:
            set_gathered(group, is_gathered=self.trainee.is_gathered)
        if self.trainee.is_gathered or will_pass:
            return None
        return self._gather()

    def _end_gather(self) -> None:
        """The generation ends before all parameters arrived; a gather may still write into them."""
        works = [work for group in self.trainee.bucket_groups for work in take_gather_works(group)]
        waiter = end_all(works, self._communicators.interrupt, self._communicators.groups)
        if waiter is not None:
            self._control.abandon(waiter.is_alive)
            self.is_stuck = True

    def _raise_if_rejected(self, text: str) -> None:
        """A check of Megatron is no failed collective: the next process would fail in it too."""
        found = _REJECTED.search(text)
        if found is None:
            return
        items = [item for item, _ in self.losses.not_finite()] or sorted(self.done)
        if self._item >= 0 or not items:  # in a pass
            items = [self.trainee.draw.micro_batch]
        where = f"micro-batch{'es' if len(items) > 1 else ''} {', '.join(map(str, items))}"
        raise UsageError(
            f"rank {self.trace.rank}: {found[2]}: {found[1]}, in {where} of iteration "
            f"{self.step_version}",
            "correct the data or lower the learning rate; without Megatron's check "
            "for NaN the step is taken with it",
        )

    def _step(self, gate: StepBarrier | None, scale: float | None = None) -> None:
        """Compute the next state from the reduced gradients; waits for no other member."""
        stats = self._reduced
        skips = self.trainee.train.skip_not_finite and not math.isfinite(stats.loss_sum)
        self.before_change()
        if gate is None:
            norm = step(self.trainee, stats.num_tokens, self._note, skips=skips)
        else:
            self._gate = gate
            self.reduction.done()
            norm = step(
                self.trainee,
                stats.num_tokens,
                self._note,
                norm_square=gate.norm_square,
                found_inf=gate.num_not_finite > 0,
                scale=scale,
                skips=skips,
            )
            if self.reduction.exact is not None and not gate.num_not_finite:
                self.reduction.exact.stepped()
            self.is_ready = False
        self.trainee.experts.step(self.reduction.router_sums, self.trainee.train.num_micro_batches)
        self.step_version += 1
        self.redone = 0
        loss = stats.loss_sum / self.trainee.divisor(stats.num_tokens)
        self.history.add(self.step_version - 1, loss, clock() - (self._began_s or clock()))
        if norm is not None:
            self.history.spoilt_by = _spoilt_by(loss, norm)
        self._clear()
        self.owned, self.begun = (), False

    def _undo(self) -> None:
        """If this member is ready for a step that it will not take, undo the reduction."""
        if self.is_ready:
            self.is_ready = False
            self.reduction.undo()
            if self.reduction.has_lost_sum:
                self._clear_sums()

    def _stats(self) -> Stats:
        self._was_saving = self.is_saving()
        num_sending, num_unstored = self.copy_status()
        return Stats(
            num_saving=float(self._was_saving), num_sending=num_sending, num_unstored=num_unstored
        )

    def _boundary(self, stats: Stats) -> Outcome:
        self.may_copy = not stats.num_sending
        self.is_copied = not stats.num_unstored
        self.num_saving = round(stats.num_saving)
        return "boundary" if stats.num_stopping else "stepped"

    def _clear(self) -> None:
        self._clear_sums()
        self._began_s = None

    def _clear_sums(self) -> None:
        if not self.is_stuck:
            self.trainee.clear()
        self._forget_sums()

    def _forget_sums(self) -> None:
        self.done = []
        self.losses.clear()


def held_by(trainee: TrainingModel) -> HeldState:
    return HeldState(
        axes=trainee.axes, optimizer=trainee.train.parallel.optimizer, place=trainee.place
    )


def _spoilt_by(loss: float, norm: float) -> str:
    """The loss of a step that has made the state NaN or infinite, in words; "" if it has not."""
    if math.isfinite(loss) and math.isfinite(norm):
        return ""
    return repr(loss) if not math.isfinite(loss) else f"{loss:.4g}, with a gradient of {norm!r}"
