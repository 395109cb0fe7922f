"""The newest records in memory, and the streams of those who follow the log."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from ...events.log.port import ReaderPort
from ...events.records.codec import encode_record
from ...events.records.envelope import Record

PAGE_RECORDS_MAX = 1_000
KEPT_BYTES_MAX = 32 << 20
"""Of the newest records, as the log has them: a node may report a megabyte at a time."""


class Tail:
    """Wakes those that follow when there are new records."""

    def __init__(
        self, log: ReaderPort, *, kept_num_max: int, idle_s: float, pause_s: float = 0.0
    ) -> None:
        """`idle_s`: a stream without records yields an empty page so often. `pause_s`: after each
        page, so that many streams share their work."""
        self._log, self._idle_s, self._pause_s = log, idle_s, pause_s
        self._kept_num_max = kept_num_max
        self._newest, self._sizes, self._num_bytes = deque[Record](), deque[int](), 0
        self._changed = asyncio.Event()
        self._stopped = False

    def add(self, records: Iterable[Record]) -> None:
        """The log has these records."""
        for record in records:
            self._newest.append(record)
            self._sizes.append(len(encode_record(record)))
            self._num_bytes += self._sizes[-1]
            while len(self._newest) > self._kept_num_max or self._num_bytes > KEPT_BYTES_MAX:
                self._newest.popleft()
                self._num_bytes -= self._sizes.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def clear(self) -> None:
        """The log was folded anew."""
        self._newest.clear()
        self._sizes.clear()
        self._num_bytes = 0

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
