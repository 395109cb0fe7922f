"""The log in memory: as RedisLog, for tests and the simulated cluster.

It never reads real time: the constructor takes the clock, and waits use the timers of the running
loop, so a loop with virtual time can drive it.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import msgpack
from unicron.events.errors import Ambiguous, Conflict, Fenced, Leased, Unavailable
from unicron.events.log.identity import SIGNATURE_BYTES, report_error
from unicron.events.log.port import Batch, FilePart, Heartbeat, Rejected, Sent, SentOrder
from unicron.events.records import codec
from unicron.events.records.envelope import Record, Report, order_nodes

T = TypeVar("T")
Outcome = Literal["done", "unavailable", "lost", "applied"]
"""Result of a call. done; unavailable: refused before any change (Unavailable); lost: the request
was lost (Ambiguous, not applied); applied: the reply was lost (Ambiguous, applied)."""

Fault = Callable[[str], Outcome]
"""Called with the name of the port's method before each call; a simulator injects faults here."""


def _no_fault(call: str) -> Outcome:
    return "done"


class MemoryLog:
    """The log of one cluster; leader, readers and agents share this object.

    `clock` returns seconds (only differences count), for the age of heartbeats.
    """

    def __init__(self, clock: Callable[[], float], fault: Fault = _no_fault) -> None:
        self._clock = clock
        self.fault = fault
        self._records: list[Record] = []
        self.devices: dict[str, dict[int, str] | bytes] = {}
        """By node whose agent checks devices: what is wrong with that of a slot."""
        self._epoch, self._nonce = 0, ""
        self._lease = "", "", 0.0
        """The nonce and the URL of its holder, and when it ends."""
        self._followers: dict[str, float] = {}
        self._tokens = b""
        self._cursor = "0-0"
        self._acked: dict[str, int] = {}
        self._reports: list[tuple[int, bytes]] = []
        """(number, wire) in order; a trim does not reset the numbers."""
        self._num_reports = 0
        self._orders: dict[str, list[tuple[tuple[int, int], Record]]] = {}
        self._beats: dict[str, tuple[int, float, int]] = {}
        self.users: dict[str, int] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    async def close(self) -> None:
        """Do nothing; the log stays readable."""

    # --- the leader -----------------------------------------------------------------------------
    async def start_epoch(
        self, nonce: str, *, url: str = "", lease_s: float = 0.0, above: int = 0
    ) -> int:
        outcome = self._outcome("start_epoch")
        if outcome != "lost":
            holder, leader, until_s = self._lease
            is_mine = holder == nonce or (holder == "" and leader == url)
            if self._clock() < until_s and not is_mine:
                self._followers[url] = self._clock()
                if outcome == "done":
                    raise Leased(leader)
            else:
                self._epoch, self._nonce = max(self._epoch, above) + 1, nonce
                self._followers.pop(url, None)
                if lease_s:
                    self._lease = nonce, url, self._clock() + lease_s
        return self._reply(outcome, self._epoch)

    async def renew(self, nonce: str, *, epoch: int, url: str, lease_s: float) -> list[str]:
        outcome = self._outcome("renew")
        if outcome != "lost":
            if epoch > self._epoch:
                raise Conflict(f"the server has lost epoch {epoch}")
            if (epoch, nonce) != (self._epoch, self._nonce):
                raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
            self._lease = nonce, url, self._clock() + lease_s
        return self._reply(
            outcome,
            sorted(one for one, at_s in self._followers.items() if self._clock() - at_s <= 2.0),
        )

    async def release(self, nonce: str, *, url: str, lease_s: float) -> None:
        outcome = self._outcome("release")
        if outcome != "lost" and self._lease[0] == nonce:
            self._lease, self._nonce = ("", url, self._clock() + lease_s * bool(url)), ""
        self._reply(outcome, None)

    async def tokens(self) -> bytes:
        return self._reply(self._outcome("tokens"), self._tokens)

    async def keep_tokens(self, tokens: bytes, *, epoch: int) -> None:
        outcome = self._outcome("keep_tokens")
        if outcome != "lost":
            if epoch != self._epoch:
                raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
            self._tokens = tokens
        self._reply(outcome, None)

    async def append(
        self,
        records: Sequence[Record],
        *,
        epoch: int,
        expect: int,
        cursor: str,
        acked: Mapping[str, int],
    ) -> None:
        """Raises ValueError for a float that is not finite."""
        for place, record in enumerate(records, start=1):
            assert record.seq == expect + place, f"seq {record.seq} instead of {expect + place}"
            assert record.epoch == epoch, f"record of epoch {record.epoch} in epoch {epoch}"
            codec.encode_record(record)
        outcome = self._outcome("append")
        if outcome != "lost":
            try:
                self._append(records, epoch, expect, cursor, acked)
            except (Conflict, Fenced):
                if outcome == "done":
                    raise
        self._reply(outcome, None)

    def _append(
        self,
        records: Sequence[Record],
        epoch: int,
        expect: int,
        cursor: str,
        acked: Mapping[str, int],
    ) -> None:
        if epoch > self._epoch:
            raise Conflict(f"the server has lost epoch {epoch}")
        if epoch != self._epoch:
            raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
        if len(self._records) != expect:
            raise Conflict(f"the log ends at {len(self._records)}, expected {expect}")
        self._records.extend(records)
        for record in records:
            for node in order_nodes(record):
                self._orders.setdefault(node, []).append(((epoch, record.seq), record))
                self._wake(f"orders:{node}")
        if cursor:
            self._cursor = cursor
        self._acked.update(acked)

    async def cursor(self) -> str:
        """The intake's cursor as last appended."""
        return self._reply(self._outcome("cursor"), self._cursor)

    async def take(self, *, after: str, num_max: int, wait_s: float) -> Batch:
        """Entries after `after`; wait at most `wait_s` for the first. There is one list here."""
        outcome = self._outcome("take")
        start = _id(after)[1]

        def has_reports() -> bool:
            return bool(self._reports) and self._reports[-1][0] > start

        # Compare numbers, not counts: reports after `after` may have been trimmed already.
        if not has_reports():
            await self._wait("reports", has_reports, wait_s)
        first = bisect.bisect_right(self._reports, start, key=lambda entry: entry[0])
        found = self._reports[first : first + num_max]
        batch = Batch(
            entries=tuple(
                Sent(
                    cursor=f"0-{number}",
                    node=codec.decode_report(wire).source.rpartition("/")[0],
                    data=wire,
                    num_bytes=len(wire),
                )
                for number, wire in found
            ),
            is_whole=len(self._reports) - first < num_max,
        )
        return self._reply(outcome, batch)

    def read_report(self, sent: Sent) -> Report | Rejected:
        """The report, or why its node may not send it. Nothing is signed here."""
        report = codec.decode_report(sent.data)
        why = report_error(lambda node: b"", report, b"", sent.data, sent.node)
        return Rejected(why=why, source=report.source, data=sent.data) if why else report

    async def beats(self, nodes: Sequence[str]) -> list[Heartbeat]:
        """The newest heartbeat of each of these nodes that has sent one."""
        outcome = self._outcome("beats")
        now = self._clock()
        return self._reply(
            outcome,
            [
                Heartbeat(
                    node=node,
                    incarnation=beat[0],
                    age_s=max(0.0, now - beat[1]),
                    num_spooled=beat[2],
                )
                for node in nodes
                if (beat := self._beats.get(node)) is not None
            ],
        )

    async def admit(self, nodes: Mapping[str, int]) -> None:
        """Note it: everybody who has this object may use the log."""
        self.users |= nodes

    async def expel(self, nodes: Iterable[str]) -> None:
        """Note it, see `admit`."""
        for node in nodes:
            self.users.pop(node, None)

    async def mark_admitted(self) -> None:
        """Do nothing, see `admit`."""

    async def has_users(self) -> bool:
        """True, see `admit`."""
        return True

    async def rebuild_orders(
        self, open_orders: Sequence[Record], *, epoch: int, acked: Mapping[str, int]
    ) -> None:
        """Rebuild all order streams, and note `acked`. Raises Fenced."""
        outcome = self._outcome("rebuild_orders")
        if outcome != "lost":
            if epoch != self._epoch:
                raise Fenced(f"epoch {epoch} is over: {self._epoch} holds the log")
            self._orders.clear()
            self._acked.update(acked)
            for record in sorted(open_orders, key=lambda record: record.seq):
                for node in order_nodes(record):
                    self._orders.setdefault(node, []).append(((epoch, record.seq), record))
                    self._wake(f"orders:{node}")
        self._reply(outcome, None)

    async def check_durable(self) -> None:
        """What this process has written is kept as long as this process."""
        self._reply(self._outcome("check_durable"), None)

    sealed_seq, first_seq = 0, 1

    async def open_segments(self) -> None:
        """Do nothing: this log has no segments."""

    async def seal(
        self, records: Sequence[Record], *, epoch: int, open_orders: Iterable[int]
    ) -> None:
        """Do nothing, see `open_segments`."""

    async def trim_reports(self, *, before: str) -> None:
        """Delete reports up to and including cursor `before`."""
        outcome = self._outcome("trim_reports")
        if outcome != "lost":
            last = _id(before)[1]
            self._reports = [entry for entry in self._reports if entry[0] > last]
        self._reply(outcome, None)

    # --- readers --------------------------------------------------------------------------------
    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order."""
        return self._reply(self._outcome("read"), self._records[after : after + num_max])

    async def last_seq(self) -> int:
        """The last seq, 0 for an empty log."""
        return self._reply(self._outcome("last_seq"), len(self._records))

    async def ask_file(self, node: str, path: str, *, offset: int, wait_s: float) -> FilePart:
        """No agent here reads files."""
        raise Unavailable(f"the agent of {node} does not answer")

    async def check_devices(self, node: str, slots: Iterable[int], *, wait_s: float) -> FilePart:
        """As the agent that `devices` plays: what is wrong with each slot's device."""
        if node not in self.devices:
            raise Unavailable(f"the agent of {node} does not answer")
        played = self.devices[node]
        if isinstance(played, bytes):
            return FilePart(number="1", data=played)
        return FilePart(
            number="1", data=msgpack.encode({slot: played.get(slot, "") for slot in slots})
        )

    # --- agents ---------------------------------------------------------------------------------
    async def send(self, reports: Sequence[Report]) -> None:
        """Append to the intake. Raises ValueError for a float that is not finite."""
        wires = [codec.encode_report(report) for report in reports]
        outcome = self._outcome("send")
        if outcome != "lost":
            for wire in wires:
                self._num_reports += 1
                self._reports.append((self._num_reports, wire))
            self._wake("reports")
        self._reply(outcome, None)

    def entry(self, report: Report) -> bytes:
        """The report, in place of a signature zeros before it."""
        return bytes(SIGNATURE_BYTES) + codec.encode_report(report)

    async def acked(self, source: str) -> int:
        """The highest source_seq of this source that is in the log."""
        return self._reply(self._outcome("acked"), self._acked.get(source, 0))

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        """Orders for this node after `after`; wait at most `wait_s` for the first."""
        outcome = self._outcome("orders")
        start = _id(after)

        def found() -> list[SentOrder]:
            entries = self._orders.get(node, [])
            first = bisect.bisect_right(entries, start, key=lambda entry: entry[0])
            return [
                SentOrder(record=record, cursor=f"{at[0]}-{at[1]}")
                for at, record in entries[first:]
            ]

        if not found():
            await self._wait(f"orders:{node}", lambda: bool(found()), wait_s)
        return self._reply(outcome, found())

    async def beat(self, node: str, incarnation: int, num_spooled: int = 0) -> None:
        """Record a heartbeat; one of an older incarnation is ignored."""
        outcome = self._outcome("beat")
        if outcome != "lost" and incarnation >= self._beats.get(node, (0, 0.0, 0))[0]:
            self._beats[node] = (incarnation, self._clock(), num_spooled)
        self._reply(outcome, None)

    # --- waiting and faults ---------------------------------------------------------------------
    async def _wait(self, stream: str, ready: Callable[[], bool], wait_s: float) -> None:
        """Wait until `ready()`, at most `wait_s`, by the timers of the running loop."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not ready() and loop.time() < deadline:
            future = loop.create_future()
            self._waiters.setdefault(stream, []).append(future)
            timer = loop.call_at(deadline, _resolve, future)
            try:
                await future
            finally:
                timer.cancel()
                if future in self._waiters.get(stream, []):
                    self._waiters[stream].remove(future)

    def _wake(self, stream: str) -> None:
        for future in self._waiters.pop(stream, []):
            _resolve(future)

    def _outcome(self, call: str) -> Outcome:
        outcome = self.fault(call)
        if outcome == "unavailable":
            raise Unavailable(f"{call}: the log cannot be reached")
        return outcome

    @staticmethod
    def _reply(outcome: Outcome, value: T) -> T:
        if outcome != "done":
            raise Ambiguous("the reply was lost")
        return value


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _id(text: str) -> tuple[int, int]:
    high, _, low = text.partition("-")
    return int(high), int(low)
