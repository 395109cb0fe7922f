"""The life of a member: hold, join a generation, settle, train, leave it, hold again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from functools import partial

import msgspec
import structlog
import torch

from ...events.records.orders import Quiesce, Reconfigure, Resume, StartRank
from ...events.records.reports import (
    CollectiveFailed,
    Quiesced,
    RankFinished,
    RankReady,
    Reconfigured,
    ReconfigureFailed,
)
from ...events.records.types import Keeper
from ...events.spec.job import is_url
from ...events.spec.model import Axes
from ...events.spec.parallelism import coordinates, num_places, replica, whole_on_each
from ..checkpoint_store import protocol
from ..diagnosis.classifier import Verdict
from ..ipc.progress_page import OUTSIDE_CODE, Pulse
from .checkpoint import checkpoint, memory_checkpoint
from .checkpoint.saver import Saver
from .communicators.communicators import ABORTED, Communicators
from .model import cpu_device, training_state
from .model import trainee as model
from .model.workload import Work
from .process.control_thread import Control, Interrupted
from .process.exit_report import bounded
from .process.flight_recorder import Recorder
from .process.history import History
from .process.trace import Event, Trace
from .recovery.settlement import Share, settle
from .recovery.state_sources import NO_STATE, Claim
from .state_recovery import Supply, seen
from .step.gradient_reduction import Outcome, poisoned
from .step.iteration import Iteration, clock

PROGRESS_S = 1.0
"""How often the first member tells its progress."""
WHY_CHARS_MAX = 1000
"""Characters of what made a collective fail that are told."""

log = structlog.get_logger()


class Member:
    """One rank's process, from RankReady to RankFinished.

    `generation` is the newest that it was told of; `inside` says whether it is in it. Outside of
    every generation it holds: it waits for the next order, with all its state.
    """

    def __init__(self, control: Control, start: StartRank, environment: Mapping[str, str],
                 pulse: Pulse, work: Work) -> None:
        self.control = control
        self.start = start
        self.work = work
        self.train = work.train
        self.trace = Trace(environment.get("UNICRON_TRACE_DIR", ""), start.task, start.rank,
                           start.attempt)
        self.trace.note("start", 0, NO_STATE)
        self.pulse = pulse
        self.recorder = Recorder(start.task, start.rank)
        control.write_dump = self.recorder.write_soon
        self.generation = 0
        self.inside = False
        self.members: tuple[int, ...] = ()
        self.nodes: tuple[str, ...] = ()
        self.axes = Axes()
        self.keepers: tuple[Keeper, ...] = ()
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
        if torch.cuda.is_available():
            torch.cuda.set_device(start.slot.index % torch.cuda.device_count())
        device = cpu_device.stand_in()
        self.communicators = Communicators(environment.get("UNICRON_HOST", "127.0.0.1"), device)
        self.communicators.on_groups = work.on_groups
        self.sparing = self.communicators.sparing if is_url(self.train.output) else nullcontext
        with self.sparing():
            checkpoint.check_output(self.train.output)
        words = work.load()
        with self.communicators.of_one() as roots:
            trainee = seen(work.build(device, self.communicators.groups, Axes(), 0))
            roots += trainee.roots
        self.history = History()
        self.iteration = Iteration(trainee, words, self.trace, pulse, self.history)
        secret = environment.get(protocol.SECRET, "")
        self.supply = Supply(start, work, self.communicators, self.iteration, secret, self.sparing,
                             self._note)
        self.copier = memory_checkpoint.Copier(start, secret, spare=self.communicators.spare,
                                    tell=control.tell_unless_behind, note=self.trace.note)
        self.saver = Saver(start, sparing=self.sparing, tell=control.tell, note=self.trace.note)
        self.digest = words.digest
        self.settled = 0
        """The step version from which the generation that is up goes on."""
        self.waits: Callable[[], None] | None = None
        """How its iteration goes on once all members have their parts of the model."""
        self.told_to = 0
        self.told_s = 0.0
        # Everything built by now stays: without this, a collection costs 100 to 500 ms.
        gc.collect()
        gc.freeze()

    @property
    def step_version(self) -> int:
        return self.iteration.step_version

    @property
    def trainee(self) -> model.Trainee:
        return self.iteration.trainee

    @property
    def is_beside(self) -> bool:
        """Whether it is in the generation only to give what it has."""
        return self.communicators.place >= num_places(self.axes)

    def live(self) -> None:
        """Say RankReady, then carry out orders until all iterations are done."""
        for _ in self.steps():
            pass

    def steps(self) -> Generator[int | None]:
        """The same, seen from between the steps: None where a generation begins to train, then each
        iteration that all have stepped. `together` may use its communicators there."""
        self.control.tell(RankReady(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            endpoint=self.communicators.endpoint,
            num_params=sum(param.numel() for _, param in self.trainee.named_parameters()),
            state_bytes=training_state.num_bytes(self.trainee), iteration_flops=self.work.flops,
            data_digest=self.digest,
        ))
        self._note("ready")
        finished = False
        while not finished:
            match self.control.next_order():
                case Reconfigure() as order if order.generation > self.generation:
                    self._join(order)
                case Resume() as order if self.inside and order.generation == self.generation:
                    finished = yield from self._train(order)
                case Quiesce() as order if order.generation >= self.generation:
                    self.generation = order.generation
                    self._leave(order)
                case order:
                    log.info("order ignored", kind=type(order).__name__,
                             generation=self.generation)

    def _note(self, event: Event) -> None:
        self.trace.note(event, self.generation, self.step_version)
        self.pulse.mark(event, OUTSIDE_CODE)

    # --- joining --------------------------------------------------------------------------------
    def _join(self, order: Reconfigure) -> None:
        ranks = tuple(member.rank for member in order.members)
        if self.start.rank not in ranks:
            return
        if self.inside:
            self._down()
            self.inside = False
        self.generation = order.generation
        self.waits = None
        self.members, self.keepers = ranks, order.keepers
        self.nodes = tuple(member.node for member in order.members)
        self.axes = order.axes or Axes(dp=len(ranks))
        self.recorder.begin(order.generation, ranks)
        why, told = "", None
        try:
            with self.control.waiting_for_others(order.generation, self.communicators.wake):
                told = self._meet_and_settle(order, ranks.index(self.start.rank))
        except Interrupted:
            why = "told to stop before it began"
        except (RuntimeError, *ABORTED) as error:
            if poisoned(error) or (isinstance(error, ABORTED) and not self.communicators.woken):
                raise
            why = f"{type(error).__name__}: {error}".strip()
        if self.communicators.woken:
            why = f"told to stop; {why}"
        if told is not None and not why:
            self.inside = True
            self.control.tell(told)
            return
        log.warning("generation did not come up", generation=order.generation, why=why)
        self._down()
        self.control.tell(ReconfigureFailed(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            generation=order.generation, error=why[:1000],
        ))
        self._say_quiesced()

    def _meet_and_settle(self, order: Reconfigure, place: int) -> Reconfigured:
        """Communicators up, claims exchanged, state where it is missing. Raises RuntimeError."""
        began_s = clock()
        self._note("meet")
        news = self.communicators.meet(order.generation, place, len(order.members), order.store,
                                       msgspec.msgpack.encode(self.supply.claim()))
        claims = [msgspec.msgpack.decode(told, type=Claim) for told in news]
        self.communicators.up(self.axes, self._replica(place))
        up_s = clock()
        self._note("settle")
        settlement = settle(claims, self.train.num_micro_batches, self.axes, self.nodes)
        share = settlement.shares[place]
        with self.communicators.lent():
            self.iteration.go_through(settlement, share)
        found = self.supply.bring(order, place, claims, settlement)
        step_version = self.settled = found.step_version
        if step_version >= self.train.iterations:
            share = Share(kept=(), todo=(), dealt=(), source=share.source)
        if not self.communicators.woken:
            take = partial(self.iteration.take, step_version, share, order.generation,
                           begun=settlement.begun)
            if self.supply.waits:
                self.waits = take
            else:
                take()
        return Reconfigured(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            generation=order.generation, step_version=step_version, kept_micro_batches=share.kept,
            remaining_micro_batches=share.todo, reassigned_micro_batches=share.dealt,
            source=found.source, received_bytes=found.received_bytes,
            down_s=self.communicators.down_s, up_s=up_s - began_s, settle_s=clock() - up_s,
            origin=found.origin, origin_node=found.node, received_from=found.taken,
        )

    def _replica(self, place: int) -> frozenset[int]:
        """The ranks that are one replica with this one."""
        if self.is_beside:
            return frozenset((self.start.rank,))
        dp = coordinates(self.axes, place).dp
        return frozenset(self.members[other] for other in replica(self.axes, dp))

    # --- training -------------------------------------------------------------------------------
    def _train(self, order: Resume) -> Generator[int | None, None, bool]:
        """Train until told to stop, until something fails, or to the end; whether to the end."""
        self.supply.commit()
        if self.waits is not None:
            self.waits()
            self.waits = None
        self.told_to, self.told_s = order.progress_from, 0.0
        outcome: Outcome = "stepped"
        at = self.settled
        if self.is_beside:
            self.supply.stay_beside()
        yield None
        while outcome == "stepped" and at < self.train.iterations:
            outcome = (self.iteration.attend(self.control, self.communicators, at)
                       if self.is_beside else
                       self.iteration.run(self.control, self.communicators))
            if outcome in ("stepped", "boundary"):
                at += 1
                if clock() - self.told_s >= PROGRESS_S and not self.control.is_behind:
                    self._tell_progress()
                outcome = self._after(at, outcome)
                if outcome in ("stepped", "boundary"):
                    yield at - 1
                if not self.inside:  # it was left meanwhile
                    return False
        self.pulse.mark("boundary", OUTSIDE_CODE)
        self._tell_progress()
        if outcome == "stepped":
            outcome = self._gather(at, 0, outcome)
        if outcome == "stepped":
            if self.communicators.place == 0:
                self._save(final=True)
            outcome = self.iteration.meet(self.control, self.communicators)
            if outcome == "stepped":
                self._finish()
                return True
        if outcome == "failed":
            self._tell_failed(self.iteration.reduction.why, self.iteration.reduction.verdict)
        self._leave()
        return False

    def _after(self, at: int, outcome: Outcome) -> Outcome:
        """What is to be done after iteration `at - 1`: copies and checkpoints."""
        copies_due = self._is_due(at, self.train.copy_every)
        save_due = self._is_due(at, self.train.checkpoint_every)
        self.iteration.after_boundary = copies_due or save_due
        if copies_due or save_due:
            outcome = self._gather(at, 0, outcome)
        if self.communicators.place == 0 and self.supply.has_whole:
            if copies_due:
                self._copy()
            if save_due:
                self.saver.begin(self.supply.whole(), at, self.history, self.generation)
        if outcome == "boundary" and 0 <= self.iteration.saver < len(self.members):
            outcome = self._gather(at, self.iteration.saver, outcome)
        self._end_when_worn(outcome)
        return outcome

    def _gather(self, at: int, to: int, outcome: Outcome) -> Outcome:
        """The whole state to one member, where none has it; how the iteration has ended by that."""
        if whole_on_each(self.axes, self.train.parallel):
            return outcome
        found = self.iteration.reduction.together(
            self.control, self.communicators,
            partial(self.supply.gather, at, self.nodes, to))
        return outcome if found is None else found

    def together(self, call: Callable[[], None]) -> bool:
        """Between two steps: what needs all members, beside training; whether it was done. Else
        this member has left its generation, and the next of `steps` is in another one."""
        found = self.iteration.beside(self.control, self.communicators, call)
        if found is None:
            return True
        if found == "failed":
            self._tell_failed(self.iteration.reduction.why, self.iteration.reduction.verdict)
        self._leave()
        return False

    def _tell_failed(self, why: str, verdict: Verdict) -> None:
        self.control.tell(CollectiveFailed(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            generation=self.generation, iteration=self.step_version,
            error=bounded(why, verdict.line, WHY_CHARS_MAX, end=False),
            status=verdict.status, rule=verdict.rule, peer=verdict.peer,
        ))

    def _end_when_worn(self, outcome: Outcome) -> None:
        """After a whole step, at most one member of each: what it holds, its peers hold, or hold
        the step before it. Nobody ends who is alone, has been told to stop, or is done."""
        num_members = self.communicators.num_members
        if (outcome == "stepped" and self.step_version < self.train.iterations
                and self.axes.dp > 1 and self.train.parallel.optimizer != "sharded"
                and self.step_version % num_members == self.communicators.place
                and self.control.is_worn):
            self.control.end_worn()

    def _tell_progress(self) -> None:
        """By the first member alone: all that has not been told."""
        if self.communicators.place == 0:
            for report in self.history.tell(
                    self.told_to, task=self.start.task, generation=self.generation,
                    micro_batches=self.train.num_micro_batches, flops=self.work.flops,
                    skipped=training_state.num_skipped(self.trainee, self.step_version)):
                self.control.tell(report)
            if self.history.end > self.told_to:
                loss, step_s = self.history.last
                log.info("trained", iteration=self.history.end, of=self.train.iterations,
                         loss=round(loss, 4), step_s=round(step_s, 3),
                         generation=self.generation, dp=self.communicators.num_members)
            self.told_to = max(self.told_to, self.history.end)
        self.told_s = clock()

    def _copy(self) -> None:
        told = self.control.keep
        keepers = (told.keepers if told is not None and told.generation == self.generation
                   else self.keepers)
        self.copier.copy(self.supply.whole(), self.step_version, self.history, self.generation,
                         keepers)

    def _is_due(self, at: int, every: int) -> bool:
        """Whether this boundary is one of those, of which the last is none."""
        return every > 0 and at % every == 0 and at < self.train.iterations

    def _save(self, *, final: bool) -> None:
        """At once; told when this returns."""
        self.saver.save(self.supply.whole(), self.step_version, self.history, self.generation,
                        final=final)

    def _finish(self) -> None:
        # A second meeting, whose outcome does not matter: a member that ends while another still
        # waits for the first one's answer would look like a fault to it.
        self.iteration.meet(self.control, self.communicators)
        self.saver.wait()
        self.control.tell(RankFinished(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            generation=self.generation, step_version=self.step_version,
            forward_calls=self.iteration.forward_calls,
        ))

    # --- leaving --------------------------------------------------------------------------------
    def _leave(self, order: Quiesce | None = None) -> None:
        """Out of the generation, if in it; say what is held, and hold."""
        if self.inside:
            self.inside = False
            self._down()
        self._say_quiesced(order)

    def _down(self) -> None:
        self.supply.leave()
        self.communicators.down(self.trainee.roots)

    def _say_quiesced(self, order: Quiesce | None = None) -> None:
        """`order` is the one that is answered; one that came since says better what is wanted."""
        order = self.control.settle(self.generation) or order
        if (order is not None and order.save and order.ranks[:1] == (self.start.rank,)
                and self.supply.has_whole):
            self._save(final=False)
        self.control.tell(Quiesced(
            task=self.start.task, rank=self.start.rank, attempt=self.start.attempt,
            generation=self.generation, step_version=self.step_version,
            micro_batches=tuple(sorted(self.iteration.done)),
            buckets_reduced=self.iteration.reduction.num_complete,
            num_buckets=len(self.trainee.bucket_groups),
        ))
