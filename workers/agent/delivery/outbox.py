"""Delivers spooled reports in order, at least once, those of earlier incarnations first."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog

from ....events.errors import Ambiguous, LogError, Unavailable
from ....events.log.redis_streams import RedisLog
from ....events.records.types import Body
from .log_link import LogLink, backoff_s
from .spool import NO_SLOT, Spool

NUM_BATCH = 256
NUM_WINDOW = 1024
"""Limit of unacknowledged reports: without a leader they must not fill the memory of the server."""
ACK_POLL_S = 0.1
IDLE_POLL_S = 5.0
"""Time between polls of the cursor if all is acknowledged. These polls find a replaced log."""
RESEND_S_MIN, RESEND_S_MAX = 5.0, 300.0
"""Unacknowledged reports are sent again after this long, doubled each time."""
_log = structlog.get_logger("agent")


class Put(Protocol):
    """Takes a report: body, time (None: now), the slot of its rank, a note (Spool.put)."""

    def __call__(
        self,
        body: Body,
        occurred_s: float | None,
        slot: int = NO_SLOT,
        note: tuple[str, bytes] | None = None,
        /,
    ) -> None: ...


class LogReplaced(LogError):
    """The log no longer knows reports that it had acknowledged: another log replaced it."""


class _Channel:
    """The delivery state of one spool. `sent`: the last number sent since the last reset."""

    def __init__(self, spool: Spool, num_window: int) -> None:
        self.spool = spool
        self.num_window = num_window
        self.sent = 0
        self.resend_s = RESEND_S_MIN
        self.resend_at = 0.0

    @property
    def is_sent(self) -> bool:
        return self.sent >= self.spool.last


class Outbox:
    """Delivers `left`, the spools of earlier incarnations, then `spool`, this agent's own."""

    def __init__(
        self, port: RedisLog, link: LogLink, spool: Spool, left: Sequence[Spool] = ()
    ) -> None:
        self._port = port
        self._link = link
        self._spool = spool
        # Earlier reports are sent whole, without a window: they must precede NodeJoined.
        self._channels = [_Channel(one, one.last) for one in left]
        self._channels.append(_Channel(spool, NUM_WINDOW))
        self._wakeup = asyncio.Event()

    def put(
        self,
        body: Body,
        occurred_s: float | None = None,
        slot: int = NO_SLOT,
        note: tuple[str, bytes] | None = None,
    ) -> None:
        """Spool a report and wake `run`. Raises ValueError for a float that is not finite."""
        self._spool.put(body, occurred_s, slot, note)
        self._wakeup.set()

    @property
    def num_unacked(self) -> int:
        return self._spool.num_unacked

    async def run(self) -> None:
        """Deliver until cancelled. Raises LogReplaced."""
        num_tries = 0
        while True:
            self._wakeup.clear()
            try:
                for channel in self._channels:
                    await self._pump(channel)
                    if not channel.is_sent and channel.spool is not self._spool:
                        break
                num_tries = 0
            except (Unavailable, Ambiguous):
                for channel in self._channels:
                    channel.sent = channel.spool.acked
                await asyncio.sleep(backoff_s(num_tries))
                num_tries += 1
                continue
            self._forget_delivered()
            await self._wait()

    async def flush(self, s_max: float) -> bool:
        """Wait until the log has acknowledged all own reports; False after `s_max`."""
        deadline = asyncio.get_running_loop().time() + s_max
        while self._spool.num_unacked:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(ACK_POLL_S / 4)
        return True

    async def _wait(self) -> None:
        """Wait for a new report, or for the next poll of the cursor."""
        waits = any(channel.spool.num_unacked for channel in self._channels)
        with suppress(TimeoutError):
            async with asyncio.timeout(ACK_POLL_S if waits else IDLE_POLL_S):
                await self._wakeup.wait()

    async def _pump(self, channel: _Channel) -> None:
        spool = channel.spool
        await self._poll_cursor(channel)
        while not channel.is_sent:
            num_free = channel.num_window - (channel.sent - spool.acked)
            batch = spool.behind(channel.sent, min(NUM_BATCH, num_free)) if num_free > 0 else []
            if not batch:
                break
            await self._link.call(partial(self._port.send, batch))
            channel.sent = max(channel.sent, batch[-1].source_seq)

    async def _poll_cursor(self, channel: _Channel) -> None:
        """Poll the log's cursor. Trim the spool up to the cursor, or send again from there."""
        spool, now = channel.spool, asyncio.get_running_loop().time()
        acked = await self._link.call(lambda: self._port.acked(spool.source))
        if acked < spool.acked:
            if acked == 0:
                raise LogReplaced(f"the log no longer knows {spool.source}")
            _log.error(
                "the log has lost reports that it had acknowledged; they are sent again",
                source=spool.source,
                after=acked,
                num_lost=spool.acked - acked,
                num_not_kept=spool.take_back(acked),
            )
            channel.sent = acked
        # The cursor moved, or every sent report is acknowledged: no reason to send again.
        moved = acked > spool.acked or channel.sent <= spool.acked
        if acked > spool.acked:
            spool.trim(acked)
            channel.sent = max(channel.sent, acked)
        if moved:
            channel.resend_s = RESEND_S_MIN
            channel.resend_at = now + channel.resend_s
        elif now >= channel.resend_at:
            channel.sent = spool.acked
            channel.resend_s = min(RESEND_S_MAX, 2 * channel.resend_s)
            channel.resend_at = now + channel.resend_s

    def _forget_delivered(self) -> None:
        for channel in self._channels[:-1]:
            if not channel.spool.num_unacked:
                channel.spool.close(forget=True)
                self._channels.remove(channel)
