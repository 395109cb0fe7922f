"""The process that answers reads: it hangs, it dies, and many ask it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from unicron.control_plane.api import reads
from unicron.control_plane.api.address import Address
from unicron.control_plane.api.connections import Listener
from unicron.control_plane.api.http import HttpApi
from unicron.control_plane.api.metrics import Metrics
from unicron.control_plane.api.read_messages import Begin
from unicron.control_plane.api.reads import READS_NUM_MAX, ReadProcess
from unicron.control_plane.api.routes import ROUTES
from unicron.control_plane.api.tokens import Tokens
from unicron.control_plane.service.coordinator import Coordinator
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.segments import Folder
from unicron.events.spec.policy import Policy

from ..service.test_coordinator import leading, real_clock

CLUSTER = "reads"
Answer = tuple[int, str, bytes]


class Site:
    """A control plane that leads, whose reads a process answers, and a client of it."""

    def __init__(
        self, coordinator: Coordinator, process: ReadProcess, tokens: Tokens, url: str
    ) -> None:
        self.coordinator, self.process, self.tokens, self.url = coordinator, process, tokens, url

    @property
    def pid(self) -> int:
        """Of the process that answers reads."""
        found: Any = self.process._process  # pyright: ignore[reportPrivateUsage]
        return int(found.pid)

    async def get(self, path: str, token: str = "secret") -> Answer:
        """Status, Retry-After and body."""
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as client,
            client.get(self.url + path, headers=headers) as reply,
        ):
            return reply.status, reply.headers.get("Retry-After", ""), await reply.read()


@asynccontextmanager
async def serving(server: Server, folder: Path) -> AsyncIterator[Site]:
    identities = Identities(bytes(SECRET_BYTES), CLUSTER)
    log = RedisLog(server.url, CLUSTER, identities.key)
    address = Address(redis_url=server.url, cluster=CLUSTER)
    tokens = Tokens(folder / "tokens.json", owner="secret")
    async with asyncio.timeout(120.0), leading(log, clock=real_clock) as coordinator:
        begin = Begin(
            redis_url=server.url,
            ca="",
            cluster=CLUSTER,
            folder=Folder(folder / "log", CLUSTER).where,
            policy=Policy(),
            address=address,
            token="of the process",
        )
        process = ReadProcess(begin, coordinator, str, folder / "reads.sock")
        http = HttpApi(
            ROUTES,
            coordinator,
            log,
            tokens=tokens,
            address=address,
            identities=identities,
            metrics=Metrics(),
            reads=process,
        )
        listener = Listener(http.app(), stop_s_max=1.0)
        port = await listener.start("127.0.0.1", 0)
        try:
            yield Site(coordinator, process, tokens, f"http://127.0.0.1:{port}")
        finally:
            await process.stop()
            await listener.stop()
    await log.close()


async def test_a_process_that_hangs_is_ended_and_started_again(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it is told to ask again, and is answered then; a stream ends."""
    monkeypatch.setattr(reads, "SILENT_S_MAX", 2.0)
    async with serving(own_server, tmp_path) as site:
        assert (await site.get("/v1/state"))[0] == 200
        hung = site.pid
        stream = asyncio.create_task(site.get("/v1/log?follow=1"))
        await asyncio.sleep(0.5)
        os.kill(hung, signal.SIGSTOP)
        async with asyncio.timeout(20.0):
            status, again, body = await site.get("/v1/state")
        assert (status, again) == (503, "1")
        assert b"reads are not answered at the moment" in body
        with pytest.raises(aiohttp.ClientError):
            await stream
        async with asyncio.timeout(5.0):
            while Path(f"/proc/{hung}").exists():
                await asyncio.sleep(0.05)
        assert (await site.get("/v1/state"))[0] == 200
        assert site.pid != hung


async def test_a_process_that_is_slow_or_was_stopped_for_a_moment_goes_on(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit acts on silence of the process alone, and on the second look."""
    monkeypatch.setattr(reads, "SILENT_S_MAX", 3.0)
    async with serving(own_server, tmp_path) as site:
        assert (await site.get("/v1/state"))[0] == 200
        first = site.pid
        os.kill(first, signal.SIGSTOP)
        asked = asyncio.create_task(site.get("/v1/state"))
        await asyncio.sleep(3.5)
        os.kill(first, signal.SIGCONT)
        assert (await asked)[0] == 200
        stream = asyncio.create_task(site.get("/v1/log?follow=1"))
        await asyncio.sleep(7.0)
        assert not stream.done()
        stream.cancel()
        assert site.pid == first


async def test_each_token_has_its_own_places_also_in_the_process(
    own_server: Server, tmp_path: Path
) -> None:
    async with serving(own_server, tmp_path) as site:
        secrets = [site.tokens.create(name, "view", 3600.0)[1] for name in ("a", "b")]
        assert (await site.get("/v1/state"))[0] == 200
        os.kill(site.pid, signal.SIGSTOP)
        asked = [
            asyncio.create_task(site.get("/v1/history", secret))
            for secret in secrets
            for _ in range(READS_NUM_MAX)
        ]
        await asyncio.sleep(0.5)
        os.kill(site.pid, signal.SIGCONT)
        answers = await asyncio.gather(*asked)
        assert {status for status, _, _ in answers} == {200}, answers
        streams = [
            asyncio.create_task(site.get("/v1/log?follow=1", secret))
            for secret in secrets
            for _ in range(reads.STREAMS_NUM_MAX // 2 + 1)
        ]
        done, _ = await asyncio.wait(streams, timeout=3.0)
        for stream in streams:
            stream.cancel()
        assert not [stream.result() for stream in done]


async def test_many_agents_of_the_former_release_leave_reads_answered(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {f"node-{number:05d}.rack-{number % 40}.example" for number in range(4_000)}
    monkeypatch.setattr(Coordinator, "old_agents", old)
    async with serving(own_server, tmp_path) as site:
        status, _, body = await site.get("/v1/state")
        assert status == 200, body
        assert body.count(b"rack-7.example") == 100


async def test_after_its_end_no_read_starts_it_again(own_server: Server, tmp_path: Path) -> None:
    async with serving(own_server, tmp_path) as site:
        assert (await site.get("/v1/state"))[0] == 200
        await asyncio.sleep(reads.START_EVERY_S)
        await site.process.stop()
        status, _, body = await site.get("/v1/state")
        assert (status, b"the control plane stops" in body) == (503, True)


async def asked_as_is(site: Site, target: str) -> bytes:
    """The answer to a request with this target, whatever a client would make of it."""
    at = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"Host: {at.netloc}\r\nAuthorization: Bearer secret\r\nConnection: close"
    writer.write(f"GET {target} HTTP/1.1\r\n{head}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_process_gets_the_path_that_the_control_plane_has_let_pass(
    own_server: Server, tmp_path: Path
) -> None:
    async with serving(own_server, tmp_path) as site:
        whole = await asked_as_is(site, f"{site.url}/v1/tasks?limit=1")
        assert whole.startswith(b"HTTP/1.1 200"), whole
        dots = await asked_as_is(site, "/v1/tasks/%2e%2e")
        assert dots.startswith(b"HTTP/1.1 400"), dots
        assert b"'..' is not a number" in dots
