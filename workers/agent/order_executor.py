"""The ranks of one node: orders become processes, and what processes do becomes reports."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import NoReturn

import structlog

from ...events.records import reports
from ...events.records.envelope import Record
from ...events.records.orders import (
    DropMemoryCheckpoints,
    InjectFault,
    PublishCheckpoint,
    Quiesce,
    Reconfigure,
    Resume,
    SetCheckpointStores,
    StartRank,
    StopRank,
)
from ...events.records.reports import (
    CheckpointPublished,
    InMemoryRecoveryDeclined,
    MemoryCheckpointsLost,
    OrderRefused,
    RankContinued,
    RankErrored,
    RankExited,
    RankFinished,
    RankStarted,
    RankSuspended,
)
from ...events.records.types import Body
from ..host import linux
from ..ipc.pipe_protocol import Adopted, Frame
from .checkpoint_store import Keeper
from .monitoring.flight_recorder_dumps import Asker, Dumps, ask
from .monitoring.output_monitor import USUAL
from .monitoring.output_reader import Readers
from .monitoring.rank_monitor import Watch
from .processes.exit_report import Ends, Killed
from .processes.launcher import MARK, Node, Starter
from .processes.pipe import Pipe
from .processes.process import Exit, Process
from .processes.rank_process import Attempt
from .publish import Overtaken, Publisher, Refused

STOP_GRACE_S = 5.0
"""Given to each rank when its agent stops."""
REAP_S_MAX = 5.0
"""Until the end is told of a rank of which something lives all the same; its slot stays taken."""

RANK_SAYS = (reports.RankReady, RankErrored, reports.CollectiveFailed, reports.Quiesced,
             reports.Reconfigured, reports.ReconfigureFailed, reports.TaskProgressed,
             reports.LossNotFinite, reports.MemoryCheckpointStored, reports.CheckpointSaved,
             RankFinished, InMemoryRecoveryDeclined)
"""The kinds that a rank may send through its pipe; the agent forwards them unchanged."""
_log = structlog.get_logger("agent")


class Ranks:
    """All ranks of the node. `report` spools a body; `group` owns one task per rank."""

    def __init__(self, node: Node, report: Callable[[Body, float | None], None],
                 group: asyncio.TaskGroup, keeper: Keeper, killed: Killed | None = None) -> None:
        self._node = node
        self._keeper = keeper
        self._starter = Starter(node)
        self._report = report
        self.readers = Readers(report, USUAL if node.watch else None)
        self._asker = Asker(self.dump)
        self.watch = Watch(self._noticed, is_on=node.watch)
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._slots = [asyncio.Lock() for _ in range(node.num_slots)]
        self._ranks: dict[tuple[int, int, int], Attempt] = {}
        self._publisher = Publisher(node.cluster)
        self._ends = Ends(killed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def pids(self) -> set[int]:
        """The processes that this room reaps itself."""
        return {rank.process.pid for rank in self._ranks.values() if rank.process is not None}

    def obey(self, record: Record, *, stale: bool = False, again: bool = False) -> None:
        """Carry out one order.

        `stale`: it was given before this agent had joined. `again`: it may have been, and then a
        predecessor may have answered it.
        """
        match record.body:
            case StartRank() as order:
                if not stale and order.incarnation in (0, self._node.incarnation):
                    self._start(order, record)
            case StopRank() as order:
                rank = self._ranks.get((order.task, order.rank, order.attempt))
                if rank is not None:
                    self._stop(rank, order.grace_s)
                elif not stale:
                    # Its StartRank never came here (cut off, then withdrawn), or its end is told.
                    self._refuse(record.seq, "there is no such rank")
            case Quiesce() as order:
                self._forward(record, [rank for rank in self._of(order.task)
                                       if rank.order.rank in order.ranks])
            case Reconfigure() as order:
                members = {(m.rank, m.attempt) for m in order.members
                           if m.node == self._node.name}
                ranks = [rank for rank in self._of(order.task)
                         if (rank.order.rank, rank.order.attempt) in members]
                for rank in ranks:
                    rank.generation = max(rank.generation, order.generation)
                self._forward(record, ranks)
            case Resume() | SetCheckpointStores() as order:
                self._forward(record, [rank for rank in self._of(order.task)
                                       if rank.generation == order.generation])
            case DropMemoryCheckpoints() as order:
                self._keeper.forget(order.task)
                self._report(MemoryCheckpointsLost(
                    node=self._node.name, incarnation=self._node.incarnation, task=order.task,
                    why="the task has ended", keeper_start=self._keeper.start,
                    order=record.seq), None)
            case PublishCheckpoint() as order:
                self._do(self._publish(order, record, again), f"publish {record.seq}")
            case InjectFault() as order:
                # Who reads it again is another one: this order is not to break it anew.
                if order.incarnation == self._node.incarnation:
                    self._break(order, record.seq)
            case other:
                self._refuse(record.seq, f"{type(other).__name__} is no order")

    def look(self) -> None:
        """Tell of each rank whose process was stopped, or goes on, since the last look.

        About 25 us for each of them (measured).
        """
        self._ends.look()
        for rank in self._ranks.values():
            process, order = rank.process, rank.order
            is_stopped = process.is_stopped() if process is not None else None
            if process is None or is_stopped in (None, rank.is_suspended):
                continue
            rank.is_suspended = not rank.is_suspended
            kind = RankSuspended if rank.is_suspended else RankContinued
            self._report(kind(task=order.task, rank=order.rank, attempt=order.attempt,
                              pid=process.pid), None)

    def _noticed(self, body: Body, occurred_s: float | None) -> None:
        self._report(body, occurred_s)
        self._asker.heed(body)

    def dump(self, task: int) -> Dumps:
        """Ask the task's training ranks here for their flight recorders (dumps.py)."""
        return ask((rank.order.rank, rank.process, rank.pipe) for rank in self._of(task))

    async def stop_all(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every rank and publication; returns when all is done, or after their limits."""
        self._stopping = True
        for rank in list(self._ranks.values()):
            self._go_on(rank)  # or it would hear of its end by SIGKILL alone
            self._stop(rank, grace_s)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s + REAP_S_MAX)

    def kill_all(self) -> None:
        """SIGKILL every group and give up all that is under way; waits for nothing."""
        self._stopping = True
        self._starter.close()
        for rank in self._ranks.values():
            if rank.process is not None:
                rank.process.signal_group(signal.SIGKILL)
        for task in self._tasks:
            task.cancel()

    # --- orders ---------------------------------------------------------------------------------
    def _do(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _of(self, task: int) -> list[Attempt]:
        return [rank for rank in self._ranks.values() if rank.order.task == task]

    def _start(self, order: StartRank, record: Record) -> None:
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
                    return  # told twice, or overtaken
                self._stop(other, 0.0)  # a lower attempt of the same rank is fenced
        rank = Attempt(order, record.seq, record.epoch)
        self._ranks[order.task, order.rank, order.attempt] = rank
        self._do(self._live(rank), f"task {order.task} rank {order.rank}.{order.attempt}")

    def _stop(self, rank: Attempt, grace_s: float) -> None:
        stop_at = self._loop.time() + grace_s
        if rank.process is None:
            if not rank.never:
                rank.never = True
                order = rank.order
                self._report(RankExited(
                    task=order.task, rank=order.rank, attempt=order.attempt, pid=0, exit_code=None,
                    signal=int(signal.SIGTERM), tail="stopped before its start"), None)
            return
        if rank.stop_at is None or stop_at < rank.stop_at:
            rank.stop_at = stop_at
            rank.process.signal_group(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
            rank.stop.set()

    def _forward(self, record: Record, ranks: list[Attempt]) -> None:
        for rank in ranks:
            sent = rank.pipe is not None and rank.pipe.send(
                Frame(body=record.body, seq=record.seq, epoch=record.epoch))
            if not sent and rank.process is not None and not rank.process.has_ended:
                self._refuse(record.seq, f"rank {rank.order.rank} does not read its pipe")

    def _refuse(self, seq: int, why: str) -> None:
        _log.warning("order refused", order=seq, why=why)
        self._report(OrderRefused(node=self._node.name, order=seq, why=why), None)

    # --- broken on purpose ----------------------------------------------------------------------
    def _break(self, order: InjectFault, seq: int) -> None:
        _log.warning("broken on purpose", what=order.what, task=order.task, rank=order.rank)
        if order.what == "node":
            self._die()
        rank = self._ranks.get((order.task, order.rank, order.attempt))
        if rank is None or rank.process is None or rank.process.has_ended:
            self._refuse(seq, "there is no such rank")
        elif order.what == "rank":
            rank.process.signal_group(signal.SIGKILL)
        else:
            self._go_on(rank)  # the last order says for how long
            rank.process.signal_group(signal.SIGSTOP)
            if order.stop_s > 0:
                rank.going_on = self._loop.call_later(order.stop_s, self._go_on, rank)

    def _go_on(self, rank: Attempt) -> None:
        """Continue a rank that was stopped on purpose for some time; nothing for another."""
        if rank.going_on is not None and rank.process is not None:
            rank.going_on.cancel()
            rank.going_on = None
            rank.process.signal_group(signal.SIGCONT)

    def _die(self) -> NoReturn:
        """As a node that is lost: everything at once, and nothing is told."""
        linux.end_marked(f"{MARK}={self._node.mark}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives after SIGKILL")

    # --- a rank's life --------------------------------------------------------------------------
    async def _live(self, rank: Attempt) -> None:
        order = rank.order
        try:
            async with self._slots[order.slot.index]:
                await self._starter.prepare(order)
                if not rank.never and self._spawn(rank):
                    await self._watch(rank)
        finally:
            del self._ranks[order.task, order.rank, order.attempt]

    def _spawn(self, rank: Attempt) -> bool:
        """Start the process; False, and OrderRefused, if the system does not let us."""
        order = rank.order
        pipe: Pipe | None = None
        if order.spec.training is not None:
            pipe = Pipe(lambda frame: self._heard(rank, frame),
                        lambda why: self._broken(rank, why))
        page = self.watch.open(order)
        try:
            process = self._starter.start(order, pipe, page)
        except (OSError, ValueError) as error:
            for end in (pipe, page):
                if end is not None:
                    end.close()
            program = next(iter(order.spec.command), "a rank")
            self._refuse(rank.seq, f"cannot start {program}: {error}")
            return False
        rank.process, rank.pipe = process, pipe
        self.watch.begin(order, page, process.pid)
        rank.memory = self._ends.watch(process.pid)
        if order.spec.command:
            self.readers.begin(order, process.log_path, process.log_start, process.pid)
        self._report(RankStarted(task=order.task, rank=order.rank, attempt=order.attempt,
                                 node=self._node.name, pid=process.pid,
                                 log_path=str(process.log_path)), None)
        if pipe is not None:
            pipe.started()
            pipe.send(Frame(body=order, seq=rank.seq, epoch=rank.epoch))
        return True

    async def _watch(self, rank: Attempt) -> None:
        process = rank.process
        assert process is not None
        try:
            how = await rank.until_end()
            # A training rank whose end nobody expected is told at once: others wait for that word,
            # and to look for what it left takes the longer the more processes there are.
            is_told = rank.pipe is not None and rank.stop_at is None
            if is_told:
                process.signal_group(signal.SIGKILL)
                await self._ended(rank, process, how)
            elif rank.stop_at is not None:  # told to stop: the rest of its group has its grace too
                await process.wait_group(max(0.0, rank.stop_at - self._loop.time()))
            is_gone = await process.end_group(REAP_S_MAX)
            if not is_told:
                await self._ended(rank, process, how)
            while not is_gone:
                _log.error("a process does not die; its slot stays taken", pid=process.pid)
                is_gone = await process.end_group(60.0)
        finally:
            if rank.going_on is not None:
                rank.going_on.cancel()
            process.signal_group(signal.SIGKILL)
            process.close()
            self.readers.drop(rank.order)
            self.watch.drop(rank.order)
            if rank.pipe is not None:
                rank.pipe.close()

    async def _ended(self, rank: Attempt, process: Process, how: Exit) -> None:
        if rank.pipe is not None:
            rank.pipe.drain()  # what it said last comes before its end
        self.readers.end(rank.order)
        known = rank.fault or ("" if rank.stop_at is not None else None)
        self._report(await self._ends.exited(rank.order, process, how, rank.memory,
                                             said=rank.said, known=known), None)

    # --- what ranks say -------------------------------------------------------------------------
    def _heard(self, rank: Attempt, frame: Frame) -> None:
        if isinstance(frame.body, Adopted):
            if rank.process is not None and rank.process.follow(frame.body.pid):
                self.watch.adopted(rank.order, frame.body.pid)
            return
        if not isinstance(frame.body, RANK_SAYS):
            self._broken(rank, f"{type(frame.body).__name__} is not for a rank to say")
            return
        if isinstance(frame.body, RankErrored):
            rank.said = frame.body
        if (isinstance(frame.body, (RankFinished, InMemoryRecoveryDeclined))
                and rank.process is not None):
            rank.process.unfollow()  # from here on it ends as the command around it does
        try:
            self._report(frame.body, frame.at_s or None)
        except ValueError as error:
            self._broken(rank, f"a report that cannot be written: {error}")

    def _broken(self, rank: Attempt, why: str) -> None:
        """A rank that speaks nonsense cannot be led: it ends, and is restarted like any other."""
        _log.error("a rank broke its pipe's protocol", rank=rank.order.rank, why=why)
        rank.fault = f"ended by its agent, whose pipe it broke: {why}"
        if rank.process is not None:
            rank.process.signal_group(signal.SIGKILL)

    # --- checkpoints ----------------------------------------------------------------------------
    async def _publish(self, order: PublishCheckpoint, record: Record, again: bool) -> None:
        try:
            await self._publisher.publish(order, record)
        except Overtaken as error:
            if not again:  # else whoever carried out the later one answers for both
                self._refuse(record.seq, f"checkpoint not published: {error}")
        except Refused as error:
            self._refuse(record.seq, f"checkpoint not published: {error}")
        else:
            self._report(CheckpointPublished(task=order.task, order=record.seq, path=order.path),
                         None)
