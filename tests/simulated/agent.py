"""Simulated agents: they run ranks, send reports and execute orders through the agents' port."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from math import inf

from msgspec import Struct
from simulated.environment import Environment
from simulated.rank import SimulatedRank, adoption_s
from simulated.rank_monitor import WATCH_S, SimulatedRankMonitor
from unicron.events.errors import Ambiguous, Unavailable
from unicron.events.log.port import SentOrder
from unicron.events.log.redis_streams import RedisLog
from unicron.events.node_probe import PORT_FIRST, PROBE_S_MAX
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Report
from unicron.events.records.order_format import ORDER_FORMAT_VERSION
from unicron.events.records.types import Body, first_store_number
from unicron.events.timing import BEAT_S

LETTERS = str.maketrans("0123456789", "abcdefghij")
"""The control plane compares the words of errors without their numbers."""

# --- A simulated command: it prints its progress and resumes from its own checkpoint. ---

STEP_S = (0.1, 0.15)
"""Seconds of one iteration on one slot; on n slots an iteration takes 1/n of that."""
ITERATIONS_NUM = 100_000
SAVE_ITERATIONS = 10


class SimulatedLines:
    """The training lines that a command's last rank prints, reported by its agent until `end`."""

    def __init__(self, net: Environment, order: o.StartRank, say: Callable[[Body], None]) -> None:
        self._net, self._order, self._say = net, order, say
        self._rng = random.Random(f"lines {order.task} {order.attempt}")
        self._iteration = self._first = net.printed.get(order.task, 0)
        self._timer = net.later(self._rng.uniform(*net.tempo.load_s), self._print)

    def end(self) -> None:
        """Stop printing."""
        self._timer.cancel()

    def _print(self) -> None:
        """Report the iterations since the last line; the first line gives no number of them."""
        order, net = self._order, self._net
        step_s = self._rng.uniform(*STEP_S) / order.num_seats
        num = max(int(net.tempo.progress_s / step_s), 1)
        first = self._iteration == self._first
        self._iteration += num
        net.printed[order.task] = self._iteration // SAVE_ITERATIONS * SAVE_ITERATIONS
        model = order.spec.model
        self._say(
            r.IterationsLogged(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                iteration=self._iteration,
                iterations=ITERATIONS_NUM,
                num_iterations=0 if first else num,
                step_s=4 * step_s if first else step_s,
                loss=10.0 / self._iteration,
                global_batch=model.global_batch if model is not None else 0,
            )
        )
        self._timer = net.later(num * step_s, self._print)


RESEND_S = 0.5
"""How long an agent waits for an acknowledgement before it sends again."""
ORDERS_WAIT_S = 10.0
COMMAND_S = (5.0, 30.0)
LOOK_S = (0.001, 0.2)
PROBED_S = 0.002


class SimulatedProcess(Struct):
    """The process on a slot: a training rank, or one rank of a command (its last rank prints)."""

    order: o.StartRank
    pid: int
    rank: SimulatedRank | None = None
    end: asyncio.TimerHandle | None = None
    lines: SimulatedLines | None = None
    stopping: bool = False
    is_suspended: bool = False
    """As last reported."""


class SimulatedAgent:
    """One incarnation of a node's agent, with its spool and its processes.

    `run` until cancelled. `crash` ends the agent and all its ranks at once, as when the machine is
    lost: unsent reports in the spool are lost too.
    """

    def __init__(
        self,
        net: Environment,
        port: RedisLog,
        *,
        node: str,
        incarnation: int,
        num_slots: int,
        clock: Callable[[], float],
        fall: Callable[[], None],
    ) -> None:
        self.net, self.port, self._clock, self._fall = net, port, clock, fall
        self.node, self.incarnation, self.num_slots = node, incarnation, num_slots
        self.source = f"{node}/{incarnation}"
        self._keeper_start = first_store_number(incarnation)
        self.alive = True
        self.processes: dict[int, SimulatedProcess] = {}
        """Slot -> the process on that slot."""
        self.spool: list[Report] = []
        self._told = 0
        self._seen: set[int] = set()
        self._wake = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    # --- life ------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Join the cluster, then send, listen, beat and watch, each in its own asyncio task."""
        self.say(
            r.NodeJoined(
                node=self.node,
                incarnation=self.incarnation,
                pid=self.net.next_pid(),
                host=f"{self.node}.paper",
                num_slots=self.num_slots,
                keeper=f"{self.node}.paper:1",
                boot_id=f"boot {self.incarnation}",
                order_format=ORDER_FORMAT_VERSION,
                probe_port=PORT_FIRST,
            )
        )
        self.net.answers[self.node] = self.incarnation
        self.net.keepers.open_behind(self.node, self._told, self._keeper_start)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver(), name=f"{self.source} deliver")
            group.create_task(self._listen(), name=f"{self.source} listen")
            group.create_task(self._beat(), name=f"{self.source} beat")
            group.create_task(self._watch(), name=f"{self.source} watch")

    def crash(self) -> None:
        """The node fails: it reports nothing, and its peers see their connections close."""
        self.alive = False
        self.net.answers.pop(self.node, None)
        self.net.keepers.close(self.node)
        for process in list(self.processes.values()):
            self._end(process)

    def leave(self) -> None:
        """Shut down on purpose: end the ranks, report NodeLeft, accept no more orders."""
        self.net.keepers.close(self.node)
        for process in list(self.processes.values()):
            self._exit(process, exit_code=None, signal=15)
        self.say(r.NodeLeft(node=self.node, incarnation=self.incarnation, reason="asked to stop"))

    async def stop(self, stop_s: float) -> None:
        """SIGSTOP the agent, and SIGCONT it after `stop_s`; its ranks continue, unobserved."""
        self._goes_on.clear()
        await asyncio.sleep(stop_s)
        self.go_on()

    def go_on(self) -> None:
        """SIGCONT the agent."""
        self._goes_on.set()
        for process in list(self.processes.values()):
            self._look(process)

    @property
    def sees(self) -> bool:
        """True while the agent runs; a stopped agent observes nothing."""
        return self._goes_on.is_set()

    def say(self, body: Body) -> None:
        """Spool a report. The agent sends it until the log acknowledges it. NodeJoined is the
        first: what watches the node begins behind it."""
        if not self.alive or not (self._told or isinstance(body, r.NodeJoined)):
            return
        self._told += 1
        self.spool.append(
            Report(source=self.source, source_seq=self._told, occurred_s=self._clock(), body=body)
        )
        self._wake.set()

    # --- faults ----------------------------------------------------------------------------------
    def kill(self, process: SimulatedProcess) -> None:
        """SIGKILL by something other than the control plane."""
        self._exit(process, exit_code=None, signal=9)

    def halt(self, process: SimulatedProcess, stop_s: float) -> None:
        """SIGSTOP a rank, and SIGCONT it after `stop_s` (0: never). The agent notices both soon."""
        if process.rank is not None:
            process.rank.stop(stop_s)
            for in_s in (0.0, process.rank.suspended_s):
                self.net.later(in_s + self.net.draw(LOOK_S), lambda: self._look(process))

    def lose_copies(self) -> None:
        """The node's checkpoint store ends. A new one starts when the log knows that: a share that
        it takes before would be a dead letter."""
        self.net.keepers.close(self.node)
        self.say(
            r.MemoryCheckpointsLost(
                node=self.node,
                incarnation=self.incarnation,
                task=0,
                why="the keeper has ended",
                keeper_start=self._keeper_start,
            )
        )
        self._keeper_start += 1
        self.net.keepers.open_behind(self.node, self._told, self._keeper_start)

    def raise_in(self, process: SimulatedProcess, error: str) -> None:
        """Raise an exception in the rank: it reports the error and exits with code 1. Each process
        has words of its own: the same ones on all ranks would be a bug of the task."""
        rank, order = process.rank, process.order
        if rank is not None:
            self.say(
                r.RankErrored(
                    task=order.task,
                    rank=order.rank,
                    attempt=order.attempt,
                    generation=rank.seen,
                    iteration=max(rank.step_version, 0),
                    error=error,
                    text=f"on paper, {str(process.pid).translate(LETTERS)}",
                )
            )
        self._exit(process, exit_code=1, signal=None)

    def _look(self, process: SimulatedProcess) -> None:
        """Report a change between suspended and running. A stopped agent observes nothing."""
        rank, order = process.rank, process.order
        there = self.processes.get(order.slot.index) is process
        if rank is None or not there or not self._goes_on.is_set():
            return
        if (rank.suspended_s > 0) != process.is_suspended:
            process.is_suspended = not process.is_suspended
            kind = r.RankSuspended if process.is_suspended else r.RankContinued
            self.say(kind(task=order.task, rank=order.rank, attempt=order.attempt, pid=process.pid))

    # --- tasks -----------------------------------------------------------------------------------
    async def _deliver(self) -> None:
        num_sent, heard_s = 0, -inf
        while True:
            if not self.spool:
                self._wake.clear()
                await self._wake.wait()
            await self._goes_on.wait()
            try:
                acked = await self.port.acked(self.source)
                self.net.keepers.acked(self.node, acked)
                num_acked = sum(1 for x in self.spool if x.source_seq <= acked)
                del self.spool[:num_acked]
                num_sent = max(0, num_sent - num_acked)
                now_s = self.net.loop.time()
                if num_acked or num_sent == 0 or now_s - heard_s >= RESEND_S:
                    num_sent = num_sent if num_acked else 0
                    heard_s = now_s
                batch, num_sent = self.spool[num_sent:], len(self.spool)
                if batch:
                    await self.port.send(batch)
            except (Unavailable, Ambiguous):
                num_sent = 0
                await asyncio.sleep(self.net.rng.uniform(0.1, 0.5))
                continue
            if num_sent == len(self.spool) and self.spool:
                self._wake.clear()
                try:
                    async with asyncio.timeout(RESEND_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _listen(self) -> None:
        cursor = "0-0"
        while True:
            try:
                found = await self.port.orders(self.node, after=cursor, wait_s=ORDERS_WAIT_S)
                await self._goes_on.wait()
                again = cursor == "0-0"
                for sent in found:
                    self._carry_out(sent, again=again)
                    cursor = sent.cursor
            except (Unavailable, Ambiguous):
                await asyncio.sleep(self.net.rng.uniform(0.1, 0.5))

    async def _beat(self) -> None:
        while True:
            await self._goes_on.wait()
            try:
                await self.port.beat(self.node, self.incarnation)
            except (Unavailable, Ambiguous):
                pass
            await asyncio.sleep(BEAT_S)

    async def _watch(self) -> None:
        watch = SimulatedRankMonitor(self.net, self.say)
        while True:
            await asyncio.sleep(WATCH_S)
            await self._goes_on.wait()
            watch.look([p.rank for p in self.processes.values() if p.rank is not None])

    # --- orders ----------------------------------------------------------------------------------
    def _carry_out(self, sent: SentOrder, *, again: bool) -> None:
        seq, body = sent.record.seq, sent.record.body
        if not self.alive or seq in self._seen:
            return
        self._seen.add(seq)
        if isinstance(body, o.StartRank):
            # StartRank names this incarnation, so the control plane has its NodeJoined.
            if body.incarnation == self.incarnation:
                self._start(seq, body)
        elif isinstance(body, o.StopRank):
            self._stop(seq, body)
        elif isinstance(body, o.PublishCheckpoint):
            self._publish(seq, body, again=again)
        elif isinstance(body, o.InjectFault):
            if body.incarnation == self.incarnation:
                self._inject(body)
        elif isinstance(body, o.ProbeNode):
            if (self.node, self.incarnation) in zip(body.nodes, body.incarnations, strict=True):
                self._probe(sent, body)
        elif isinstance(body, o.DropMemoryCheckpoints):
            self.net.keepers.forget(self.node, body.task)
            self.say(
                r.MemoryCheckpointsLost(
                    node=self.node,
                    incarnation=self.incarnation,
                    task=body.task,
                    why="the task has ended",
                    keeper_start=self._keeper_start,
                    order=seq,
                )
            )
        elif isinstance(body, (o.Quiesce, o.Reconfigure, o.Resume, o.SetCheckpointStores)):
            for rank in self._ranks(body.task):
                rank.take(body)

    def _ranks(self, task: int) -> list[SimulatedRank]:
        return [p.rank for p in self.processes.values() if p.rank and p.order.task == task]

    def _find(self, task: int, rank: int, attempt: int) -> SimulatedProcess | None:
        return next(
            (
                p
                for p in self.processes.values()
                if (p.order.task, p.order.rank, p.order.attempt) == (task, rank, attempt)
            ),
            None,
        )

    def _probe(self, sent: SentOrder, order: o.ProbeNode) -> None:
        """A node answers as long as it lives, also if its agent is stopped or cut off."""
        reached = self.net.answers.get(order.node) == order.incarnation
        told = r.NodeProbed(
            node=self.node,
            incarnation=self.incarnation,
            target=order.node,
            target_incarnation=order.incarnation,
            order=sent.record.seq,
            epoch=sent.record.epoch,
            reached=reached,
        )
        self.net.later(PROBED_S if reached else PROBE_S_MAX, lambda: self.say(told))

    def _inject(self, order: o.InjectFault) -> None:
        process = self._find(order.task, order.rank, order.attempt)
        if order.what == "node":
            self._fall()
        elif process is not None and order.what == "rank":
            self.kill(process)
        elif process is not None:
            self.halt(process, order.stop_s)

    def _start(self, seq: int, order: o.StartRank) -> None:
        busy = self.processes.get(order.slot.index)
        if busy is not None:
            if busy.stopping:
                self.net.later(0.1, lambda: self._start(seq, order))
                return
            self.net.never(
                f"{order.slot} was given to task {order.task} rank {order.rank} while "
                f"task {busy.order.task} rank {busy.order.rank} runs there"
            )
            self.say(r.OrderRefused(node=self.node, order=seq, why="the slot is busy"))
            return
        if not self.alive:
            return
        process = SimulatedProcess(order=order, pid=self.net.next_pid())
        self.processes[order.slot.index] = process
        self.say(
            r.RankStarted(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                node=self.node,
                pid=process.pid,
                log_path="/paper",
            )
        )
        if order.spec.training is None or adoption_s(order.spec, self.net.rng) == inf:
            process.end = self.net.later(
                self.net.draw(COMMAND_S), lambda: self._exit(process, exit_code=0, signal=None)
            )
            if order.rank == order.num_seats - 1:
                process.lines = SimulatedLines(self.net, order, self.say)
        else:
            process.rank = SimulatedRank(
                self.net,
                order,
                self.node,
                process.pid,
                self.say,
                lambda code: self._exit(process, exit_code=code, signal=None),
            )

    def _stop(self, seq: int, order: o.StopRank) -> None:
        process = self._find(order.task, order.rank, order.attempt)
        if process is None:
            self.say(r.OrderRefused(node=self.node, order=seq, why="there is no such rank"))
            return
        process.stopping = True
        self.net.num_stopped += 1
        # A suspended process ignores SIGTERM; SIGKILL ends it.
        stopped_s = process.rank.stopped_s if process.rank else 0.0
        signal = 15 if order.grace_s > stopped_s else 9
        self.net.later(
            self.net.draw(self.net.tempo.exit_s) + min(stopped_s, order.grace_s),
            lambda: self._exit(process, exit_code=None, signal=signal),
        )

    def _publish(self, seq: int, order: o.PublishCheckpoint, *, again: bool) -> None:
        latest, path_before = self.net.latest.get(order.output, ((0, 0), ""))
        path = order.path.removeprefix(order.output).lstrip("/")
        if (order.generation, seq) < latest:
            if not again:
                self.say(
                    r.OrderRefused(node=self.node, order=seq, why="a later one was carried out")
                )
            return
        if (order.output, path) not in self.net.files:
            self.net.never(f"{order.path} was published, but the file is missing")
        elif (
            order.generation == latest[0]
            and self.net.files[order.output, path][0]
            < (self.net.files[order.output, path_before][0])
        ):
            self.net.never(f"{order.path} was published after the newer {path_before}")
        self.net.latest[order.output] = ((order.generation, seq), path)
        self.say(r.CheckpointPublished(task=order.task, order=seq, path=order.path))

    def _exit(
        self, process: SimulatedProcess, *, exit_code: int | None, signal: int | None
    ) -> None:
        order = process.order
        if self.processes.get(order.slot.index) is not process:
            return
        self._end(process)
        self.say(
            r.RankExited(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                pid=process.pid,
                exit_code=exit_code,
                signal=signal,
            )
        )

    def _end(self, process: SimulatedProcess) -> None:
        del self.processes[process.order.slot.index]
        if process.end:
            process.end.cancel()
        if process.lines:
            process.lines.end()
        if process.rank:
            process.rank.die()
