"""The log in memory: every port, for the simulation and for tests.

Nothing here knows real time: the clock comes by constructor, waiting uses the timers of the
running loop, so that a loop with virtual time drives it.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from ..errors import Ambiguous, Conflict, Fenced, Unavailable
from ..records import codec
from ..records.envelope import Record, Report, order_nodes
from .port import Batch, Beat, SentOrder

T = TypeVar("T")
Outcome = Literal["done", "unavailable", "lost", "applied"]
"""What becomes of a call: done; refused before anything happened (Unavailable); the request was
lost (Ambiguous, not applied); the reply was lost (Ambiguous, applied)."""

Fault = Callable[[str], Outcome]
"""Asked before each call with the name of the port's method; a simulator's hook."""


def _no_fault(call: str) -> Outcome:
    return "done"


class MemoryLog:
    """One cluster's log; leader, readers and agents share the one object.

    `clock` gives seconds (only differences count), for the age of heartbeats.
    """

    def __init__(self, clock: Callable[[], float], fault: Fault = _no_fault) -> None:
        self._clock = clock
        self.fault = fault
        self._records: list[Record] = []
        self._epoch = 0
        self._cursor = "0-0"
        self._acked: dict[str, int] = {}
        self._reports: list[tuple[int, bytes]] = []
        """(number, wire) in order; numbers go on after a trim."""
        self._num_reports = 0
        self._orders: dict[str, list[tuple[tuple[int, int], Record]]] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        self._bells: dict[str, list[asyncio.Future[None]]] = {}

    async def close(self) -> None:
        """Nothing to close; the log stays readable."""

    # --- the leader -----------------------------------------------------------------------------
    async def start_epoch(self, nonce: str) -> int:
        """A new epoch above all before."""
        outcome = self._ask("start_epoch")
        if outcome != "lost":
            self._epoch += 1
        return self._reply(outcome, self._epoch)

    async def append(self, records: Sequence[Record], *, epoch: int, expect: int,
                     cursor: str, acked: Mapping[str, int]) -> None:
        """As the port says. Raises ValueError for a float that is not finite."""
        for place, record in enumerate(records, start=1):
            assert record.seq == expect + place, f"record {record.seq} at {expect + place}"
            assert record.epoch == epoch, f"record of epoch {record.epoch} in {epoch}"
            codec.encode_record(record)
        outcome = self._ask("append")
        if outcome != "lost":
            try:
                self._append(records, epoch, expect, cursor, acked)
            except (Conflict, Fenced):
                if outcome == "done":
                    raise
        self._reply(outcome, None)

    def _append(self, records: Sequence[Record], epoch: int, expect: int, cursor: str,
                acked: Mapping[str, int]) -> None:
        if epoch != self._epoch:
            raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
        if len(self._records) != expect:
            raise Conflict(f"the log ends at {len(self._records)}, expected {expect}")
        self._records.extend(records)
        for record in records:
            for node in order_nodes(record):
                self._orders.setdefault(node, []).append(((epoch, record.seq), record))
                self._ring(f"orders:{node}")
        if cursor:
            self._cursor = cursor
        self._acked.update(acked)

    async def cursor(self) -> str:
        """The intake's cursor as last appended."""
        return self._reply(self._ask("cursor"), self._cursor)

    async def take(self, *, after: str, num_max: int, wait_s: float) -> Batch:
        """Reports behind `after`, waiting at most `wait_s`."""
        outcome = self._ask("take")
        start = _id(after)[1]

        def there() -> bool:
            return bool(self._reports) and self._reports[-1][0] > start

        # Not by their number: what is behind `after` may have been trimmed already.
        if not there():
            await self._wait("reports", there, wait_s)
        first = bisect.bisect_right(self._reports, start, key=lambda entry: entry[0])
        found = self._reports[first : first + num_max]
        batch = Batch(reports=tuple(codec.decode_report(wire) for _, wire in found),
                      cursor=f"0-{found[-1][0]}" if found else after)
        return self._reply(outcome, batch)

    async def beats(self) -> list[Beat]:
        """The newest heartbeat of every node, by name."""
        outcome = self._ask("beats")
        now = self._clock()
        return self._reply(outcome, [
            Beat(node=node, incarnation=incarnation, age_s=max(0.0, now - at))
            for node, (incarnation, at) in sorted(self._beats.items())
        ])

    async def rebuild_orders(self, open_orders: Sequence[Record], *, epoch: int) -> None:
        """All orders streams anew. Raises Fenced."""
        outcome = self._ask("rebuild_orders")
        if outcome != "lost":
            if epoch != self._epoch:
                raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
            self._orders.clear()
            for record in sorted(open_orders, key=lambda record: record.seq):
                for node in order_nodes(record):
                    self._orders.setdefault(node, []).append(((epoch, record.seq), record))
                    self._ring(f"orders:{node}")
        self._reply(outcome, None)

    async def trim_reports(self, *, before: str) -> None:
        """Forget reports up to and including cursor `before`."""
        outcome = self._ask("trim_reports")
        if outcome != "lost":
            last = _id(before)[1]
            self._reports = [entry for entry in self._reports if entry[0] > last]
        self._reply(outcome, None)

    # --- readers --------------------------------------------------------------------------------
    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order."""
        return self._reply(self._ask("read"), self._records[after : after + num_max])

    async def last_seq(self) -> int:
        """The last seq, 0 for an empty log."""
        return self._reply(self._ask("last_seq"), len(self._records))

    # --- agents ---------------------------------------------------------------------------------
    async def send(self, reports: Sequence[Report]) -> None:
        """Into the intake. Raises ValueError for a float that is not finite."""
        wires = [codec.encode_report(report) for report in reports]
        outcome = self._ask("send")
        if outcome != "lost":
            for wire in wires:
                self._num_reports += 1
                self._reports.append((self._num_reports, wire))
            self._ring("reports")
        self._reply(outcome, None)

    async def acked(self, source: str) -> int:
        """The highest source_seq of this source that is in the log."""
        return self._reply(self._ask("acked"), self._acked.get(source, 0))

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        """Orders for this node behind `after`, waiting at most `wait_s`."""
        outcome = self._ask("orders")
        start = _id(after)

        def found() -> list[SentOrder]:
            entries = self._orders.get(node, [])
            first = bisect.bisect_right(entries, start, key=lambda entry: entry[0])
            return [SentOrder(record=record, cursor=f"{at[0]}-{at[1]}")
                    for at, record in entries[first:]]

        if not found():
            await self._wait(f"orders:{node}", lambda: bool(found()), wait_s)
        return self._reply(outcome, found())

    async def beat(self, node: str, incarnation: int) -> None:
        """A heartbeat; one of an older incarnation than the newest is ignored."""
        outcome = self._ask("beat")
        if outcome != "lost" and incarnation >= self._beats.get(node, (0, 0.0))[0]:
            self._beats[node] = (incarnation, self._clock())
        self._reply(outcome, None)

    # --- waiting and faults ---------------------------------------------------------------------
    async def _wait(self, bell: str, there: Callable[[], bool], wait_s: float) -> None:
        """Until `there`, at most `wait_s`, by the running loop's timers alone."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not there() and loop.time() < deadline:
            heard = loop.create_future()
            self._bells.setdefault(bell, []).append(heard)
            timer = loop.call_at(deadline, _settle, heard)
            try:
                await heard
            finally:
                timer.cancel()
                if heard in self._bells.get(bell, []):
                    self._bells[bell].remove(heard)

    def _ring(self, bell: str) -> None:
        for heard in self._bells.pop(bell, []):
            _settle(heard)

    def _ask(self, call: str) -> Outcome:
        outcome = self.fault(call)
        if outcome == "unavailable":
            raise Unavailable(f"{call}: the log cannot be reached")
        return outcome

    @staticmethod
    def _reply(outcome: Outcome, value: T) -> T:
        if outcome != "done":
            raise Ambiguous("the reply was lost")
        return value


def _settle(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)


def _id(text: str) -> tuple[int, int]:
    high, _, low = text.partition("-")
    return int(high), int(low)
