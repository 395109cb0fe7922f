"""The newest records in memory, and the streams of those who follow the log."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from ...events.log.port import ReaderPort
from ...events.records.envelope import Record

PAGE_RECORDS_MAX = 1_000


class Tail:
    """Wakes those that follow when there are new records."""

    def __init__(
        self, log: ReaderPort, *, kept_num_max: int, idle_s: float, pause_s: float = 0.0
    ) -> None:
        """`idle_s`: a stream without records yields an empty page so often. `pause_s`: after each
        page, so that many streams share their work."""
        self._log, self._idle_s, self._pause_s = log, idle_s, pause_s
        self._newest: deque[Record] = deque(maxlen=kept_num_max)
        self._changed = asyncio.Event()
        self._stopped = False

    def add(self, records: Iterable[Record]) -> None:
        """The log has these records."""
        self._newest.extend(records)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def clear(self) -> None:
        """The log was folded anew."""
        self._newest.clear()

    def stop(self) -> None:
        """End all streams."""
        self._stopped = True
        self._changed.set()

    async def follow(self, after: int) -> AsyncIterator[Sequence[Record]]:
        """Pages of records after `after`, until `stop`; an empty page every `idle_s` without a
        record. Raises Unavailable."""
        while not self._stopped:
            changed = self._changed
            page: Sequence[Record] = [record for record in self._newest if record.seq > after]
            if not page or page[0].seq != after + 1:
                page = await self._log.read(after=after, num_max=PAGE_RECORDS_MAX)
            if page:
                after = page[-1].seq
                yield page
                await asyncio.sleep(self._pause_s)
            while not (page or changed.is_set()):
                try:
                    async with asyncio.timeout(self._idle_s):
                        await changed.wait()
                except TimeoutError:
                    yield ()
