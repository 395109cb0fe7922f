"""One node's agent between the log and its ranks: one TaskGroup, eight loops."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from ...events.errors import Ambiguous, Unavailable
from ...events.log.port import AgentPort
from ...events.records.reports import MemoryCheckpointsLost, NodeJoined, NodeLeft
from ...events.records.types import Body, first_keeper
from ..host import linux
from .checkpoint_store import Keeper
from .delivery.log_link import CALL_S_MAX, Link
from .delivery.outbox import Forgotten, Outbox
from .delivery.spool import Spool
from .health.health_monitor import Health, Sources
from .monitoring.output_reader import LOOK_S as READ_S
from .monitoring.rank_monitor import WATCH_S
from .order_executor import STOP_GRACE_S, Ranks
from .processes.launcher import MARK, Node

BEAT_S = 0.5
ORDERS_WAIT_S = 5.0
FLUSH_S_MAX = 5.0
"""How long a stopping agent waits for its last reports to be acknowledged."""
SWEEP_S = 1.0
LOOK_S = 0.2
"""Between two looks at the ranks: so late at most it is told that one was stopped."""
LOOK_S_MIN = 0.01

_log = structlog.get_logger("agent")


class Agent:
    """`clock` gives seconds since 1970. `sweeps`: every child of this process is the agent's.

    `sources` is what the node's health is read from; None: nothing.
    """

    def __init__(self, node: Node, port: AgentPort, clock: Callable[[], float], pid: int, *,
                 spool: Spool, left: list[Spool], sweeps: bool,
                 sources: Sources | None = None) -> None:
        self._node = node
        self._port = port
        self._clock = clock
        self._pid = pid
        self._link = Link()
        self._outbox = Outbox(port, self._link, spool, left)
        self._spool = spool
        self._sweeps = sweeps
        self._sources = sources
        self._has_joined = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Start: NodeJoined is spooled behind what predecessors left; then, beside each other,
        reports, beats, orders and health begin. No rank starts before NodeJoined is in the log.
        Stop: no more orders, no more health; NodeLeft; ranks end (SIGTERM, after STOP_GRACE_S
        SIGKILL) and are reaped; reports are flushed for at most FLUSH_S_MAX; reports and beats end.
        What was not acknowledged stays in the spool's file.
        Cancel, or an error in a loop: ranks are killed at once, nothing is told or flushed.
        Raises Forgotten when the log is another one than before.
        """
        try:
            await self._serve(stop)
        except BaseExceptionGroup as group:
            if found := group.subgroup(Forgotten):
                raise Forgotten(str(found.exceptions[0])) from None
            raise

    async def _serve(self, stop: asyncio.Event) -> None:
        node = self._node
        keeper = self._keeper()
        self._outbox.put(NodeJoined(
            node=node.name, incarnation=node.incarnation, host=node.host, pid=self._pid,
            num_slots=node.num_slots, accelerator="cuda" if node.devices else "cpu",
            keeper=keeper.endpoint, labels=node.labels))
        async with asyncio.TaskGroup() as group:
            health = Health(node, self._sources, self._outbox.put) if self._sources else None
            ranks = Ranks(node, self._report, group, keeper, health.killed if health else None)
            try:
                loops = [group.create_task(self._outbox.run(), name="reports"),
                         group.create_task(self._beat(), name="beats"),
                         group.create_task(self._sweep(ranks, health), name="sweep"),
                         group.create_task(self._look(ranks), name="look"),
                         group.create_task(self._read(ranks), name="read"),
                         group.create_task(self._watch(ranks), name="watch")]
                orders = group.create_task(self._follow(ranks), name="orders")
                heeds = [group.create_task(health.run(), name="health")] if health else []
                await stop.wait()
                _log.info("stopping", ranks=len(ranks.pids))
                for task in (orders, *heeds):
                    task.cancel()
                # First, or the ends of its ranks would look like faults.
                self._outbox.put(NodeLeft(node=node.name, incarnation=node.incarnation,
                                          reason="stopped"))
                await ranks.stop_all(STOP_GRACE_S)
                if not await self._outbox.flush(FLUSH_S_MAX):
                    _log.warning("stopped with reports that nobody acknowledged",
                                 num_reports=self._outbox.num_unacked)
                for loop in loops:
                    loop.cancel()
            finally:
                ranks.kill_all()
                keeper.close()

    def _keeper(self) -> Keeper:
        node = self._node

        def lost(task: int, why: str) -> None:
            self._outbox.put(MemoryCheckpointsLost(
                node=node.name, incarnation=node.incarnation, task=task, why=why,
                keeper_start=keeper.start))

        keeper = Keeper(node.host, node.secret, os.environ,
                        (MARK, f"{node.mark}{node.incarnation}:keeper"),
                        node.state_dir / "logs" / f"keeper-{node.name}.log", lost,
                        first_keeper(node.incarnation))
        return keeper

    def _report(self, body: Body, occurred_s: float | None) -> None:
        self._outbox.put(body, occurred_s)

    async def _follow(self, ranks: Ranks) -> None:
        """Read this node's orders from the beginning, each once, in order of seq."""
        cursor, last = "0-0", 0
        while True:
            sent = await self._link.insist(
                partial(self._port.orders, self._node.name, after=cursor, wait_s=ORDERS_WAIT_S),
                ORDERS_WAIT_S + CALL_S_MAX)
            if sent and not self._has_joined:
                # Asked after the read: if NodeJoined is not in the log now, it was not then.
                acked = await self._link.insist(lambda: self._port.acked(self._node.source))
                self._has_joined = acked >= 1
            again = cursor == "0-0" or not self._has_joined
            for order in sent:
                cursor = order.cursor
                if order.record.seq > last:
                    last = order.record.seq
                    ranks.obey(order.record, stale=not self._has_joined, again=again)

    async def _beat(self) -> None:
        """A sign of life every BEAT_S; a failed one is not sent again."""
        while True:
            try:
                await self._link.call(
                    lambda: self._port.beat(self._node.name, self._node.incarnation))
            except (Unavailable, Ambiguous):
                pass
            await asyncio.sleep(BEAT_S)

    async def _look(self, ranks: Ranks) -> None:
        """A process that is stopped says nothing, and its peers wait for it in their collective.

        The kernel tells at once that some child was stopped, goes on or ended. A signal that is
        missed, or a child that is not ours to be told of, is seen with the next look.
        """
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        if self._sweeps:
            loop.add_signal_handler(signal.SIGCHLD, told.set)
        try:
            while True:
                told.clear()
                ranks.look()
                await asyncio.sleep(LOOK_S_MIN)  # a shower of signals is one look
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await told.wait()
        finally:
            if self._sweeps:
                loop.remove_signal_handler(signal.SIGCHLD)

    async def _read(self, ranks: Ranks) -> None:
        """What commands print, every READ_S."""
        while True:
            ranks.readers.look(time.monotonic())
            await asyncio.sleep(READ_S)

    async def _watch(self, ranks: Ranks) -> None:
        """The pulse of training ranks, every WATCH_S."""
        while self._node.watch:
            ranks.watch.look(time.monotonic())
            await asyncio.sleep(WATCH_S)

    async def _sweep(self, ranks: Ranks, health: Health | None) -> None:
        """Reap orphans that ended by themselves while their rank lives on."""
        while self._sweeps:
            for pid in linux.dead_children():
                if pid not in ranks.pids and not (health and pid in health.pids):
                    linux.reap(pid)
            await asyncio.sleep(SWEEP_S)
