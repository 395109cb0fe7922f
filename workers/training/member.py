"""The life cycle of a member: wait for orders, join a generation, recover state, train, leave."""

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic as clock

import structlog
import torch
from msgspec.structs import replace

from ...events.errors import UsageError
from ...events.records import reports
from ...events.records.orders import Quiesce, Reconfigure, Resume, StartRank
from ...events.records.types import SaveKind
from ...events.spec.job import Train
from ...events.spec.model import Axes
from ...events.spec.parallelism import coordinates, layout_in_words, num_positions, replica
from ..diagnosis.classifier import classify
from ..host import output_owner
from ..ipc.progress_page import EVALUATE, OUTSIDE_CODE, ProgressWriter
from ..ipc.work_row import WorkCount
from .checkpoint import checkpoint, memory_checkpoint
from .checkpoint.final_save import save_at_end
from .checkpoint.memory_checkpoint import StoreOrder
from .checkpoint.saver import Format, OwnFormat, Save, Saver, can_save
from .communicators import counting
from .communicators.communicators import ABORTED, Communicators
from .communicators.nccl_errors import NcclError
from .communicators.rounds import PROTOCOL_VERSION
from .model import cpu_device, determinism, training_state
from .model import trainee as model
from .model.megatron_engine import MegatronEngine
from .model.workload import Workload
from .process import compiling
from .process.control_thread import Control, Interrupted
from .process.exit_report import bounded, is_cuda_error
from .process.flight_recorder import Recorder
from .process.history import History
from .process.trace import Event, trace_of
from .recovery.settlement import MemberAssignment, settle
from .recovery.state_sources import (
    NO_STATE,
    Claim,
    decode_claims,
    encode_claim,
    other_versions,
)
from .state_recovery import StateRecovery, with_shards
from .step.iteration import Iteration
from .step.results import Failed, Outcome, Stepped
from .step.stats import Stats

PROGRESS_S = 1.0
"""Minimum time between two progress reports of the member at position 0."""
MEET_S_MAX = 5.0
"""How long a member waits for those of its node before it aborts its communicators: one of them may
hang, and a wait that no abort ends counts as stuck after control_thread.BUILDING_S_MAX."""
WHY_CHARS_MAX = 1000
"""Characters that are reported of the error of a collective or of a join."""

log = structlog.get_logger()


def expected_position(start: StartRank, train: Train) -> tuple[Axes, int]:
    """The layout and position for which a process builds before the first Reconfigure. If that has
    another part, the process builds again."""
    axes = start.axes or next(
        train.parallel.layouts(start.num_seats, train.num_micro_batches), Axes()
    )
    place = start.place if start.place >= 0 else start.rank
    return axes, place % num_positions(axes)


def _host(environment: Mapping[str, str]) -> str:
    return environment.get("UNICRON_HOST", "127.0.0.1")


class Member:
    """One rank's process, from RankReady to RankFinished. `generation` is the newest that an order
    named, `joined` whether the member is in it. Outside a generation, the member keeps its state
    and waits for the next order."""

    def __init__(
        self,
        control: Control,
        start: StartRank,
        environment: Mapping[str, str],
        pulse: ProgressWriter,
        work: Workload,
    ) -> None:
        self.control = control
        self.start = start
        self._ids = {"task": start.task, "rank": start.rank, "attempt": start.attempt}
        self.work = work
        self.train = work.train
        self.trace = trace_of(
            environment.get("UNICRON_TRACE_DIR", ""), start.task, start.rank, start.attempt
        )
        self.trace.note("start", 0, NO_STATE)
        self.pulse = pulse
        counting.count_in(pulse.rows)
        compiling.tell_in(pulse.work)
        self.recorder = Recorder(start.task, start.rank)
        control.write_dump = self.recorder.start_write
        self.generation, self.joined = 0, False
        self.members: tuple[int, ...] = ()
        self.nodes: tuple[str, ...] = ()
        self.axes = Axes()
        self.stores = StoreOrder()
        self.rendezvous = ""
        if self.train.reproducible != "rounding":
            determinism.require()
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
        device = cpu_device.prepare_device(environment)
        self.communicators = Communicators(
            _host(environment), device, self._tell_nccl_error, self._meet_before_abort
        )
        self.communicators.on_groups = work.on_groups
        self._owner = output_owner.of_rank(
            environment, start.task, start.spec.name, self.train.output
        )
        self._own_output()
        words = work.load()
        axes, place = expected_position(start, self.train)
        # A restarted rank usually receives its state from peers, so it draws no weights.
        begins = start.attempt == 1 and not start.checkpoint
        with self.communicators.without_peers(axes, place) as roots:
            self.trace.note("build", 0, NO_STATE)
            groups = self.communicators.groups
            trainee = with_shards(work.build(device, groups, axes, place, begins=begins))
            self.size = work.whole_size(trainee, self.communicators.alone())
            roots += trainee.roots
        self.history = History()
        self.iteration = Iteration(
            MegatronEngine(trainee),
            *(control, self.communicators, words, self.trace, pulse, self.history, self),
        )
        self.recovery = StateRecovery(
            start,
            work,
            self.communicators,
            self.iteration.part,
            control.store_keys,
            begins=begins,
            note=self._note,
            count=WorkCount(pulse.work, goes_on=lambda: not self.communicators.woken),
        )
        self.copier = memory_checkpoint.MemorySaver(
            start,
            control.store_keys,
            tell=control.tell_unless_behind,
            note=self.trace.note,
        )
        self.savers = [
            self._own_saver(),
            *(self._saver(form, "export") for form in work.exports),
        ]
        self.digest = words.digest
        self.settled = 0
        """The step version from which the current generation trains."""
        self.resume_iteration: Callable[[], None] | None = None
        """Resumes the iteration once all members have their parts of the model."""
        self.reported_to, self.reported_s = 0, 0.0
        # The objects built so far stay. If they are not frozen, a collection takes 100 to 500 ms.
        gc.collect()
        gc.freeze()

    def _own_output(self) -> None:
        """Try the output, and become its owner. Raises UsageError, OSError before the task has
        begun."""
        what = f"{'train' if self.start.spec.train else 'loop'}.output"
        try:
            checkpoint.check_output(self.train.output, what, self._owner)
        except (UsageError, OSError) as error:
            if not self.start.has_begun:
                raise
            log.warning("no checkpoint can be saved", why=str(error))

    def _warn_of_room(self) -> None:
        """Before the first iteration: say that the checkpoints may not fit."""
        start, training = self.start, self.start.spec.training
        if training is not None and start.rank == 0 and start.attempt == 1 and not start.checkpoint:
            checkpoint.warn_of_room(
                self.train.output, training.checkpoint_keep, self.size.state_bytes
            )

    @property
    def step_version(self) -> int:
        return self.iteration.step_version

    @property
    def trainee(self) -> model.TrainingModel:
        return self.iteration.engine.trainee

    @property
    def is_standby(self) -> bool:
        """Whether this is a standby member, which provides state and trains nothing."""
        return self.communicators.place >= num_positions(self.axes)

    def steps(self) -> Generator[int | None]:
        """Report RankReady, then carry out orders until all iterations are done. Yields None when a
        generation starts to train, and each iteration that all members have stepped. Then
        `run_collectively` may be called."""
        self._warn_of_room()
        self.control.tell(
            reports.RankReady(
                **self._ids,
                endpoint=self.communicators.endpoint,
                num_params=self.size.num_params,
                state_bytes=self.size.state_bytes,
                iteration_flops=self.work.flops,
                data_digest=self.digest,
                rounding_why=self.work.rounding_why,
                protocol=PROTOCOL_VERSION,
            )
        )
        self._note("ready")
        finished = False
        while not finished:
            match self.control.next_order():
                case Reconfigure() as order if order.generation > self.generation:
                    self._join(order)
                case Resume() as order if self.joined and order.generation == self.generation:
                    finished = yield from self._train(order)
                case Quiesce() as order if order.generation >= self.generation:
                    self.generation = order.generation
                    self._leave(order)
                case order:
                    log.info("order ignored", kind=type(order).__name__, generation=self.generation)

    def _note(self, event: Event) -> None:
        self.trace.note(event, self.generation, self.step_version)
        self.pulse.mark(event, OUTSIDE_CODE)

    # --- joining --------------------------------------------------------------------------------
    def _join(self, order: Reconfigure) -> None:
        ranks = tuple(member.rank for member in order.members)
        if self.start.rank not in ranks:
            return
        if self.joined:
            self._tear_down()
            self.joined = False
        self.generation = order.generation
        self._save_to(order.output)
        self.resume_iteration = None
        self.members, self.rendezvous = ranks, order.store
        self.stores = StoreOrder.of(order, self.start.slot.node)
        self.nodes = tuple(member.node for member in order.members)
        self.axes = order.axes or Axes(dp=len(ranks))
        self.recorder.begin(order.generation, ranks)
        why, report = "", None
        try:
            with self.control.waiting_for_others(order.generation, self.communicators.interrupt):
                report = self._join_generation(order, ranks.index(self.start.rank))
        except Interrupted:
            why = "stopped before it began"
        except (RuntimeError, *ABORTED) as error:
            if (
                is_cuda_error(error)
                or self.iteration.part.state.phase == "stepping"
                or (isinstance(error, ABORTED) and not self.communicators.woken)
            ):
                raise
            why = f"{type(error).__name__}: {error}".strip()
        if self.communicators.woken:
            why = f"stopped; {why}"
        if report is not None and not why:
            self.joined = True
            self.control.tell(report)
            return
        log.warning("generation did not come up", generation=order.generation, why=why)
        self._tear_down()
        self.control.tell(
            reports.ReconfigureFailed(
                **self._ids, generation=order.generation, error=why[:WHY_CHARS_MAX]
            )
        )
        self._report_quiesced()

    def _join_generation(self, order: Reconfigure, place: int) -> reports.Reconfigured:
        """Exchange claims, build communicators, recover missing state. Raises RuntimeError."""
        began_s = clock()
        self._note("meet")
        encoded = self.communicators.meet(
            order.generation,
            place,
            len(order.members),
            order.store,
            encode_claim(self.recovery.claim(), place),
        )
        claims = decode_claims(encoded)
        self._check_versions(claims, order, place)
        built_s = self.communicators.up(self.axes, self._replica(place))
        up_s = clock()
        self._note("settle")
        settlement = settle(claims, self.train.num_micro_batches, self.axes)
        share = settlement.shares[place]
        with self.communicators.settling():
            with self.communicators.borrow_groups():
                self.iteration.part.finish_step(settlement, share)
            recovered = self.recovery.recover(order, place, claims, settlement)
        step_version = self.settled = recovered.step_version
        if step_version >= self.train.iterations:
            share = MemberAssignment(kept=(), todo=(), reassigned=())
        if not self.communicators.woken:
            resume = partial(
                self.iteration.part.take,
                step_version,
                share,
                order.generation,
                begun=settlement.begun,
                redone=settlement.redone,
            )
            if self.recovery.is_staged_next:
                self.resume_iteration = resume
            else:
                resume()
        return reports.Reconfigured(
            **self._ids,
            generation=order.generation,
            step_version=step_version,
            kept_micro_batches=share.kept,
            remaining_micro_batches=share.todo,
            reassigned_micro_batches=share.reassigned,
            source=recovered.source,
            received_bytes=recovered.received_bytes,
            down_s=self.communicators.down_s,
            up_s=up_s - began_s,
            settle_s=clock() - up_s,
            origin=recovered.origin,
            origin_node=recovered.node,
            received_from=recovered.taken,
            damaged=recovered.damaged if place == 0 else "",
            built_s=built_s if place == 0 else {},
            **self.recovery.next_model.mirrored_size(),
        )

    def _check_versions(self, claims: Sequence[Claim], order: Reconfigure, place: int) -> None:
        """If members have other versions than most, end those, and fail the generation at all
        others. Both say which ranks they are. Raises UsageError or RuntimeError."""
        usual, odd = other_versions(claims)
        if not odd:
            return
        first = order.members[odd[0]]
        more = f", and {len(odd) - 1} more ranks have other versions" if len(odd) > 1 else ""
        why = (
            f"rank {first.rank} on {first.node} has {claims[odd[0]].versions}, the other ranks "
            f"have {usual}{more}"
        )
        self.communicators.rounds.leave()
        if place in odd:
            raise UsageError(why, "have the same on every node; OMP_NUM_THREADS sets the threads")
        raise RuntimeError(why)

    def _replica(self, place: int) -> frozenset[int]:
        if self.is_standby:
            return frozenset((self.start.rank,))
        dp = coordinates(self.axes, place).dp
        return frozenset(self.members[other] for other in replica(self.axes, dp))

    # --- training -------------------------------------------------------------------------------
    def _train(self, order: Resume) -> Generator[int | None, None, bool]:
        """Train until an order to stop, a failure or the end. Returns True at the end."""
        self.recovery.activate()
        if self.resume_iteration is not None:
            self.resume_iteration()
            self.resume_iteration = None
        self.reported_to, self.reported_s = order.progress_from, 0.0
        outcome: Outcome = Stepped()
        at = self.settled
        if self.is_standby:
            self.recovery.become_standby()
        self.pulse.mark("boundary", OUTSIDE_CODE)
        yield None
        if not self.joined:  # `run_collectively` has left the generation
            return False
        while outcome.goes_on and at < self.train.iterations:
            outcome = (
                self.iteration.beside.run_as_standby(at)
                if self.is_standby
                else self.iteration.run()
            )
            if isinstance(outcome, Stepped):
                at += 1
                if (
                    clock() - self.reported_s >= PROGRESS_S
                    and not self.control.is_behind
                    and at < self.train.iterations
                ):
                    self._report_progress()
                self._take_due_checkpoints(at, outcome)
                self._exit_if_too_many_abandoned(outcome)
                yield at - 1
                if not self.joined:
                    return False
        self.pulse.mark("boundary", OUTSIDE_CODE)
        if outcome.goes_on:
            outcome = self.iteration.beside.check_end(is_standby=self.is_standby) or outcome
        self._report_progress()
        if outcome.goes_on:
            outcome = save_at_end(
                self.savers, self._save_final, self.iteration.beside, self._hold_state
            )
            if outcome.goes_on:
                self._finish()
                return True
        if isinstance(outcome, Failed):
            self._report_failed(outcome)
        self._leave()
        return False

    def _take_due_checkpoints(self, at: int, stepped: Stepped) -> None:
        """Take the checkpoints that are due after iteration `at - 1`: none of a state that is NaN
        or infinite, so the last one stays that is not."""
        for saver in self.savers:
            saver.hear(stepped.num_others_saving)
        if self.history.spoilt_by and not self.is_standby:
            if self.history.is_finite(at - 2):
                log.warning(
                    "no checkpoint is taken until the loss is finite again",
                    iteration=at,
                    loss=self.history.spoilt_by,
                )
            return
        memory_due = self._is_due(at, self.train.copy_every)
        if memory_due and stepped.may_copy and not self.is_standby:
            self._copy(is_whole=stepped.is_copied)
        due = [saver for saver in self.savers if self._is_due(at, saver.every)]
        if due and stepped.num_saving and self.communicators.place == 0:
            log.warning(
                "checkpoint skipped: the last one is still being written",
                iteration=at,
                num_members=stepped.num_saving,
            )
        elif due and not stepped.num_saving and not self.is_standby:
            for saver in due:
                saver.begin(self.trainee, self.history, self._checkpoint(self._all_positions()))

    def _copy(self, *, is_whole: bool) -> None:
        """Begin to store this member's share in memory; `is_whole` as in MemorySaver.begin."""
        self.copier.begin(
            partial(memory_checkpoint.content_of, self.trainee, self.step_version, self.history),
            self.step_version,
            self.generation,
            self._current_stores(),
            is_whole=is_whole,
        )

    # --- what an iteration asks (step/checkpoints.py) ---
    def keep_last(self, stats: Stats) -> None:
        """Store and save the present state, if no member still does so with an earlier one, and
        unless that was due and has begun."""
        at, saver = self.step_version, self.savers[0]
        if (
            self.train.copy_every
            and not stats.num_sending
            and not self.copier.has_begun(self.generation, at)
        ):
            self._copy(is_whole=not stats.num_unstored)
        if not stats.num_saving and not saver.has_begun(self.generation, at):
            saver.begin(self.trainee, self.history, self._checkpoint(self._all_positions()))
        if saver.has_begun(self.generation, at):
            self.history.saved_at = at

    def copy_status(self) -> tuple[float, float]:
        return self.copier.status(self._current_stores())

    def before_change(self) -> None:
        self.copier.detach()
        for saver in self.savers:
            saver.detach()

    def is_read_after(self, at: int) -> bool:
        return at >= self.train.iterations or any(
            self._is_due(at, every)
            for every in (
                self.train.copy_every,
                self.iteration.corruption.digest_every,
                *(saver.every for saver in self.savers),
            )
        )

    def is_saving(self) -> bool:
        return any(saver.is_saving(self.generation) for saver in self.savers)

    # --- reports, and saving ---
    def run_collectively(self, call: Callable[[], None]) -> bool:
        """Run an evaluation, in which all members take part, between two steps. Returns False if it
        failed: `steps` then continues in another generation."""
        self.pulse.mark(EVALUATE, OUTSIDE_CODE)  # its agent learns how long that takes
        ended = self.iteration.beside.run(call)
        if ended is None:
            self.pulse.mark("end", OUTSIDE_CODE)
            return True
        if isinstance(ended, Failed):
            self._report_failed(ended)
        self._leave()
        return False

    def _meet_before_abort(self, generation: int) -> None:
        """Called in another thread before this member aborts its NCCL communicators: wait for the
        other members on this node."""
        if self.nodes.count(self.start.slot.node) > 1:
            self.control.meet_before_abort(generation, MEET_S_MAX)

    def _tell_nccl_error(self, generation: int, error: NcclError) -> None:
        """NCCL reports an error of a group, in another thread: its collectives will not end. The
        training thread waits in one, until an order to stop interrupts it."""
        verdict = classify(error.words)
        self.control.tell(
            reports.CollectiveFailed(
                **self._ids,
                generation=generation,
                iteration=max(self.step_version, 0),
                error=bounded(f"{error.role}: {error.words}", "", WHY_CHARS_MAX, end=False),
                status=verdict.status,
                rule=verdict.rule,
                peer=verdict.peer,
            )
        )

    def _report_failed(self, failed: Failed) -> None:
        verdict = failed.verdict
        self.control.tell(
            reports.CollectiveFailed(
                **self._ids,
                generation=self.generation,
                iteration=self.step_version,
                error=bounded(failed.why, verdict.line, WHY_CHARS_MAX, end=False),
                status=verdict.status,
                rule=verdict.rule,
                peer=verdict.peer,
            )
        )

    def _exit_if_too_many_abandoned(self, outcome: Outcome) -> None:
        """Exit if too many abandoned collectives wait: at most one member after a step, whose state
        of this or the previous step its peers hold. A member does not exit if no peer holds its
        state, or if it is done."""
        num_members = self.communicators.num_members
        if (
            outcome.goes_on
            and self.step_version < self.train.iterations
            and self.axes.dp > 1
            and self.train.parallel.optimizer != "sharded"
            and self.step_version % num_members == self.communicators.place
            and self.control.has_too_many_abandoned
        ):
            self.control.exit_too_many_abandoned()

    def _report_progress(self) -> None:
        if self.communicators.place == 0:
            for report in self.history.tell(
                self.reported_to,
                task=self.start.task,
                generation=self.generation,
                micro_batches=self.train.num_micro_batches,
                flops=self.work.flops,
                skipped=training_state.num_skipped(self.trainee, self.step_version),
            ):
                self.control.tell(report)
            if self.history.end > self.reported_to:
                loss, step_s = self.history.last
                log.info(
                    "trained",
                    iteration=self.history.end,
                    of=self.train.iterations,
                    loss=round(loss, 4),
                    step_s=round(step_s, 3),
                    generation=self.generation,
                    dp=self.communicators.num_members,
                )
            self.reported_to = max(self.reported_to, self.history.end)
        self.reported_s = clock()

    def _current_stores(self) -> StoreOrder:
        order = self.control.keep
        if order is None or order.generation != self.generation:
            return self.stores
        return StoreOrder.of(order, self.start.slot.node)

    def _is_due(self, at: int, every: int) -> bool:
        """Whether a checkpoint is due after `at` iterations. The end has a save of its own."""
        return every > 0 and at % every == 0 and at < self.train.iterations

    def _all_positions(self) -> tuple[int, ...]:
        return tuple(range(num_positions(self.axes)))

    def _checkpoint(self, saving: tuple[int, ...], attempt: int = 0) -> Save:
        loss = self.history.spoilt_by
        return Save(self.generation, self.step_version, saving, self.rendezvous, loss, attempt)

    def _saver(self, form: Format, what: SaveKind) -> Saver:
        return Saver(
            form,
            what,
            self.start,
            tell=self.control.tell,
            note=self.trace.note,
            count=WorkCount(self.pulse.work),
        )

    def _own_saver(self) -> Saver:
        form = OwnFormat(self.train.checkpoint_every, self._owner, self.control.tell)
        return self._saver(form, "checkpoint")

    def _save_to(self, output: str) -> None:
        """An order may name another folder for Unicron's own checkpoints. An older save ends in
        the old one."""
        if output in ("", self._owner.output):
            return
        self._owner = replace(self._owner, output=output)
        local = output_owner.local_folder(output)
        if local is not None:
            with suppress(OSError):  # the next save reports it
                output_owner.claim(local, self._owner)
        self.savers[0].detach()  # it ends its save with the state of now
        self.savers[0] = self._own_saver()
        log.info("checkpoints go to another folder", output=output)

    def _save(self, saver: Saver, save: Save, *, final: bool) -> bool:
        """Save before returning; False if this failed. The first member waits for the others,
        unless there is an order to stop."""
        stops = ("now",) if final else ("now", "boundary")
        return saver.save(
            self.trainee,
            self.history,
            save,
            final=final,
            must_stop=lambda: self.control.pending_quiesce(self.generation) in stops,
        )

    def _save_final(self, saver: Saver, num_failures: int) -> bool:
        self.pulse.mark("boundary", OUTSIDE_CODE)
        # an order to save before the task leaves counts its attempts from 0 up
        save = self._checkpoint(self._all_positions(), -1 - num_failures)
        return self.is_standby or self._save(saver, save, final=True)

    def _hold_state(self, pause_s: float) -> None:
        """The final state could not be saved. Put it into the checkpoint stores, unless they have
        it, and wait."""
        self.pulse.mark("boundary", OUTSIDE_CODE)
        for saver in self.savers:
            saver.discard_leftover()
        stores = self._current_stores()
        if not self.is_standby and not self.copier.has_sent(
            self.generation, self.step_version, stores
        ):
            self._copy_now(self._all_positions())
        self.control.wait_for_quiesce(self.generation, pause_s)

    def _copy_now(self, saving: tuple[int, ...]) -> None:
        """Copy the state to the checkpoint stores, unless it is NaN or infinite."""
        if self.history.spoilt_by:
            return
        self.copier.copy_now(
            self.trainee,
            self.step_version,
            self.history,
            self.generation,
            self._current_stores(),
            saving,
        )

    def _finish(self) -> None:
        # The outcome of this second barrier does not matter. Without it, a member could exit while
        # another waits for the result of the first barrier. The other would then report a fault.
        self.iteration.beside.meet()
        for saver in self.savers:
            saver.wait()
        self.control.tell(
            reports.RankFinished(
                **self._ids,
                generation=self.generation,
                step_version=self.step_version,
                forward_calls=self.iteration.notes.forward_calls,
            )
        )

    # --- leaving --------------------------------------------------------------------------------
    def _leave(self, order: Quiesce | None = None) -> None:
        if self.joined:
            self.joined = False
            self.pulse.mark("left", OUTSIDE_CODE)
            self._tear_down()
        self._report_quiesced(order)

    def _tear_down(self) -> None:
        self.recovery.leave()
        self.communicators.down(self.trainee.roots)

    def _report_quiesced(self, order: Quiesce | None = None) -> None:
        """Save if ordered, and report Quiesced in reply to `order` or to a later order to stop."""
        order = self.control.discard_orders(self.generation) or order
        self._save_to(order.output if order is not None else "")
        if order is not None and order.save and self.start.rank in order.ranks:
            self._save_on_preemption(order, order.ranks.index(self.start.rank))
        self.control.tell(
            reports.Quiesced(
                **self._ids,
                generation=self.generation,
                step_version=self.step_version,
                micro_batches=self.iteration.part.kept,
                buckets_reduced=self.iteration.part.sum.num_complete,
                num_buckets=self.iteration.engine.gradients.num_buckets,
            )
        )

    def _save_on_preemption(self, order: Quiesce, index: int) -> None:
        """Save on disk and in memory, if the `index`-th rank of the order does."""
        saving = order.saving
        if len(saving) <= 1 and self.trainee.is_plain:
            saving = (self.trainee.place,)  # alone, whatever its position
        if index >= len(saving) or self.step_version == NO_STATE:
            return
        if saving[index] == self.trainee.place and can_save(self.trainee, saving):
            self._copy_now(saving)
            save = self._checkpoint(saving, order.save_attempt)
            self._save(self.savers[0], save, final=False)
        else:
            log.warning(
                "checkpoint not saved",
                iteration=self.step_version,
                why=f"this member has the state of position {self.trainee.place} of "
                f"{layout_in_words(self.trainee.axes)}, not of {saving[index]}",
            )
