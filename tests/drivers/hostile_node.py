"""A node that has joined a cluster, and whose agent says what it likes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import redis
from unicron.cli.cluster.client import Client
from unicron.events.log.identity import only_key, sign_report
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import codec
from unicron.events.records.envelope import Report
from unicron.events.records.reports import NodeJoined, ReportsLost
from unicron.events.records.types import Body

REDIS: Any = redis.Redis
PUSHED_NUM, ACKED_S_MAX = 500, 60.0
HEAD = {"v": 1, "occurred_s": 1.0}


class HostileNode:
    """A node with its key and its rights on the log's server. Use it as a context."""

    def __init__(self, client: Client, name: str) -> None:
        """Joins as an agent does. Raises Refused."""
        self.name, self.incarnation = name, int(time.time() * 1e6)
        joined = client.post(
            "/v1/join", {"node": name, "host": "127.0.0.1", "incarnation": self.incarnation}
        )
        self.key = bytes.fromhex(joined["key"])
        self.cluster = str(joined["cluster"])
        self.source = f"{name}/{self.incarnation}"
        self._server = REDIS.from_url(joined["redis_url"])
        self._runner = asyncio.Runner()
        self._log = RedisLog(joined["redis_url"], self.cluster, only_key(name, self.key))
        self._num = 0
        self.lists = self._open_lists()
        """The lists to which it may append, its own first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self._runner.run(self._log.close())
        self._runner.close()

    def _open_lists(self) -> list[str]:
        """Its own list, the one of all nodes of 0.3.0, and the one that wakes the leader."""
        names = (f"inbox:{self.name}", "inbox", "bell")
        found: list[str] = []
        for key in (f"{{unicron:{self.cluster}}}:{name}" for name in names):
            with suppress(redis.exceptions.NoPermissionError):
                self._server.rpush(key, b"")
                found.append(key)
        assert found, f"{self.name} may append to no list"
        return found

    # --- as an agent ----------------------------------------------------------------------------
    def join(self, num_slots: int = 0) -> None:
        """Report the agent's start, and wait until the leader has taken it."""
        self.report(
            NodeJoined(
                node=self.name,
                incarnation=self.incarnation,
                host="127.0.0.1",
                pid=1,
                num_slots=num_slots,
            )
        )
        self.wait_acked()

    def report(self, *bodies: Body) -> None:
        """Send reports as an agent does."""
        self._runner.run(self._log.send([self.next(body) for body in bodies]))

    def beat(self) -> None:
        """Send a heartbeat."""
        self._runner.run(self._log.beat(self.name, self.incarnation))

    def acked(self) -> int:
        """The number of this node's last report in the log."""
        return int(self._runner.run(self._log.acked(self.source)))

    def wait_acked(self, limit_s: float = ACKED_S_MAX) -> float:
        """Wait until the leader has taken all that `report` sent; how long it took, in s. Raises
        AssertionError."""
        begun_s = time.monotonic()
        while self.acked() < self._num:
            took_s = time.monotonic() - begun_s
            assert took_s < limit_s, f"the leader took no report of {self.name} in {took_s:.0f} s"
            time.sleep(0.01)
        return time.monotonic() - begun_s

    def check_leader(self) -> float:
        """Wait until the leader has taken one more report; how long it took, in s."""
        self.beat()
        self.report(ReportsLost(node=self.name, num_lost=1))
        return self.wait_acked()

    # --- as it likes ----------------------------------------------------------------------------
    def next(self, body: Body) -> Report:
        """A report with this node's next number."""
        self._num += 1
        return Report(source=self.source, source_seq=self._num, occurred_s=time.time(), body=body)

    def signed(self, report: Report) -> bytes:
        """The bytes of a report, signed with this node's key."""
        return sign_report(self.key, codec.encode_report(report))

    def push(self, entries: Sequence[bytes], to: int = 0) -> None:
        """Append any bytes to its own list, or to another that is open to it."""
        key = self.lists[to % len(self.lists)]
        for begin in range(0, len(entries), PUSHED_NUM):
            self._server.rpush(key, *entries[begin : begin + PUSHED_NUM])

    def malformed(self) -> Iterable[bytes]:
        """What has ended control planes: unsigned and too deep; a source of many digits; an
        incarnation with which the state can compute no more."""
        deep = self.nested(5_000)
        yield bytes(32) + deep
        yield sign_report(self.key, deep)
        body = ReportsLost(node=self.name, num_lost=1)
        for source in (f"{self.name}/" + 5_000 * "9", f"{self.name}/{2**64 - 1}"):
            yield self.signed(Report(source=source, source_seq=1, occurred_s=1.0, body=body))
        yield self.signed(
            Report(
                source=f"{self.name}/{2**64 - 1}",
                source_seq=2,
                occurred_s=1.0,
                body=NodeJoined(
                    node=self.name, incarnation=2**64 - 1, host="h", pid=1, num_slots=1
                ),
            )
        )

    def nested(self, depth: int) -> bytes:
        """A report of an unknown kind whose body is a map in a map, and so on."""
        encode = msgspec.msgpack.encode
        head = {"kind": "Foo", "source": self.source, "source_seq": 1, **HEAD}
        return (
            bytes([0x80 + len(head) + 1])
            + b"".join(encode(name) + encode(value) for name, value in head.items())
            + encode("body")
            + b"\x81\xa1a" * depth
            + b"\xc0"
        )
