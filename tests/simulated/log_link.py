"""The link between a simulated agent and the log: slow, lossy, duplicating, sometimes cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from msgspec import Struct
from unicron.events.errors import Ambiguous, Unavailable
from unicron.events.log.port import SentOrder
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import Report


class LinkFaults(Struct, frozen=True, kw_only=True):
    """Link faults: shares of reports (or calls) between 0 and 1, delays in seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s_max: float = 3.0
    unanswered: float = 0.0
    """Calls that raise Ambiguous after they were executed."""
    repeated: float = 0.0
    """Reads of orders that start again at the beginning of the stream."""
    latency_s: float = 0.001


NO_FAULTS = LinkFaults()


class SimulatedLogLink:
    """Wraps an RedisLog. `cut` makes the log unreachable; `link_faults` can be changed."""

    def __init__(
        self, inner: RedisLog, rng: random.Random, link_faults: LinkFaults = NO_FAULTS
    ) -> None:
        self._inner, self._rng = inner, rng
        self.link_faults = link_faults
        self.cut = False
        self._late: set[asyncio.Task[None]] = set()

    async def send(self, reports: Sequence[Report]) -> None:
        """Send the reports; each may be lost, duplicated or delayed."""
        await self._pass()
        now: list[Report] = []
        for report in reports:
            if self._chance(self.link_faults.lost):
                continue
            copies = 2 if self._chance(self.link_faults.doubled) else 1
            for _ in range(copies):
                if self._chance(self.link_faults.delayed):
                    self._send_late(report, self._rng.uniform(0.0, self.link_faults.delay_s_max))
                else:
                    now.append(report)
        if now:
            await self._inner.send(now)
        self._answer()

    async def acked(self, source: str) -> int:
        await self._pass()
        return await self._inner.acked(source)

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        await self._pass()
        if self._chance(self.link_faults.repeated):
            after = "0-0"
        found = await self._inner.orders(node, after=after, wait_s=wait_s)
        await self._pass()
        return found

    async def beat(self, node: str, incarnation: int, num_spooled: int = 0) -> None:
        await self._pass()
        await self._inner.beat(node, incarnation, num_spooled)

    def close(self) -> None:
        """Discard the delayed reports."""
        for task in sorted(self._late, key=lambda task: task.get_name()):
            task.cancel()

    async def _pass(self) -> None:
        await asyncio.sleep(self.link_faults.latency_s)
        if self.cut:
            raise Unavailable("the log cannot be reached")

    def _answer(self) -> None:
        if self._chance(self.link_faults.unanswered):
            raise Ambiguous("the reply was lost")

    def _chance(self, share: float) -> bool:
        return share > 0 and self._rng.random() < share

    def _send_late(self, report: Report, delay_s: float) -> None:
        async def send() -> None:
            await asyncio.sleep(delay_s)
            try:
                await self._inner.send([report])
            except (Unavailable, Ambiguous):
                return

        task = asyncio.create_task(send(), name=f"late {report.source} {report.source_seq}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)
