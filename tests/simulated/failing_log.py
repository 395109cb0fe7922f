"""The log of a simulated cluster: its server can stop, and a leader can die during a call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from memory_log import MemoryLog
from unicron.events.errors import Ambiguous, LogError, Unavailable
from unicron.events.log.port import Rejected, Sent, SentOrder
from unicron.events.records.envelope import Record, Report

CALL_S_MAX = 5.0
"""Seconds that an agent waits for a server that does not answer."""
LEADER_CALLS = (
    "start_epoch",
    "append",
    "cursor",
    "take",
    "beats",
    "beat",
    "rebuild_orders",
    "check_durable",
    "trim_reports",
    "read",
    "renew",
    "release",
    "tokens",
    "keep_tokens",
    "last_seq",
)


class WitnessedLog(MemoryLog):
    """Passes every successful append to `appended`, at the instant of the append."""

    def __init__(
        self, clock: Callable[[], float], appended: Callable[[Sequence[Record]], None]
    ) -> None:
        super().__init__(clock)
        self._appended = appended

    def _append(
        self,
        records: Sequence[Record],
        epoch: int,
        expect: int,
        cursor: str,
        acked: Mapping[str, int],
    ) -> None:
        super()._append(records, epoch, expect, cursor, acked)
        self._appended(records)


class Server:
    """The log server: it runs, refuses connections, or hangs."""

    def __init__(self) -> None:
        self._runs = asyncio.Event()
        self._runs.set()
        self.refuses = False

    async def stop(self, stop_s: float, *, refuses: bool) -> None:
        """Refuse or hang for `stop_s` seconds. A hung server answers its calls afterwards."""
        self.refuses = refuses
        self._runs.clear()
        await asyncio.sleep(stop_s)
        self.start()

    def start(self) -> None:
        self.refuses = False
        self._runs.set()

    @property
    def running(self) -> bool:
        return self._runs.is_set()

    async def passed(self) -> None:
        """Return when the server runs. Raises Unavailable if it refuses connections."""
        if self.refuses:
            raise Unavailable("connection refused")
        if not self._runs.is_set():
            await self._runs.wait()


class AgentLog:
    """The server as an agent's link reaches it: a call to a hung server times out."""

    def __init__(self, log: MemoryLog, server: Server) -> None:
        self._log, self._server = log, server

    async def _passed(self) -> None:
        try:
            async with asyncio.timeout(CALL_S_MAX):
                await self._server.passed()
        except TimeoutError:
            raise Unavailable("the log does not answer") from None

    async def send(self, reports: Sequence[Report]) -> None:
        await self._passed()
        await self._log.send(reports)

    async def acked(self, source: str) -> int:
        await self._passed()
        return await self._log.acked(source)

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        await self._passed()
        found = await self._log.orders(node, after=after, wait_s=wait_s)
        await self._passed()
        return found

    async def beat(self, node: str, incarnation: int, num_spooled: int = 0) -> None:
        await self._passed()
        await self._log.beat(node, incarnation, num_spooled)


class LeaderLog:
    """The log of one leader: calls and replies can be lost, and the leader can die in a call."""

    def __init__(
        self, log: MemoryLog, server: Server, rng: random.Random, die: Callable[[], Awaitable[None]]
    ) -> None:
        self._log, self._server, self._rng, self._die = log, server, rng, die
        self.trouble = False
        self.doom, self.doom_seq = "", 0
        """Die "before" or "after" an append: the next one, or the one that holds `doom_seq`."""

    def entry(self, report: Report) -> bytes:
        """A report becomes a dead letter. Simulated agents send none that is not fit."""
        raise AssertionError(f"a dead letter: {report}")

    def __getattr__(self, call: str) -> Callable[..., Awaitable[object]]:
        assert call in LEADER_CALLS, call

        async def passed(*args: object, **named: object) -> object:
            await asyncio.sleep(0.0005)
            fate = self._rng.random() if self.trouble else 1.0
            if fate < 0.05:
                raise Unavailable("out of reach")
            if fate < 0.08:
                raise Ambiguous("the request was lost")
            doom = self.doom if call == "append" and self._holds(args[0]) else ""
            if doom == "before":
                await self._die()
            reply = await self._ask(getattr(self._log, call), args, named)
            if doom == "after":
                await self._die()
            if fate < 0.11 and call != "take":
                raise Ambiguous("the reply was lost")
            await asyncio.sleep(0.0005)
            return reply

        return passed

    def read_report(self, sent: Sent) -> Report | Rejected:
        """No call of the server."""
        return self._log.read_report(sent)

    async def admit(self, nodes: Mapping[str, int]) -> None:
        """Do nothing: every simulated agent may use the log."""

    async def expel(self, nodes: Iterable[str]) -> None:
        """Do nothing, see `admit`."""

    async def mark_admitted(self) -> None:
        """Do nothing, see `admit`."""

    async def has_users(self) -> bool:
        """True, see `admit`."""
        return True

    async def _ask(
        self,
        call: Callable[..., Awaitable[object]],
        args: tuple[object, ...],
        named: dict[str, object],
    ) -> object:
        """A hung server executes the call when it continues, even if the caller is gone by then."""
        if self._server.running or self._server.refuses:
            await self._server.passed()
            return await call(*args, **named)

        async def late() -> object:
            await self._server.passed()
            return await call(*args, **named)

        asked = asyncio.ensure_future(late())
        asked.add_done_callback(_heard)
        return await asyncio.shield(asked)

    def _holds(self, records: object) -> bool:
        assert isinstance(records, list)
        return not self.doom_seq or any(record.seq == self.doom_seq for record in records)


def _heard(asked: asyncio.Future[object]) -> None:
    if not asked.cancelled() and asked.exception() is not None:
        assert isinstance(asked.exception(), LogError), asked.exception()
