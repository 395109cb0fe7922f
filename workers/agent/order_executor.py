"""Executes the node's orders: starts, stops and signals ranks, and reports what they do."""

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Struct, msgpack

from ...events import object_storage
from ...events.decoding import from_msgpack
from ...events.log.identity import StoreKeys
from ...events.records import orders, reports
from ...events.records.codec import UnknownBody
from ...events.records.envelope import Record
from ...events.records.types import Body
from ...events.shortage import errno_of, outlast
from ...events.timing import REAP_S_MAX, STACKS_S_MAX, STOP_GRACE_S
from ..host import linux
from ..ipc.pipe_protocol import Adopted, Frame, MayAbort, WillAbort
from ..ipc.progress_page import ProgressPage
from ..ipc.violation import Violation
from .checkpoint_store import CheckpointStore
from .delivery.outbox import Put
from .delivery.spool import NO_SLOT, Spool
from .monitoring import kept_stacks
from .monitoring.flight_recorder_dumps import Dumps, DumpTrigger, request_dumps
from .monitoring.output_reader import OutputReaders
from .monitoring.rank_monitor import RankMonitors
from .processes.exit_report import ExitReporter, OomLookup, clipped
from .processes.launcher import MARKER, Launcher, NodeConfig, environment, key_of
from .processes.pipe import Pipe
from .processes.process import Exit, Process
from .processes.rank_guard import Key, Part, RankGuard
from .processes.rank_process import RankAttempt, RankNote, Redactor
from .processes.report_limits import ReportLimits
from .processes.shim import Shim
from .publish import Publisher, PublishRefused, Superseded

FLOOD_PAUSE_S = 0.05
"""After a report above its rate, the pipe of this rank is not read for so long: with the pipe's
buffer of some 200 kB, a flood costs the agent little of a core."""

_ORDERS = "orders"
_log = structlog.get_logger("agent")


class _OrdersNote(Struct, frozen=True):
    """What the journal has of orders: the last one that was carried out, and the StartRanks up to
    it whose process has not started. `epoch` is that of the last one; 0: unknown, for an agent of
    0.3.0 has written the note."""

    last: int = 0
    starts: tuple[int, ...] = ()
    epoch: int = 0


class OrderExecutor:
    """Owns all ranks of the node. `report` spools a body; `group` owns one task per rank. `clock`
    gives seconds since 1970. `journal` has the notes of a former agent. `lost`: as in Launcher."""

    def __init__(
        self,
        node: NodeConfig,
        report: Put,
        group: asyncio.TaskGroup,
        store: CheckpointStore,
        clock: Callable[[], float],
        shim: Shim,
        journal: Spool,
        killed: OomLookup | None = None,
        lost: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._node = node
        self._store = store
        self._starter = Launcher(node, shim, lost)
        self._report = report
        self._journal = journal
        note = journal.notes.get(_ORDERS)
        former = from_msgpack(note, _OrdersNote) if note is not None else _OrdersNote()
        self._former = self._last = former.epoch, former.last
        self._unstarted = set(former.starts)
        """Of the former agent's StartRanks, those that were not read again yet."""
        self.readers = OutputReaders(self._on_monitor_report, self._guard, is_on=node.watch)
        self._dump_trigger = DumpTrigger(self.dump)
        self.watch = RankMonitors(self._on_monitor_report, self._guard, is_on=node.watch)
        self._group = group
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._slots = [asyncio.Lock() for _ in range(node.num_slots)]
        self._ranks: dict[Key, RankAttempt] = {}
        self._publisher = Publisher(node.cluster, node.run_as, node.cluster_id)
        self._exit_reporter = ExitReporter(killed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def pids(self) -> set[int]:
        """The processes that the executor reaps itself."""
        return {rank.process.pid for rank in self._ranks.values() if rank.process is not None}

    def execute(
        self, record: Record, store_keys: StoreKeys, *, stale: bool = False, again: bool = False
    ) -> None:
        """Execute one order, or what is left of it if a former agent of this incarnation has.
        `stale`: the order is older than this incarnation's NodeJoined. `again`: it may be, and an
        earlier incarnation may have answered it."""
        if (record.epoch if self._former[0] else 0, record.seq) > self._former:
            self._execute(record, store_keys, stale, again)
            self._last = record.epoch, record.seq
            self._note_orders()
            return
        match record.body:
            case orders.StartRank() as order if record.seq in self._unstarted:
                self._unstarted.discard(record.seq)
                self._start(order, record, store_keys)
            case orders.StopRank() as order:
                if (rank := self._ranks.get((order.task, order.rank, order.attempt))) is not None:
                    self._end(rank, order)
            case orders.PublishCheckpoint():
                self._execute(record, store_keys, stale, again=True)
            case _:
                pass

    def adopt(self) -> None:
        """Continue with the ranks of a former agent. Call it before the first order."""
        for frame, process, files in self._starter.held():
            order = frame.body
            assert isinstance(order, orders.StartRank)
            rank = self._attempt(order, frame)
            self._unstarted.discard(frame.seq)
            note, rank.is_adopted = self._journal.notes.get(key_of(order)), True
            if note is not None:
                rank.note = from_msgpack(note, RankNote)
            pipe = self._pipe(rank, files.pop(0)) if order.spec.training is not None else None
            self._begin(rank, process, pipe, ProgressPage(files.pop(0)) if files else None)
            if note is None:  # its start was not reported
                self._announce(rank, process)
            if rank.note.fault:
                process.signal_group(signal.SIGKILL)
            if rank.note.followed and process.follow(rank.note.followed):
                self.watch.adopted(order, rank.note.followed)
            _log.info("adopted a rank", task=order.task, rank=order.rank, pid=process.pid)
        known = {key_of(rank.order) for rank in self._ranks.values()}
        for key in list(self._journal.notes):
            if key[0].isdecimal() and key not in known:
                self._journal.note(key, None)

    def _note_orders(self) -> None:
        starts = {
            rank.frame.seq
            for rank in self._ranks.values()
            if rank.process is None and not rank.is_withdrawn
        }
        self._journal.note(
            _ORDERS,
            msgpack.encode(
                _OrdersNote(
                    epoch=self._last[0],
                    last=self._last[1],
                    starts=tuple(sorted(starts | self._unstarted)),
                )
            ),
        )

    def _note(self, rank: RankAttempt) -> tuple[str, bytes]:
        return key_of(rank.order), msgpack.encode(rank.note)

    def _execute(self, record: Record, store_keys: StoreKeys, stale: bool, again: bool) -> None:
        match record.body:
            case orders.StartRank() as order:
                if not stale and order.incarnation in (0, self._node.incarnation):
                    self._start(order, record, store_keys)
            case orders.StopRank() as order:
                rank = self._ranks.get((order.task, order.rank, order.attempt))
                if rank is not None:
                    self._end(rank, order)
                elif not stale:
                    # Its StartRank was withdrawn before it could arrive, or the rank has exited.
                    self._refuse(record.seq, "there is no such rank")
            case orders.Quiesce() as order:
                ranks = [rank for rank in self._of(order.task) if rank.order.rank in order.ranks]
                self._expect(ranks, order.tell_s)
                self._forward(record, store_keys, ranks)
            case orders.Reconfigure() as order:
                members = {(m.rank, m.attempt) for m in order.members if m.node == self._node.name}
                ranks = [
                    rank
                    for rank in self._of(order.task)
                    if (rank.order.rank, rank.order.attempt) in members
                ]
                for rank in ranks:
                    rank.note.generation = max(rank.note.generation, order.generation)
                    self._journal.note(*self._note(rank))
                self._expect(ranks, order.tell_s)
                self._forward(record, store_keys, ranks)
            case orders.Resume() | orders.SetCheckpointStores() as order:
                self._forward(
                    record,
                    store_keys,
                    [
                        rank
                        for rank in self._of(order.task)
                        if rank.note.generation == order.generation
                    ],
                )
            case orders.DropMemoryCheckpoints() as order:
                self._store.forget(order.task)
                self._report(
                    reports.MemoryCheckpointsLost(
                        node=self._node.name,
                        incarnation=self._node.incarnation,
                        task=order.task,
                        why="the task has ended",
                        keeper_start=self._store.start,
                        order=record.seq,
                    ),
                    None,
                )
            case orders.PublishCheckpoint() as order:
                self._spawn_task(self._publish(order, record, again), f"publish {record.seq}")
            case orders.InjectFault() as order:
                # A later incarnation reads the order too; it must not inject the fault again.
                if order.incarnation == self._node.incarnation:
                    self._inject_fault(order, record.seq)
            case UnknownBody() as order:
                self._refuse(
                    record.seq,
                    f"this agent does not know the order {order.kind}: "
                    f"{order.why or 'its kind is newer'}; start a newer agent",
                )
            case other:
                self._refuse(record.seq, f"{type(other).__name__} is not an order")

    def look(self) -> None:
        """Report each rank that was stopped or continued since. 25 us a rank (measured)."""
        self._exit_reporter.look()
        for rank in self._ranks.values():
            self._report_dropped(rank)
            process, order = rank.process, rank.order
            is_stopped = process.is_stopped() if process is not None else None
            if process is None or is_stopped in (None, rank.note.is_suspended):
                continue
            rank.note.is_suspended = not rank.note.is_suspended
            kind = reports.RankSuspended if rank.note.is_suspended else reports.RankContinued
            self._report(
                kind(task=order.task, rank=order.rank, attempt=order.attempt, pid=process.pid),
                None,
                NO_SLOT,
                self._note(rank),
            )

    def _on_monitor_report(self, body: Body, occurred_s: float | None) -> None:
        key: Key = (
            getattr(body, "task", 0),
            getattr(body, "rank", -1),
            getattr(body, "attempt", 0),
        )
        note = None
        if (rank := self._ranks.get(key)) is not None:
            if isinstance(body, reports.RankStalled | reports.RankUnstalled):
                rank.note.is_stalled = isinstance(body, reports.RankStalled)
            rank.note.log_at = self.readers.reported_at(key) or rank.note.log_at
            note = self._note(rank)
        self._report(body, occurred_s, NO_SLOT, note)
        self._dump_trigger.on_report(body)

    def dump(self, task: int) -> Dumps:
        """Request flight recorder dumps from the task's training ranks on this node."""
        return request_dumps((rank.order.rank, rank.process, rank.pipe) for rank in self._of(task))

    async def stop_all(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop every rank. Return when ranks and publications have ended, or after the limit."""
        self._stopping = True
        self._publisher.stop()
        for rank in list(self._ranks.values()):
            self._continue(rank)  # a stopped process would not handle SIGTERM
            self._stop(rank, grace_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s + REAP_S_MAX)

    def kill_all(self) -> None:
        """Send SIGKILL to every process group and cancel all tasks; does not wait."""
        self._stopping = True
        for rank in self._ranks.values():
            if rank.process is not None:
                rank.process.signal_group(signal.SIGKILL)
        self._publisher.stop()
        for task in self._tasks:
            task.cancel()

    def end(self) -> None:
        """End all processes of the node, with the shim."""
        self._starter.end()

    # --- orders ---------------------------------------------------------------------------------
    def _spawn_task(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _expect(self, ranks: list[RankAttempt], tell_s: float) -> None:
        for rank in ranks:
            self.watch.expect(rank.key, tell_s)

    def _of(self, task: int) -> list[RankAttempt]:
        return [rank for rank in self._ranks.values() if rank.order.task == task]

    def _start(self, order: orders.StartRank, record: Record, store_keys: StoreKeys) -> None:
        slot = order.slot
        if slot.node != self._node.name or not 0 <= slot.index < self._node.num_slots:
            self._refuse(record.seq, f"slot {slot.node}/{slot.index} is not on this node")
            return
        if self._stopping:
            self._refuse(record.seq, "the agent is stopping")
            return
        for other in self._of(order.task):
            if other.order.rank == order.rank:
                if other.order.attempt >= order.attempt:
                    return  # a repeated order, or one superseded by a later attempt
                self._stop(other, 0.0)  # a lower attempt of the same rank is fenced
        self._attempt(
            order, Frame(body=order, seq=record.seq, epoch=record.epoch, store_keys=store_keys)
        )

    def _attempt(self, order: orders.StartRank, frame: Frame) -> RankAttempt:
        rank = RankAttempt(
            order,
            frame,
            ReportLimits(order, self._clock, self._loop.time),
            Redactor(environment(order, self._node, os.environ), self._node.redact),
        )
        self._ranks[rank.key] = rank
        self._spawn_task(
            self._run_rank(rank), f"task {order.task} rank {order.rank}.{order.attempt}"
        )
        return rank

    def _end(self, rank: RankAttempt, order: orders.StopRank) -> None:
        """End a rank; keep what it does first, if the order says so and it is the first one."""
        is_alive = rank.process is not None and not rank.process.has_ended
        if order.keeps_stacks and is_alive and rank.stop_at is None and not rank.is_kept:
            rank.is_kept = True
            name = f"stacks of task {order.task} rank {order.rank}.{order.attempt}"
            self._spawn_task(self._keep_and_stop(rank, order.grace_s), name)
        else:
            self._stop(rank, order.grace_s)

    async def _keep_and_stop(self, rank: RankAttempt, grace_s: float) -> None:
        """Whatever goes wrong with its stacks, the rank is ended in time."""
        mark = self.watch.mark_in_words(rank.key)
        variables = environment(rank.order, self._node, os.environ)
        keeping = asyncio.ensure_future(kept_stacks.keep(rank, mark, self._node.run_as, variables))
        try:
            await asyncio.wait((keeping,), timeout=STACKS_S_MAX)
            if keeping.done():
                self._report(keeping.result(), None)
        except (OSError, ValueError, RuntimeError) as error:
            _log.warning("what a rank did is not kept", rank=rank.order.rank, why=str(error))
        finally:
            keeping.cancel()
            self._stop(rank, grace_s)

    def _stop(self, rank: RankAttempt, grace_s: float) -> None:
        stop_at = self._loop.time() + grace_s
        if rank.process is None:
            if not rank.is_withdrawn:
                rank.is_withdrawn = True
                order = rank.order
                self._report(
                    reports.RankExited(
                        task=order.task,
                        rank=order.rank,
                        attempt=order.attempt,
                        pid=0,
                        exit_code=None,
                        signal=int(signal.SIGTERM),
                        tail="stopped before its start",
                    ),
                    None,
                )
            return
        if rank.stop_at is None or stop_at < rank.stop_at:
            rank.stop_at = stop_at
            rank.process.signal_group(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
            rank.stop.set()

    def _forward(self, record: Record, store_keys: StoreKeys, ranks: list[RankAttempt]) -> None:
        for rank in ranks:
            sent = rank.pipe is not None and rank.pipe.send(
                Frame(body=record.body, seq=record.seq, epoch=record.epoch, store_keys=store_keys)
            )
            if not sent and rank.process is not None and not rank.process.has_ended:
                self._refuse(record.seq, f"rank {rank.order.rank} does not read its pipe")

    def _refuse(self, seq: int, why: str, errno: str = "") -> None:
        _log.warning("order refused", order=seq, why=why)
        self._report(
            reports.OrderRefused(node=self._node.name, order=seq, why=why, errno=errno), None
        )

    # --- fault injection ------------------------------------------------------------------------
    def _inject_fault(self, order: orders.InjectFault, seq: int) -> None:
        _log.warning("injects a fault", what=order.what, task=order.task, rank=order.rank)
        if order.what == "node":
            self._crash_node()
        rank = self._ranks.get((order.task, order.rank, order.attempt))
        if rank is None or rank.process is None or rank.process.has_ended:
            self._refuse(seq, "there is no such rank")
        elif order.what == "rank":
            rank.process.signal_group(signal.SIGKILL)
        else:
            self._continue(rank)  # the last order sets the duration
            rank.process.signal_group(signal.SIGSTOP)
            if order.stop_s > 0:
                rank.continue_timer = self._loop.call_later(order.stop_s, self._continue, rank)

    def _continue(self, rank: RankAttempt) -> None:
        """Continue a rank that an injected fault has stopped; does nothing for other ranks."""
        if rank.continue_timer is not None and rank.process is not None:
            rank.continue_timer.cancel()
            rank.continue_timer = None
            rank.process.signal_group(signal.SIGCONT)

    def _crash_node(self) -> NoReturn:
        """Simulate a lost node: kill all ranks and the agent without a report."""
        linux.kill_marked(f"{MARKER}={self._node.mark}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive after SIGKILL")

    # --- life cycle of a rank -------------------------------------------------------------------
    async def _run_rank(self, rank: RankAttempt) -> None:
        order = rank.order
        try:
            async with self._slots[order.slot.index]:
                if not rank.is_adopted:
                    await self._starter.prepare(order)
                if rank.is_adopted or (not rank.is_withdrawn and self._spawn(rank)):
                    await self._watch(rank)
        finally:
            del self._ranks[rank.key]
            self._let_abort(order.task, rank.note.generation)
            self._note_orders()

    def _spawn(self, rank: RankAttempt) -> bool:
        """Start the process. If the system refuses, report OrderRefused and return False."""
        order = rank.order
        pipe: Pipe | None = None
        page: ProgressPage | None = None
        try:
            if order.spec.training is not None:
                pipe = self._pipe(rank)
            page = self.watch.open(order)
            process = self._starter.start(order, rank.frame, pipe, page)
        except (OSError, ValueError, MemoryError) as error:
            for end in (pipe, page):
                if end is not None:
                    end.close()
            program = next(iter(order.spec.command), "a rank")
            why = str(error) or "out of memory"
            self._refuse(rank.frame.seq, f"cannot start {program}: {why}", errno_of(error))
            return False
        self._begin(rank, process, pipe, page)
        self._announce(rank, process)
        self._note_orders()
        return True

    def _pipe(self, rank: RankAttempt, fd: int = -1) -> Pipe:
        return Pipe(
            lambda frame: self._on_frame(rank, frame),
            lambda: self._guard(rank.key, "pipe"),
            rank.limits.bytes_max,
            fd,
        )

    def _begin(
        self, rank: RankAttempt, process: Process, pipe: Pipe | None, page: ProgressPage | None
    ) -> None:
        """Monitor a process that runs."""
        order, note = rank.order, rank.note
        rank.process, rank.pipe = process, pipe
        self.watch.begin(
            order, page, process.pid, is_stalled=note.is_stalled, is_adopted=rank.is_adopted
        )
        rank.memory = self._exit_reporter.watch(process.pid)
        if order.spec.command and not (note.is_ready or note.fault):
            self.readers.begin(
                order,
                process.log_path,
                process.log_start,
                process.pid,
                log_at=note.log_at,
                is_stalled=note.is_stalled,
            )
        if pipe is not None:
            pipe.started()

    def _announce(self, rank: RankAttempt, process: Process) -> None:
        order = rank.order
        if rank.pipe is not None:
            rank.pipe.send(rank.frame)
        self._report(
            reports.RankStarted(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                node=self._node.name,
                pid=process.pid,
                log_path=str(process.log_path),
            ),
            None,
            NO_SLOT,
            self._note(rank),
        )

    async def _watch(self, rank: RankAttempt) -> None:
        process = rank.process
        assert process is not None
        try:
            await outlast(
                partial(self._see_end, rank, process),
                lambda why: _log.warning(
                    "the end of a process is looked at again", pid=process.pid, why=why
                ),
            )
            process.reap()  # only now: without its report, the next agent finds it again
        finally:
            if rank.continue_timer is not None:
                rank.continue_timer.cancel()
            process.signal_group(signal.SIGKILL)
            process.close()
            self._journal.note(key_of(rank.order), None)
            self.readers.drop(rank.order)
            self.watch.drop(rank.order)
            if rank.pipe is not None:
                rank.pipe.close()

    async def _see_end(self, rank: RankAttempt, process: Process) -> None:
        """Wait for the end of the process and of all its descendants; report it once."""
        how = await rank.until_end()
        # An unexpected exit of a training rank is reported before its children are cleaned up:
        # other ranks wait for the report, and a busy node takes longer to find the children.
        if not rank.note.is_exit_reported and rank.pipe is not None and rank.stop_at is None:
            process.signal_group(signal.SIGKILL)
            await self._report_exit(rank, process, how)
        elif rank.stop_at is not None:  # the grace period covers the whole process group
            await process.wait_group(max(0.0, rank.stop_at - self._loop.time()))
        is_gone = await process.end_group(REAP_S_MAX, reap=False)
        if not rank.note.is_exit_reported:
            await self._report_exit(rank, process, how)
        while not is_gone:
            _log.error("a process survives SIGKILL; its slot stays occupied", pid=process.pid)
            is_gone = await process.end_group(60.0, reap=False)

    async def _report_exit(self, rank: RankAttempt, process: Process, how: Exit) -> None:
        if rank.pipe is not None:
            rank.pipe.drain()  # its last reports come before its exit
            self._report_dropped(rank, is_last=True)
        with self._guard(rank.key, "output"):
            self.readers.end(rank.order)
        exited = None
        with self._guard(rank.key, "exit"):
            exited = await self._exit_reporter.report(
                rank.order,
                process,
                how,
                rank.memory,
                error=rank.note.error,
                known=rank.why_ended,
                redact=rank.redactor.text,
            )
        if exited is None:
            exited = self._exit_reporter.report_without_output(
                rank.order, process, how, rank.why_ended
            )
        rank.note.is_exit_reported = True
        self._report(exited, None, NO_SLOT, self._note(rank))

    # --- reports of ranks -----------------------------------------------------------------------
    def _on_frame(self, rank: RankAttempt, frame: Frame) -> None:
        if frame.seq and frame.seq <= rank.note.frames:
            return  # a former agent has taken it
        rank.note.frames = frame.seq
        if rank.note.fault:
            return  # it has broken the protocol: nothing that it sends counts any more
        is_record = not isinstance(frame.body, (Adopted, WillAbort))
        if is_record and (why := rank.limits.violation(frame)):
            raise Violation(why)
        if not rank.limits.admits(frame):
            if rank.pipe is not None:
                rank.pipe.pause(FLOOD_PAUSE_S)
            return
        if isinstance(frame.body, Adopted):
            self._on_adopted(rank, frame.body.pid)
            return
        if isinstance(frame.body, WillAbort):
            rank.will_abort = max(rank.will_abort, frame.body.generation)
            self._let_abort(rank.order.task, frame.body.generation)
            return
        body = rank.redactor.body(frame.body)
        if isinstance(body, reports.RankErrored):
            rank.note.error = body
        if isinstance(body, reports.RankReady):
            # It reports its iterations itself. The rank that prints Megatron's lines may change.
            self.readers.drop(rank.order)
            rank.note.is_ready = True
        if rank.process is not None and isinstance(
            body, (reports.RankFinished, reports.InMemoryRecoveryDeclined)
        ):
            rank.process.unfollow()  # from now on only the exit of the command counts
            rank.note.followed = 0
        self._report(
            body, rank.limits.occurred_s(frame.at_s), rank.order.slot.index, self._note(rank)
        )

    def _on_adopted(self, rank: RankAttempt, pid: int) -> None:
        """A process may say so twice: before it imports anything (0), and when it connects."""
        if pid:
            if rank.process is None or not rank.process.follow(pid):
                return
            self.watch.adopted(rank.order, pid)
            rank.note.followed = pid
        if rank.note.has_adopted:
            self._journal.note(*self._note(rank))
            return
        rank.note.has_adopted, order = True, rank.order
        self._report(
            reports.RankAdopted(task=order.task, rank=order.rank, attempt=order.attempt),
            None,
            order.slot.index,
            self._note(rank),
        )

    def _let_abort(self, task: int, generation: int) -> None:
        """Once all living ranks of a generation here are about to abort, tell them so. NCCL frees
        memory that the other ranks of the node may still use (NVIDIA/nccl#863)."""
        there = [
            rank
            for rank in self._of(task)
            if rank.note.generation == generation
            and rank.process is not None
            and not rank.process.has_ended
        ]
        if generation and all(rank.will_abort >= generation for rank in there):
            for rank in there:
                if rank.pipe is not None:
                    rank.pipe.send(Frame(body=MayAbort(generation=generation)))

    def _report_dropped(self, rank: RankAttempt, *, is_last: bool = False) -> None:
        if (dropped := rank.limits.take_dropped(is_last=is_last)) is not None:
            _log.warning(
                "a rank reports too much",
                rank=rank.order.rank,
                task=rank.order.task,
                num_dropped=dropped.num_dropped,
            )
            self._report(dropped, None)

    def _guard(self, key: Key, part: Part) -> RankGuard:
        return RankGuard(self._end_faulty, key, part)

    def _end_faulty(self, key: Key, why: str) -> None:
        """Kill a rank that violates the protocol; it is restarted like any failed rank. Nothing
        that it says counts any more."""
        rank = self._ranks.get(key)
        if rank is None or rank.note.fault:
            return
        _log.error("a rank violated the protocol", task=key[0], rank=key[1], why=clipped(why))
        rank.note.fault = clipped(f"killed by its agent: {why}")
        self._journal.note(*self._note(rank))
        if rank.process is not None:
            rank.process.signal_group(signal.SIGKILL)
        if rank.pipe is not None:
            rank.pipe.close()
        self.readers.drop(rank.order)
        self.watch.drop(rank.order)

    def _refuse_publication(
        self, order: orders.PublishCheckpoint, record: Record, error: PublishRefused
    ) -> None:
        why = f"checkpoint not published: {error}"
        _log.warning("order refused", order=record.seq, why=why)
        self._report(
            reports.OrderRefused(
                node=self._node.name,
                order=record.seq,
                why=why,
                errno=object_storage.errno_name(error),
                task=order.task,
            ),
            None,
        )

    # --- checkpoints ----------------------------------------------------------------------------
    async def _publish(self, order: orders.PublishCheckpoint, record: Record, again: bool) -> None:
        try:
            await self._publisher.publish(order, record)
        except Superseded as error:
            if not again:  # else the incarnation that executed the later order answers both
                self._refuse_publication(order, record, error)
        except PublishRefused as error:
            self._refuse_publication(order, record, error)
        else:
            self._report(
                reports.CheckpointPublished(task=order.task, order=record.seq, path=order.path),
                None,
            )
            if order.remove:
                self._publisher.begin_removal(order, self._group)
