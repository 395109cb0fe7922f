"""The log is acknowledged only when the server keeps it as the policy asks."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis
import replicated_servers
from put_order import order, put
from unicron.events.errors import Ambiguous, Unavailable, UsageError
from unicron.events.log import durability, embedded_server
from unicron.events.log.identity import SECRET_BYTES, Identities, with_credentials
from unicron.events.log.redis_streams import RedisLog
from unicron.events.spec.policy import Policy

Redis: Any = redis.Redis
IDENTITIES = Identities(bytes(SECRET_BYTES), "c")
WAIT_S_MAX = 60.0


async def put_until_refused(log: RedisLog, seq: int, epoch: int) -> int:
    """Append records from `seq` on until the server refuses one; the last appended seq."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < deadline_s:
        try:
            await put(log, seq, epoch)
        except Unavailable as error:
            if "MISCONF" in str(error):
                return seq - 1
        else:
            seq += 1
        await asyncio.sleep(0.01)
    raise AssertionError("no append was refused")


@asynccontextmanager
async def opened(url: str, policy: Policy | None = None) -> AsyncGenerator[RedisLog]:
    log = RedisLog(url, "c", IDENTITIES.key, policy=policy)
    try:
        yield log
    finally:
        await log.close()


async def until_durable(log: RedisLog) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            return await log.check_durable()
        except Unavailable:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("aof", "fsync", "found"),
    [
        ("1", "always", "always"),
        ("1", "everysec", "everysec"),
        ("1", "no", "none"),
        ("1", "", "everysec"),
        ("0", "always", "none"),
        ("", "", "none"),
    ],
)
def test_what_a_server_provides(aof: str, fsync: str, found: str) -> None:
    settings = {"aof_enabled": aof, "appendfsync": fsync}
    assert durability.provided(settings) == found
    allowed = {
        "always": ["always", "everysec", "none"],
        "everysec": ["everysec", "none"],
        "none": ["none"],
    }[found]
    for asked in ("always", "everysec", "none"):
        why, hint = durability.refusal(settings, Policy(durability=asked))
        assert bool(why) == (asked not in allowed)
        assert not why or hint.endswith(f"durability: {found}"), "the word that accepts it"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("appendonly", "no", "has appendonly no, appendfsync always: a restart loses the log"),
        (
            "appendfsync",
            "everysec",
            "appendfsync everysec: a crash of its host loses the last seconds",
        ),
        ("maxmemory-policy", "allkeys-lru", "would evict the log"),
    ],
)
async def test_a_server_that_would_lose_records_is_refused_without_a_word_of_the_operator(
    own_server: embedded_server.Server, name: str, value: str, words: str
) -> None:
    word = {"appendonly": "none", "appendfsync": "everysec", "maxmemory-policy": "none"}[name]
    async with opened(own_server.url) as log:
        await log.check()
        await log.check_durable()
        with Redis.from_url(own_server.url) as client:
            client.config_set(name, value)
        with pytest.raises(UsageError, match=words) as refused:
            await log.check()
        assert "CONFIG SET" in refused.value.hint
        with pytest.raises(Unavailable, match=words):  # the setting may change while it runs
            await log.check_durable()
    async with opened(own_server.url, Policy(durability=word)) as log:
        if name == "maxmemory-policy":
            with pytest.raises(UsageError, match=words):
                await log.check()
        else:
            await log.check()
            await log.check_durable()


async def test_a_server_that_hides_its_settings_is_not_believed(
    own_server: embedded_server.Server,
) -> None:
    """Managed services forbid CONFIG."""
    with Redis.from_url(own_server.url) as master:
        master.execute_command("ACL", "SETUSER", "managed", "on", ">x", "~*", "+@all", "-config")
    url = with_credentials(own_server.url, "managed", "x")
    async with opened(url) as log:
        with pytest.raises(UsageError, match="appendfsync not told") as refused:
            await log.check()
        assert "durability: everysec" in refused.value.hint
    async with opened(url, Policy(durability="everysec")) as log:
        await log.check()
        await log.check_durable()


async def test_a_full_disk_of_the_server_acknowledges_nothing(tmp_path: Path) -> None:
    with replicated_servers.serving(tmp_path, appendfsync="everysec") as server:
        async with opened(server.url, Policy(durability="everysec")) as log:
            epoch = await log.start_epoch("x")
            await put(log, 1, epoch)
            server.fill_disk()
            seq = await put_until_refused(log, 2, epoch)
            with pytest.raises(Unavailable, match="aof_last_write_status"):
                await log.check_durable()
            server.free_disk()
            await until_durable(log)
            assert await log.last_seq() == seq
            await put(log, seq + 1, epoch)


@pytest.mark.skipif(
    bool(replicated_servers.why_no_failing_sync()), reason=replicated_servers.why_no_failing_sync()
)
async def test_a_failed_sync_acknowledges_nothing_more(tmp_path: Path) -> None:
    with replicated_servers.serving(tmp_path, appendfsync="everysec") as server:
        async with opened(server.url, Policy(durability="everysec")) as log:
            epoch = await log.start_epoch("x")
            with replicated_servers.failing_sync(server):
                await put_until_refused(log, 1, epoch)
            with pytest.raises(Unavailable, match="aof_last_write_status"):
                await log.check_durable()


@pytest.mark.parametrize("fails", ["sync", "room"])
async def test_a_server_that_syncs_always_ends_at_a_failure(tmp_path: Path, fails: str) -> None:
    """So a record that was not synced is never acknowledged; with room again it has all others."""
    if fails == "sync" and (why := replicated_servers.why_no_failing_sync()):
        pytest.skip(why)
    with replicated_servers.serving(tmp_path) as server:
        async with opened(server.url) as log:
            epoch = await log.start_epoch("x")
            await put(log, 1, epoch)
            if fails == "room":
                server.fill_disk()
            with replicated_servers.failing_sync(server) if fails == "sync" else nullcontext():
                with pytest.raises(Ambiguous):
                    await put(log, 2, epoch)
                assert server.process.wait(WAIT_S_MAX) != 0
    with replicated_servers.serving(tmp_path) as server:
        async with opened(server.url) as log:
            assert await log.last_seq() in (1, 2)


@pytest.mark.parametrize("program", ["", "redis-server"])
async def test_nothing_counts_before_a_replica_has_it(tmp_path: Path, program: str) -> None:
    """redis-server 7.0 has no WAITAOF. Agents see neither orders nor acknowledgements of a record
    that a failover could lose; they see both when the replica has it."""
    if program and not shutil.which(program):
        pytest.skip(f"there is no {program}")
    policy = Policy(replicas_min=1)
    with replicated_servers.replicated(tmp_path, program) as (primary, replica):
        async with opened(primary.url, policy) as log, opened(primary.url) as agent:
            await log.check()
            await until_durable(log)
            epoch = await log.start_epoch("x")
            await put(log, 1, epoch)
            assert [x.record.seq for x in await agent.orders("n1", after="0-0", wait_s=0)] == [1]
            replica.process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await put(log, 2, epoch)
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await log.check_durable()
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await log.rebuild_orders([order(2, epoch)], epoch=epoch, acked={"n1/7": 2})
            assert await log.last_seq() == 2, "it is in the log, and does not count yet"
            assert await agent.orders("n1", after=f"{epoch}-1", wait_s=0) == []
            assert await agent.acked("n1/7") == 1
            replica.process.send_signal(signal.SIGCONT)
            await until_durable(log)
            await log.rebuild_orders([order(2, epoch)], epoch=epoch, acked={"n1/7": 2})
            seen = await agent.orders("n1", after=f"{epoch}-1", wait_s=0)
            assert [x.record.seq for x in seen] == [2]
            assert await agent.acked("n1/7") == 2
            await put(log, 3, epoch)
        primary.process.kill()
        replica.client.replicaof("NO", "ONE")
        async with opened(replica.url) as promoted:
            assert [x.seq for x in await promoted.read(after=0, num_max=9)] == [1, 2, 3]
            assert await promoted.cursor() == "0-3"


async def test_a_replica_without_a_file_does_not_count(tmp_path: Path) -> None:
    with replicated_servers.replicated(tmp_path) as (primary, replica):
        async with opened(primary.url, Policy(replicas_min=1)) as log:
            await log.check()
            await until_durable(log)
            replica.client.config_set("appendonly", "no")
            with pytest.raises(Unavailable, match=r"0 of 1 replicas .* on disk"):
                await log.check_durable()
        async with opened(primary.url, Policy(replicas_min=1, durability="none")) as log:
            await log.check()
            await until_durable(log)


async def test_an_append_with_a_replica_takes_milliseconds(tmp_path: Path) -> None:
    """WAITAOF alone would wait up to 1 s for each."""
    with replicated_servers.replicated(tmp_path) as (primary, _):
        async with opened(primary.url, Policy(replicas_min=1)) as log:
            await log.check()
            await until_durable(log)
            epoch, took_s = await log.start_epoch("x"), []
            for seq in range(1, 21):
                began_s = time.monotonic()
                await put(log, seq, epoch)
                took_s.append(time.monotonic() - began_s)
            assert sorted(took_s)[10] < 0.5
