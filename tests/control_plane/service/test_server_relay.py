"""The relay to the log's server: agents use the log through it, and see when it is gone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from conftest import Cluster
from unicron.cli.cluster.local_cluster import free_port
from unicron.control_plane.service.server_relay import ServerRelay, is_local, url_at
from unicron.events.errors import Unavailable
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import user_name
from unicron.events.log.redis_streams import RedisLog


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:p@127.0.0.1:1/0", True),
        ("redis://:p@localhost:1/0", True),
        ("redis://[::1]:1/0", True),
        ("unix://:p@/a/b.sock", True),
        ("redis://:p@10.0.0.1:1/0", False),
        ("rediss://u:p@redis.site:1/0", False),
    ],
)
def test_which_servers_other_hosts_cannot_reach(url: str, expected: bool) -> None:
    assert is_local(url) is expected


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("redis://:p@127.0.0.1:1/3", "10.0.0.1", "redis://:p@10.0.0.1:8421/3"),
        ("redis://u:p@localhost/0", "fd00::1", "redis://u:p@[fd00::1]:8421/0"),
        ("unix://:p@/a/b.sock", "n1", "redis://:p@n1:8421/0"),
    ],
)
def test_the_url_through_the_relay(url: str, host: str, expected: str) -> None:
    assert url_at(url, host, 8421) == expected


async def test_the_log_is_used_through_it_until_it_closes(
    server: Server, redis_log: Cluster
) -> None:
    relay, port = ServerRelay(server.url), free_port()
    await relay.start("127.0.0.2", port)
    async with redis_log(url_at(server.url, "127.0.0.2", port)) as log:
        await log.check()
        waiting = asyncio.create_task(log.orders("n1", after="0-0", wait_s=30.0))
        await log.beat("n1", 7)
        async with redis_log() as direct:
            beats = await direct.beats(["n1"])
            assert [(beat.node, beat.incarnation) for beat in beats] == [("n1", 7)]
        await relay.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 5.0)


async def test_at_its_limit_those_go_that_the_server_has_not_let_in(
    server: Server, redis_log: Cluster
) -> None:
    relay, port = ServerRelay(server.url, 8), free_port()
    await relay.start("127.0.0.2", port)
    async with redis_log(url_at(server.url, "127.0.0.2", port)) as log:
        await log.check()
        waiting = asyncio.create_task(log.orders("n1", after="0-0", wait_s=30.0))
        strangers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for said in (b"", b"PING\r\n", b"RESET\r\n") * 4:
            reader, writer = await asyncio.open_connection("127.0.0.2", port)
            writer.write(said)
            if said:
                assert (await asyncio.wait_for(reader.read(99), 5.0))[:1] in b"-+"
            strangers.append((reader, writer))
        closed = strangers[:4]
        for reader, _ in closed:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5.0) == b""
        await log.beat("n1", 7)
        assert not waiting.done()
        for _, writer in strangers:
            writer.close()
        waiting.cancel()
    await relay.close()


async def test_at_its_limit_the_user_that_holds_most_makes_room(
    server: Server, redis_log: Cluster
) -> None:
    relay, port = ServerRelay(server.url, 8), free_port()
    await relay.start("127.0.0.2", port)
    identities = redis_log.identities
    leader = RedisLog(server.url, redis_log.name, identities.key, identities)
    await leader.admit({"evil": 1})
    await leader.close()
    async with redis_log(url_at(server.url, "127.0.0.2", port)) as log:
        await log.check()
        waiting = asyncio.create_task(log.orders("n1", after="0-0", wait_s=30.0))
        held: list[asyncio.StreamWriter] = []
        said = user_name(redis_log.name, "evil").encode(), identities.password("evil", 1).encode()
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.2", port)
            writer.write(
                b"*3\r\n$4\r\nAUTH\r\n"
                + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in said)
            )
            assert await asyncio.wait_for(reader.read(99), 5.0) == b"+OK\r\n"
            held.append(writer)
        async with redis_log(url_at(server.url, "127.0.0.2", port)) as newcomer:
            await asyncio.wait_for(newcomer.beat("n2", 1), 5.0)
        await log.beat("n1", 7)
        assert not waiting.done()
        for writer in held:
            writer.close()
        waiting.cancel()
    await relay.close()


async def test_without_a_server_a_connection_is_closed() -> None:
    relay, port = ServerRelay(f"redis://127.0.0.1:{free_port()}/0"), free_port()
    await relay.start("127.0.0.2", port)
    reader, writer = await asyncio.open_connection("127.0.0.2", port)
    assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.close()
    await relay.close()
