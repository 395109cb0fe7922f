"""The log on Redis when its server or the connection fails."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from intake import take
from structlog.testing import capture_logs
from unicron.events.errors import Ambiguous, CorruptLog, Unavailable, UsageError
from unicron.events.log import embedded_server
from unicron.events.log import redis_streams as redis_log_module
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.port import Rejected
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import reports
from unicron.events.records.envelope import Record, Report

TEST_S_MAX = 60.0
IDENTITIES = Identities(bytes(SECRET_BYTES), "c")
Redis: Any = redis.Redis


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TEST_S_MAX))


def record(seq: int, epoch: int, text: str = "r") -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=reports.NodeLeft(node="n1", incarnation=7, reason=text),
    )


def report(source_seq: int) -> Report:
    return Report(
        source="n1/7",
        source_seq=source_seq,
        occurred_s=1.0,
        body=reports.NodeLeft(node="n1", incarnation=7, reason=""),
    )


async def connect(url: str, cluster: str) -> RedisLog:
    """A log whose server has been checked."""
    log = RedisLog(url, cluster)
    try:
        await log.check()
    except BaseException:
        await log.close()
        raise
    return log


async def put(log: RedisLog, *records: Record) -> None:
    await log.append(
        records,
        epoch=records[0].epoch,
        expect=records[0].seq - 1,
        cursor="",
        acked={"n1/7": records[-1].seq},
    )


class Proxy:
    """A proxy to the server that can lose requests, lose replies, or stop forwarding."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._writers: list[asyncio.StreamWriter] = []
        self.fate = "pass"
        self.url = ""
        self.num_connections = 0

    async def serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        server, forth = await asyncio.open_unix_connection(self._to)
        self._writers += [back, forth]
        there = self._pump(client, forth, "lose requests", back)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(there, self._pump(server, back, "lose replies", forth))

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        loses: str,
        other: asyncio.StreamWriter,
    ) -> None:
        try:
            while data := await source.read(65536):
                if self.fate == loses:
                    self.fate = "pass"
                    break
                if self.fate != "silent":
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        sink.close()
        other.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def proxied(server: embedded_server.Server) -> AsyncGenerator[Proxy]:
    proxy = Proxy(server.socket)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    proxy.url = f"redis://:{server.password}@127.0.0.1:{port}/0"
    try:
        yield proxy
    finally:
        listener.close()
        proxy.close()


@pytest.fixture
def log(redis_log: Any) -> AbstractAsyncContextManager[RedisLog]:
    one: AbstractAsyncContextManager[RedisLog] = redis_log()
    return one


@pytest.fixture
def own_server(tmp_path: Path) -> Any:
    """A server that the test may kill."""
    running = embedded_server.start(tmp_path)
    yield running
    if last := embedded_server.adopt(tmp_path):
        last.stop(grace_s=1.0)


@pytest.mark.parametrize(("fate", "stands"), [("lose replies", True), ("lose requests", False)])
async def test_an_append_without_a_reply_is_ambiguous_and_not_repeated(
    server: embedded_server.Server, redis_log: Any, fate: str, stands: bool
) -> None:
    async with proxied(server) as proxy, redis_log(proxy.url) as log, redis_log() as other:
        epoch = await log.start_epoch("x")
        await put(log, record(1, epoch))
        proxy.fate = fate
        with pytest.raises(Ambiguous):
            await put(log, record(2, epoch))
        assert await other.last_seq() == (2 if stands else 1)
        assert await other.acked("n1/7") == (2 if stands else 1)
        # The same client continues from the log's state.
        last = await log.last_seq()
        await put(log, record(last + 1, epoch))
        assert len(await log.read(after=0, num_max=9)) == last + 1


async def test_a_send_without_a_reply_is_ambiguous_and_may_be_sent_again(
    server: embedded_server.Server, redis_log: Any
) -> None:
    async with proxied(server) as proxy, redis_log(proxy.url) as log:
        assert await log.last_seq() == 0
        proxy.fate = "lose replies"
        with pytest.raises(Ambiguous):
            await log.send([report(1), report(2)])
        await log.send([report(1), report(2)])
        await log.admit({"n1": 7})
        assert [r.source_seq for r in await take(log)] == [1, 2, 1, 2]


@pytest.mark.parametrize("fate", ["lose replies", "lose requests"])
async def test_a_repeatable_call_survives_one_lost_reply(
    server: embedded_server.Server, redis_log: Any, fate: str
) -> None:
    async with proxied(server) as proxy, redis_log(proxy.url) as log:
        epoch = await log.start_epoch("x")
        await put(log, record(1, epoch))
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            log.last_seq,
            log.cursor,
            lambda: log.beats(["n1"]),
            lambda: log.read(after=0, num_max=5),
            lambda: log.acked("n1/7"),
            lambda: log.beat("n1", 7),
            lambda: log.take(after="0-0", num_max=5, wait_s=0.05),
            lambda: log.orders("n1", after="0-0", wait_s=0.05),
            lambda: log.trim_reports(before="0-0"),
            lambda: log.rebuild_orders([], epoch=epoch, acked={}),
        ]
        for call in calls:
            await call()  # connects first: a failed first connection raises Unavailable
            proxy.fate = fate
            await call()
        proxy.fate = fate
        assert await log.start_epoch("y") > epoch
        proxy.fate = "pass"


async def test_a_server_without_replies_is_given_up(
    server: embedded_server.Server, redis_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_log_module, "REPLY_S_MAX", 1.0)
    monkeypatch.setattr(redis_log_module, "CONNECT_S_MAX", 1.0)
    async with proxied(server) as proxy, redis_log(proxy.url) as log:
        epoch = await log.start_epoch("x")
        await log.take(after="0-0", num_max=9, wait_s=0.01)
        proxy.fate = "silent"
        start = time.monotonic()
        with pytest.raises(Unavailable, match="no reply within"):
            await log.take(after="0-0", num_max=9, wait_s=0.2)
        assert 1.1 < time.monotonic() - start < TEST_S_MAX / 2
        with pytest.raises(Unavailable):
            await log.orders("n1", after="0-0", wait_s=0.2)  # a new connection, also without reply
        proxy.fate = "pass"
        assert await log.orders("n1", after="0-0", wait_s=0.2) == []
        assert await log.last_seq() == 0
        assert epoch == 1


async def test_a_blocking_read_outlives_the_default_socket_timeout(redis_log: Any) -> None:
    """redis-py's default timeout is 5 s; a read that blocks longer must end with its report."""
    async with redis_log() as log, redis_log() as agent:
        await log.admit({"n1": 7})
        start = time.monotonic()
        waiting = asyncio.create_task(take(log, wait_s=30.0))
        await asyncio.sleep(5.5)
        await agent.send([report(1)])
        assert [r.source_seq for r in await waiting] == [1]
        assert time.monotonic() - start < 29.0, "the report must end the read"


async def test_a_read_of_large_records_ends_early(
    log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand records may have a gigabyte; whoever reads on gets all."""
    monkeypatch.setattr(redis_log_module, "READ_BYTES_MAX", 1 << 20, raising=False)
    epoch = await log.start_epoch("a")
    large = [record(seq, epoch, "x" * 10_000) for seq in range(1, 1_001)]
    await log.append(large, epoch=epoch, expect=0, cursor="", acked={})
    page = await log.read(after=0, num_max=1_000)
    assert 100 <= len(page) <= 200
    while more := await log.read(after=page[-1].seq, num_max=1_000):
        page += more
    assert page == large


async def test_a_poll_does_not_wait_for_a_blocking_take(log: RedisLog) -> None:
    """The leader reads the whole intake before it checks deadlines, which must not be delayed."""
    await log.start_epoch("a")
    await log.admit({"n1": 7})
    waiting = asyncio.create_task(take(log, wait_s=30.0))
    await asyncio.sleep(0.2)
    for _ in range(3):
        assert await take(log) == ()
    assert not waiting.done()
    await log.send([report(1)])
    assert len(await waiting) == 1


async def test_close_ends_a_call_that_blocks(log: RedisLog) -> None:
    waiting = asyncio.create_task(log.take(after="0-0", num_max=9, wait_s=50.0))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await log.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    assert time.monotonic() - start < 45.0


async def test_no_server_is_unavailable_and_the_password_is_hidden() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = RedisLog(f"redis://:hush@127.0.0.1:{port}/0", "c", IDENTITIES.key)
    for call in (log.last_seq(), put(log, record(1, 1)), log.send([report(1)])):
        with pytest.raises(Unavailable) as raised:
            await call
        assert str(port) in str(raised.value)
        assert "hush" not in str(raised.value)
    unix = RedisLog("unix:///nowhere/socket", "c")
    with pytest.raises(Unavailable):
        await unix.last_seq()


async def test_a_wrong_password_is_a_usage_error(server: embedded_server.Server) -> None:
    for secret in (":wrong@", ""):
        with pytest.raises(UsageError) as raised:
            await connect(f"unix://{secret}{server.socket}", "c")
        assert raised.value.hint
        assert "wrong@" not in str(raised.value)


async def test_a_server_that_evicts_is_refused(own_server: embedded_server.Server) -> None:
    with capture_logs() as logged:
        await (await connect(own_server.url, "c")).close()
    assert logged == [], "the embedded server must cause no warning"
    with Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(UsageError, match="evict"):
            await connect(own_server.url, "c")
        client.config_set("maxmemory-policy", "volatile-lru")
        with capture_logs() as logged:
            await (await connect(own_server.url, "c")).close()
        assert len(logged) == 1


async def test_a_full_server_refuses_the_whole_append(own_server: embedded_server.Server) -> None:
    log = RedisLog(own_server.url, "c")
    epoch = await log.start_epoch("x")
    with Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(Unavailable, match="memory"):
            await put(log, record(1, epoch), record(2, epoch))
        client.config_set("maxmemory", "0")
    assert await log.last_seq() == 0
    await put(log, record(1, epoch), record(2, epoch))
    await log.close()


async def test_a_unix_socket_with_a_password(
    own_server: embedded_server.Server, tmp_path: Path
) -> None:
    config = tmp_path / "valkey.conf"
    own_server.stop()
    path = f"/tmp/unicron-test-{os.getpid()}.sock"
    config.write_text(config.read_text() + f"unixsocket {path}\nunixsocketperm 700\n")
    process = await asyncio.create_subprocess_exec(
        str(embedded_server.find_binary()), str(config), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        while not Path(path).exists():
            await asyncio.sleep(0.02)
        log = await connect(f"unix://:{own_server.password}@{path}", "c")
        await put(log, record(1, await log.start_epoch("x")))
        assert await log.last_seq() == 1
        await log.close()
    finally:
        process.terminate()
        await process.wait()


async def test_invalid_records_are_named_and_invalid_reports_skipped(
    log: RedisLog, server: embedded_server.Server, redis_log: Any
) -> None:
    epoch = await log.start_epoch("x")
    await put(log, *(record(seq, epoch) for seq in range(1, 6)))
    prefix = f"{{unicron:{redis_log.name}}}:"
    with Redis.from_url(server.url) as client:
        await log.admit({"n1": 7})
        await log.send([report(1)])
        client.rpush(prefix + "inbox:n1", b"\xff nonsense")
        await log.send([report(2)])
        batch = await log.take(after="0-0", num_max=9, wait_s=0)
        first, junk, last = map(log.read_report, batch.entries)
        assert (first, last) == (report(1), report(2))
        assert isinstance(junk, Rejected)
        assert (junk.source, junk.data) == ("n1", b"\xff nonsense")
        client.xdel(prefix + "log", f"{epoch}-3")
        with pytest.raises(CorruptLog) as gap:
            await log.read(after=0, num_max=99)
        assert gap.value.seq == 3
        client.xadd(prefix + "log", {"r": b"nonsense"}, id=f"{epoch}-6")
        with pytest.raises(CorruptLog) as foreign:
            await log.read(after=5, num_max=99)
        assert foreign.value.seq == 6


async def test_kill_9_of_the_server_loses_no_acknowledged_record(
    own_server: embedded_server.Server, tmp_path: Path
) -> None:
    """Kills it five times under load; the client reconnects to the new server by itself."""

    async def write(log: RedisLog, acknowledged: list[str], stop: asyncio.Event) -> None:
        epoch, seq = await log.start_epoch("w"), await log.last_seq()
        while not stop.is_set():
            batch = [record(seq + i, epoch, f"{epoch}/{seq + i}") for i in range(1, 8)]
            try:
                await log.append(
                    batch, epoch=epoch, expect=seq, cursor=f"1-{seq + 7}", acked={"n1/7": seq + 7}
                )
                acknowledged += [f"{r.epoch}/{r.seq}" for r in batch]
                seq += 7
            except (Ambiguous, Unavailable):
                while True:
                    try:
                        epoch, seq = await log.start_epoch("w"), await log.last_seq()
                        break
                    except (Ambiguous, Unavailable):
                        await asyncio.sleep(0.02)

    log, stop, acknowledged = RedisLog(own_server.url, "c"), asyncio.Event(), list[str]()
    writer = asyncio.create_task(write(log, acknowledged, stop))
    running = own_server
    for _ in range(5):
        before = len(acknowledged)
        while len(acknowledged) < before + 50:
            await asyncio.sleep(0.01)
        os.kill(running.pid, signal.SIGKILL)
        while running.is_alive:
            await asyncio.sleep(0.01)
        running = await asyncio.to_thread(embedded_server.start, tmp_path)
        assert running.url == own_server.url
    stop.set()
    await writer
    records = await log.read(after=0, num_max=1_000_000)
    assert [r.seq for r in records] == list(range(1, len(records) + 1))
    there = [r.body.reason for r in records if isinstance(r.body, reports.NodeLeft)]
    assert set(acknowledged) <= set(there)
    assert len(there) % 7 == 0, "an append was stored in part"
    assert await log.cursor() == f"1-{len(records)}"
    assert await log.acked("n1/7") == len(records)
    await log.close()
