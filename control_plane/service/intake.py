"""The leader's intake: what nodes have sent, read in turns, and what was dropped of it."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from msgspec.structs import replace

from ...events.errors import LogError, Unavailable
from ...events.log.port import Batch
from ...events.log.redis_streams import RedisLog
from ...events.records.reports import ReportsLost
from .limits import Limits

T = TypeVar("T")
DROPPED_S = 10.0
"""Shortest time between two reports of what was dropped from lists that were too long."""
NOTHING = Batch(entries=(), is_whole=False)


class Intake:
    """Reads the intake for a leader: one blocking read at a time, each from the leader's position.
    `wake` is called when a read ends."""

    def __init__(self, log: RedisLog, limits: Limits, wake: Callable[[], None]) -> None:
        self._log, self._limits, self._wake = log, limits, wake
        self._reading: asyncio.Task[None] | None = None
        self._read: tuple[str, Batch | LogError] | None = None
        """The position from which the last read began, and its result."""
        self._trimmed_s = 0.0
        self._dropped = Counter[str]()
        """By node: entries that were dropped from its list since the last report of it."""
        self._dropped_s = -math.inf

    def begin(self, group: asyncio.TaskGroup, position: str) -> None:
        """Start a blocking read, if none is active."""
        if self._reading is None:
            self._reading = group.create_task(self._take(position), name="intake")

    def end(self) -> None:
        """Cancel the read."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def fail(self, position: str, error: LogError) -> None:
        """Let the next `result` raise this."""
        self._read = position, error
        self._wake()

    def result(self, position: str) -> Batch:
        """The result of the blocking read; nothing if the position has changed since its start.
        Raises LogError."""
        read, self._read = self._read, None
        if read is None or read[0] != position:
            return NOTHING
        if isinstance(read[1], LogError):
            raise read[1]
        return read[1]

    async def rest(self, batch: Batch, position: str) -> Batch:
        """`batch` and what is behind it now. Raises Unavailable."""
        after = batch.entries[-1].cursor if batch.entries else position
        more = await self._in_time(
            self._log.take(after=after, num_max=self._limits.batch_reports_max, wait_s=0.0)
        )
        self._dropped.update(more.trimmed)
        return replace(more, entries=batch.entries + more.entries)

    async def trim(self, position: str, now_s: float) -> None:
        """Remove what is before the position, once in `trim_s`. Raises Unavailable."""
        if now_s - self._trimmed_s >= self._limits.trim_s and position != "0-0":
            self._trimmed_s = now_s
            await self._in_time(self._log.trim_reports(before=position))

    def take_dropped(self) -> Iterator[ReportsLost]:
        """How many entries were dropped of which node's list, once in DROPPED_S."""
        now_s = asyncio.get_running_loop().time()
        if self._dropped and now_s - self._dropped_s >= DROPPED_S:
            self._dropped_s, dropped = now_s, self._dropped
            self._dropped = Counter[str]()
            for node, num in sorted(dropped.items()):
                yield ReportsLost(node=node, num_lost=num)

    async def _take(self, after: str) -> None:
        read: Batch | LogError
        try:
            async with asyncio.timeout(self._limits.take_wait_s + self._limits.call_s_max):
                read = await self._log.take(
                    after=after,
                    num_max=self._limits.batch_reports_max,
                    wait_s=self._limits.take_wait_s,
                )
            self._dropped.update(read.trimmed)
        except LogError as error:
            read = error
        except TimeoutError:
            read = Unavailable("the intake does not answer")
        except MemoryError:  # it passes, and what was sent is still there
            read = Unavailable("out of memory while the intake is read")
        self._read, self._reading = (after, read), None
        self._wake()

    async def _in_time(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._limits.call_s_max):
                return await call
        except TimeoutError:
            raise Unavailable("the intake does not answer") from None
