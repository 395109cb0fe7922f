"""A server that Sentinels watch, or whose replica a person promotes: the log finds the primary."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import certificates
import pytest
import replicated_servers
from certificates import Pair
from moved_port import MovedPort
from put_order import put
from replicated_servers import TcpServer
from unicron.cli.cluster.local_cluster import free_port
from unicron.control_plane.service.server_relay import ServerRelay, is_local, url_at
from unicron.events.errors import Ambiguous, Unavailable, UsageError
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.network_address import split_sentinels
from unicron.events.tls import is_plain

T = TypeVar("T")
IDENTITIES = Identities(bytes(SECRET_BYTES), "c")
WAIT_S_MAX = 150.0
"""A Sentinel whose process was late by 2 s does nothing for 30 s (TILT)."""
DEBIAN = "redis-server"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:p@h:1/2", ("", "redis://:p@h:1/2", ())),
        ("unix://:p@/a,b", ("", "unix://:p@/a,b", ())),
        ("redis+sentinel://h:1/log", ("log", "redis://h:1/", ("redis://h:1",))),
        (
            "rediss+sentinel://u:p@h:1,[fd00::1]:2/log/3",
            ("log", "rediss://u:p@h:1/3", ("rediss://h:1", "rediss://[fd00::1]:2")),
        ),
    ],
)
def test_a_url_of_sentinels(url: str, expected: tuple[str, str, tuple[str, ...]]) -> None:
    assert split_sentinels(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:hush@h:1",
        "redis+sentinel://:hush@h/log",
        "redis+sentinel://:hush@/log",
        "redis+sentinel://:hush@h:1,/log",
        "redis+sentinel://:hush@h:1,h:x/log",
        "http+sentinel://:hush@h:1/log",
        "redis+sentinel://:hush@h:1/log?db=3",
    ],
)
def test_a_url_that_names_no_server_is_one_line_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match="does not name Sentinels") as refused:
        RedisLog(url, "c")
    assert "hush" not in str(refused.value)
    assert "redis+sentinel://:PASSWORD@HOST:PORT" in refused.value.hint


@pytest.mark.parametrize(
    ("url", "plain", "local"),
    [
        ("redis+sentinel://127.0.0.1:1/log", True, True),
        ("redis+sentinel://10.0.0.1:1,10.0.0.2:1/log", True, False),
        ("rediss+sentinel://10.0.0.1:1,10.0.0.2:1/log", False, False),
    ],
)
def test_what_is_known_of_a_server_that_sentinels_name(url: str, plain: bool, local: bool) -> None:
    """They may name one on any host."""
    assert (is_plain(url), is_local(url)) == (plain, local)


async def again(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the server answers."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            return await call()
        except (Unavailable, Ambiguous):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


@asynccontextmanager
async def opened(url: str, ca: str = "") -> AsyncGenerator[RedisLog]:
    log = RedisLog(url, "c", IDENTITIES.key, ca=ca)
    try:
        yield log
    finally:
        await log.close()


def _asked(sentinel: TcpServer) -> bool:
    """Ask for a failover; whether the Sentinel has accepted it."""
    try:
        sentinel.client.execute_command("SENTINEL", "FAILOVER", replicated_servers.NAME)
    except replicated_servers.ResponseError:  # another one is under way, or it knows no replica
        return False
    return True


class Site:
    """A primary, its replica and three Sentinels, over TLS with a certificate."""

    def __init__(
        self,
        url: str,
        pair: Pair | None,
        primary: TcpServer,
        replica: TcpServer,
        sentinels: list[TcpServer],
        program: str,
    ) -> None:
        self.url, self.pair, self.program = url, pair, program
        self.ca = pair.ca.read_text() if pair else ""
        self.primary, self.replica, self.sentinels = primary, replica, sentinels


@pytest.fixture(
    params=[
        "",
        pytest.param(
            "tls",
            marks=[
                pytest.mark.thorough,
                pytest.mark.skipif(
                    not shutil.which(DEBIAN),
                    reason=f"there is no `{DEBIAN}` (apt-get install {DEBIAN})",
                ),
            ],
        ),
    ]
)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """The embedded server's program, and with TLS Debian's redis-server."""
    program, pair = "", None
    if request.param:
        if why := certificates.why_not():
            pytest.skip(why)
        program, pair = DEBIAN, Pair(tmp_path / "certs", "127.0.0.1")
    with (
        replicated_servers.replicated(tmp_path, program, pair) as (primary, replica),
        replicated_servers.watched(tmp_path, primary, program, pair) as (url, sentinels),
    ):
        yield Site(url, pair, primary, replica, sentinels, program)


async def test_after_a_failover_all_find_the_new_primary(site: Site, tmp_path: Path) -> None:
    """The leader, an agent that waits for orders, and a relay; then also the former primary, which
    comes back as a replica, and a failover that an operator asks for."""
    relay, port = (
        ServerRelay(
            site.url, find_server=(finder := RedisLog(site.url, "c", ca=site.ca)).find_server
        ),
        free_port(),
    )
    await relay.start("127.0.0.2", port)
    async with (
        opened(site.url, site.ca) as log,
        opened(site.url, site.ca) as agent,
        opened(url_at(site.url, "127.0.0.2", port)) as far,
    ):
        await log.check()
        epoch = await log.start_epoch("x")
        await put(log, 1, epoch)
        assert [x.record.seq for x in await agent.orders("n1", after="0-0", wait_s=0)] == [1]
        waiting = asyncio.create_task(
            again(lambda: agent.orders("n1", after=f"{epoch}-1", wait_s=30.0))
        )
        await until(lambda: site.replica.client.xlen("{unicron:c}:log") == 1)
        site.primary.process.kill()
        await again(log.check_durable)
        assert await finder.find_server() == ("127.0.0.1", site.replica.port)
        assert site.replica.role == "master"
        await put(log, 2, epoch)
        assert [x.record.seq for x in await waiting] == [2]
        if not site.pair:  # the relay passes bytes on
            assert await again(lambda: far.acked("n1/7")) == 2
        else:  # on a busy machine this takes Sentinels minutes: only in the thorough case
            await _comes_back(site, log, agent, epoch)
    await relay.close()
    await finder.close()


async def _comes_back(site: Site, log: RedisLog, agent: RedisLog, epoch: int) -> None:
    with replicated_servers.serving(
        site.primary.folder, program=site.program, port=site.primary.port, pair=site.pair
    ) as former:
        await until(lambda: former.role == "slave")
        site.replica.wait_replica()
        await until(lambda: former.client.xlen("{unicron:c}:log") == 2)
        waiting = asyncio.create_task(
            again(lambda: agent.orders("n1", after=f"{epoch}-2", wait_s=30.0))
        )
        await until(lambda: _asked(site.sentinels[0]))
        await until(lambda: site.replica.role == "slave")
        await again(log.check_durable)
        await put(log, 3, epoch)
        assert [x.record.seq for x in await waiting] == [3]
        assert [x.seq for x in await agent.read(after=0, num_max=9)] == [1, 2, 3]


async def test_a_sentinel_that_does_not_answer_is_passed_over(site: Site) -> None:
    first = site.sentinels[0].process
    first.send_signal(signal.SIGSTOP)
    try:
        async with opened(site.url, site.ca) as log:
            began_s = time.monotonic()
            await log.check()
            assert time.monotonic() - began_s < 20.0
        for one in site.sentinels[1:]:
            one.process.kill()
            one.process.wait(WAIT_S_MAX)
        async with opened(site.url, site.ca) as log:
            with pytest.raises(Unavailable, match=r"no Sentinel tells where the server is.*127\."):
                await log.check()
    finally:
        first.send_signal(signal.SIGCONT)


async def test_a_name_that_the_sentinels_do_not_know_is_said(site: Site) -> None:
    async with opened(site.url.replace(replicated_servers.NAME, "other"), site.ca) as log:
        with pytest.raises(Unavailable, match="knows no server other"):
            await log.check()


async def test_a_replica_that_a_person_promotes_at_the_same_address(tmp_path: Path) -> None:
    """A port that leads to another server from now on, as that of a proxy. The former primary runs
    on as a replica, and first keeps its connections."""
    with replicated_servers.replicated(tmp_path) as (primary, replica):
        async with MovedPort(primary.port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            async with opened(url) as log, opened(url) as agent:
                epoch = await log.start_epoch("x")
                await put(log, 1, epoch)
                await agent.beat("n1", 7)
                waiting = asyncio.create_task(
                    again(lambda: agent.orders("n1", after=f"{epoch}-1", wait_s=30.0))
                )
                await until(lambda: replica.client.xlen("{unicron:c}:log") == 1)
                replica.client.replicaof("NO", "ONE")
                primary.client.replicaof("127.0.0.1", replica.port)
                proxy.to = replica.port
                with pytest.raises(Unavailable, match="read only"):
                    await put(log, 2, epoch)
                await put(log, 2, epoch)
                with pytest.raises(Unavailable, match="read only"):
                    await agent.beat("n1", 7)
                await agent.beat("n1", 7)
                assert [x.record.seq for x in await waiting] == [2]
                assert [x.seq for x in await log.read(after=0, num_max=9)] == [1, 2]
                assert replica.client.xlen("{unicron:c}:log") == 2
