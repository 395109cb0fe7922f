"""The agent of one node: nine loops in one TaskGroup connect the log and the ranks."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog

from ...events.errors import Ambiguous, Unavailable
from ...events.log.port import SentOrder
from ...events.log.redis_streams import RedisLog
from ...events.process_identity import boot_id
from ...events.records.order_format import ORDER_FORMAT_VERSION
from ...events.records.orders import ProbeNode
from ...events.records.reports import (
    AGENT_STOPS,
    AgentRestarted,
    AgentRestarting,
    MemoryCheckpointsLost,
    NodeDrained,
    NodeJoined,
    NodeLeft,
)
from ...events.records.types import first_store_number
from ...events.shortage import outlast
from ...events.timing import BEAT_S, FLUSH_S_MAX, STOP_GRACE_S
from ..host import linux
from .checkpoint_store import CheckpointStore
from .delivery.join import NodeRevoked
from .delivery.log_link import CALL_S_MAX, LogLink
from .delivery.outbox import LogReplaced, Outbox
from .delivery.spool import Spool
from .health.health_monitor import HealthMonitor, HealthSources
from .monitoring.output_reader import LOOK_S as READ_S
from .monitoring.rank_monitor import WATCH_S
from .order_executor import OrderExecutor
from .prober import Prober
from .processes.launcher import MARKER, NodeConfig, unlimited
from .processes.shim import NODE, Shim, ShimLost

REJOIN_S = 5.0
"""While the log is unreachable, the agent asks this often where it is."""
ORDERS_WAIT_S = 5.0
SWEEP_S = 1.0
LOOK_S = 0.2
"""Time between two looks at the ranks. A stopped rank is reported at most this much later."""
LOOK_S_MIN = 0.01

_log = structlog.get_logger("agent")


class Agent:
    """Serves one node. `clock` gives seconds since 1970.

    `shim` is the parent of all processes; what it holds of a former agent of this incarnation is
    continued, and `spool` is that agent's. `sources` configures the health checks; None disables
    them. `rejoin` asks the control plane anew for the address of the log, and moves `port` there.
    `restart` replaces this process by its successor; it is called if it is there when `run` is to
    stop.
    `drain_s_max`: how long a stopping agent waits for its ranks to leave; 0: it does not.
    """

    def __init__(
        self,
        node: NodeConfig,
        port: RedisLog,
        clock: Callable[[], float],
        pid: int,
        *,
        spool: Spool,
        left: list[Spool],
        shim: Shim,
        sources: HealthSources | None = None,
        rejoin: Callable[[], Awaitable[None]] | None = None,
        drain_s_max: float = 0.0,
        restart: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        self._node = node
        self._port = port
        self._clock = clock
        self._pid = pid
        self._link = LogLink()
        self._outbox = Outbox(port, self._link, spool, left)
        self._spool = spool
        self._sources = sources
        self._rejoin = rejoin
        self._drain_s_max = drain_s_max
        self._shim = shim
        self._restart = restart
        self._has_joined = False
        self._is_successor = bool(spool.last)
        """It goes on with the incarnation of a former agent."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Start: the agent spools NodeJoined behind the reports of earlier incarnations. Then the
        loops run concurrently. No rank starts before NodeJoined is in the log.
        Stop: with `drain_s_max`, the agent reports NodeDrained and waits until the ranks have left.
        It ends the loops of orders and health and reports NodeLeft. It stops and reaps
        the ranks (SIGTERM, SIGKILL after STOP_GRACE_S), flushes reports for at most FLUSH_S_MAX,
        and ends the other loops. The spool's file keeps unacknowledged reports.
        Cancel, or an error in a loop: the agent kills the ranks and neither reports nor flushes.
        Restart: the agent reports AgentRestarting, flushes, and leaves all as it is.
        Raises LogReplaced if the log was replaced by another one, NodeRevoked, ShimLost.
        """
        try:
            await self._serve(stop)
        except BaseExceptionGroup as group:
            if found := group.subgroup((LogReplaced, NodeRevoked, ShimLost)):
                raise found.exceptions[0] from None
            raise

    async def _serve(self, stop: asyncio.Event) -> None:
        node = self._node
        store = self._make_store()
        self._tell_joined(store)
        async with asyncio.TaskGroup() as group:
            health = (
                HealthMonitor(node, self._sources, self._outbox.put, self._spool, self._shim)
                if self._sources
                else None
            )
            ranks = OrderExecutor(
                node,
                self._outbox.put,
                group,
                store,
                self._clock,
                self._shim,
                self._spool,
                health.killed if health else None,
                health.lost_slots if health else tuple,
            )
            prober = Prober(node.name, node.incarnation, self._outbox.put, group)
            try:
                ranks.adopt()
                orders = group.create_task(self._follow(ranks, prober), name="orders")
                heeds = [_begin(group, "health", health.run)] if health else []
                loops = self._begin_loops(group, ranks)
                await stop.wait()
                if (restart := self._restart()) is not None:
                    _log.info("restarting; the ranks run on", ranks=len(ranks.pids))
                    self._outbox.put(
                        AgentRestarting(
                            node=node.name, incarnation=node.incarnation, back_s=node.gone_s
                        )
                    )
                    await self._outbox.flush(FLUSH_S_MAX)
                    restart()
                await self._drain(ranks)
                _log.info("stopping", ranks=len(ranks.pids))
                for task in (orders, *heeds):
                    task.cancel()
                self._shim.hold(NODE, b"")  # no later agent adopts the ranks of this one
                # NodeLeft comes first: without it the exits of the ranks would count as faults.
                self._outbox.put(
                    NodeLeft(node=node.name, incarnation=node.incarnation, reason="stopped")
                )
                await ranks.stop_all(STOP_GRACE_S)
                if not await self._outbox.flush(FLUSH_S_MAX):
                    _log.warning(
                        "stopped with reports that the log has not acknowledged",
                        num_reports=self._outbox.num_unacked,
                    )
                for loop in loops:
                    loop.cancel()
            finally:
                ranks.kill_all()
                with suppress(ShimLost):
                    store.close()
                ranks.end()

    def _tell_joined(self, store: CheckpointStore) -> None:
        """The first report: this incarnation begins, or goes on with a new agent."""
        node = self._node
        if self._is_successor:
            self._spool.resume()
            self._outbox.put(
                AgentRestarted(
                    node=node.name,
                    incarnation=node.incarnation,
                    pid=self._pid,
                    order_format=ORDER_FORMAT_VERSION,
                    unlimited=unlimited(node.limits),
                )
            )
            return
        self._outbox.put(
            NodeJoined(
                node=node.name,
                incarnation=node.incarnation,
                host=node.host,
                pid=self._pid,
                num_slots=node.num_slots,
                accelerator="cuda" if node.devices else "cpu",
                keeper=store.endpoint,
                labels=node.labels,
                copies_bytes_max=store.bytes_max,
                boot_id=boot_id(),
                order_format=ORDER_FORMAT_VERSION,
                unlimited=unlimited(node.limits),
                probe_port=node.probe_port,
            )
        )

    def _begin_loops(
        self, group: asyncio.TaskGroup, ranks: OrderExecutor
    ) -> list[asyncio.Task[None]]:
        """The loops that go on until all ranks have been stopped."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "reports": self._outbox.run,
            "heartbeats": self._beat,
            "rejoin": self._ask_address,
            "sweep": partial(self._sweep, ranks),
            "look": partial(self._look, ranks),
            "read": partial(_every, READ_S, ranks.readers.look),
        }
        if self._node.watch:
            loops["watch"] = partial(_every, WATCH_S, ranks.watch.look)
        return [_begin(group, name, run) for name, run in loops.items()]

    async def _drain(self, ranks: OrderExecutor) -> None:
        """Have the tasks leave this node. Without the log, they could not be told to."""
        if not (self._drain_s_max and ranks.pids) or self._link.unreachable_s:
            return
        _log.info("draining", ranks=len(ranks.pids), s_max=self._drain_s_max)
        self._outbox.put(
            NodeDrained(node=self._node.name, who=self._node.name, role="node", reason=AGENT_STOPS)
        )
        deadline_s = time.monotonic() + self._drain_s_max
        while ranks.pids and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_S)

    def _make_store(self) -> CheckpointStore:
        node = self._node

        def lost(task: int, why: str) -> None:
            self._outbox.put(
                MemoryCheckpointsLost(
                    node=node.name,
                    incarnation=node.incarnation,
                    task=task,
                    why=why,
                    keeper_start=store.start,
                )
            )

        store = CheckpointStore(
            node.host,
            node.store_secret,
            os.environ,
            (MARKER, f"{node.mark}{node.incarnation}:keeper"),
            node.state_dir / "logs" / f"checkpoint-store-{node.name}.log",
            lost,
            first_store_number(node.incarnation),
            self._shim,
        )
        return store

    async def _follow(self, ranks: OrderExecutor, prober: Prober) -> None:
        """Execute this node's orders from the first one on, each once, in order of epoch and seq: a
        log that has lost records uses their seqs again. No order is passed over for a shortage."""
        cursor, last, is_first = "0-0", (0, 0), not self._is_successor

        async def execute(order: SentOrder, again: bool) -> None:
            if isinstance(probe := order.record.body, ProbeNode):
                if is_first or not again:  # else a former agent has made it
                    prober.execute(order, probe)
                return
            ranks.execute(order.record, order.store_keys, stale=not self._has_joined, again=again)

        while True:
            sent = await self._link.retry(
                partial(self._port.orders, self._node.name, after=cursor, wait_s=ORDERS_WAIT_S),
                ORDERS_WAIT_S + CALL_S_MAX,
            )
            if sent and not self._has_joined:
                # Checked after the read: if NodeJoined is not in the log now, it was not earlier.
                acked = await self._link.retry(lambda: self._port.acked(self._node.source))
                self._has_joined = acked >= 1
            again = cursor == "0-0" or not self._has_joined
            for order in sent:
                cursor, place = order.cursor, (order.record.epoch, order.record.seq)
                if place > last:
                    last = place
                    await outlast(partial(execute, order, again), partial(_told, "orders"))

    async def _beat(self) -> None:
        """Send a heartbeat every BEAT_S; a failed one is not retried."""
        while True:
            with suppress(Unavailable, Ambiguous):
                await self._link.call(
                    lambda: self._port.beat(
                        self._node.name, self._node.incarnation, self._outbox.num_unacked
                    )
                )
            await asyncio.sleep(BEAT_S)

    async def _ask_address(self) -> None:
        """Ask for the log's address while the log is unreachable: it may have moved."""
        while self._rejoin is not None:
            await asyncio.sleep(REJOIN_S)
            if self._link.unreachable_s >= REJOIN_S:
                await self._rejoin()

    async def _look(self, ranks: OrderExecutor) -> None:
        """Find stopped and continued ranks: the peers of a stopped rank wait in a collective.

        A SIGCHLD of the shim triggers a look. A look every LOOK_S also finds changes of other
        processes. Raises ShimLost.
        """
        child_changed = asyncio.Event()
        self._shim.on_change(child_changed.set)
        while True:
            child_changed.clear()
            self._shim.check()
            ranks.look()
            await asyncio.sleep(LOOK_S_MIN)  # a burst of signals causes one look
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await child_changed.wait()

    async def _sweep(self, ranks: OrderExecutor) -> None:
        """Reap orphans that exited while their rank still runs."""
        while True:
            if dead := [
                pid for pid in linux.dead_children(self._shim.pid) if pid not in ranks.pids
            ]:
                self._shim.reap(*dead)
            await asyncio.sleep(SWEEP_S)


def _begin(
    group: asyncio.TaskGroup, name: str, run: Callable[[], Awaitable[None]]
) -> asyncio.Task[None]:
    return group.create_task(outlast(run, partial(_told, name)), name=name)


def _told(loop: str, why: str) -> None:
    """A loop waits for what the machine lacks; ranks run on, and reports are kept."""
    _log.warning("a loop fails for now, and goes on after a pause", loop=loop, why=why)


async def _every(pause_s: float, look: Callable[[float], None]) -> None:
    while True:
        look(time.monotonic())
        await asyncio.sleep(pause_s)
