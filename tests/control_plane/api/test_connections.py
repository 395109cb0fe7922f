"""The HTTP server against hostile clients, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import zlib
from pathlib import Path
from unittest import mock

import pytest
from aiohttp import web
from certificates import Pair, why_not
from http_site import JOB, Site, real, serving
from structlog.testing import capture_logs
from unicron.cli.cluster.client import Client, Refused
from unicron.control_plane.api import http as api_http
from unicron.control_plane.api.connections import ERROR_CHARS_MAX, ConnectionLimits, Listener
from unicron.control_plane.service.server_certificate import ServerCertificate
from unicron.events import tls
from unicron.events.process_io import Seldom

TOKEN = "Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
LIMIT_S = 60.0


class Link:
    """A raw connection to the site."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, site: Site) -> Link:
        host, _, port = site.url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def say(self, text: str, body: bytes = b"") -> None:
        """Send; a server that has closed already may be met."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(text.encode("latin-1") + body)
            await self.writer.drain()

    async def rest(self, limit_s: float = LIMIT_S) -> bytes:
        """All until the server closes."""
        found = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(limit_s):
                while part := await self.reader.read(1 << 16):
                    found += part
        return found

    async def is_closed_by_server(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                return not await self.reader.read()
        except TimeoutError:
            return False
        except ConnectionError:
            return True


async def refused(site: Site, text: str, body: bytes = b"") -> tuple[int, dict[str, str]]:
    """Send a request whose answer must be a refusal that ends the connection."""
    link = await Link.to(site)
    await link.say(text, body)
    head, _, answer = (await link.rest()).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert "Connection: close" in lines, lines
    found = json.loads(answer)
    assert set(found) == {"type", "title", "status", "detail", "hint"}
    return int(lines[0].split()[1]), found


@real
async def test_a_body_with_an_encoding_is_refused_unread(site: Site) -> None:
    bomb = zlib.compress(b" " * (256 << 20), 1)
    head = (
        f"POST /v1/tasks HTTP/1.1\r\nHost: [::]\r\nContent-Encoding: deflate\r\n"
        f"Content-Length: {len(bomb)}\r\n"
    )
    cpu_s = time.process_time()
    for token in ("", TOKEN, "Authorization: Bearer wrong\r\n"):
        status, answer = await refused(site, f"{head}{token}\r\n", bomb)
        assert (status, "Content-Encoding" in answer["detail"]) == (415, True)
    # 768 MiB of spaces take seconds if they are decompressed, as for the drain of a refused body
    assert time.process_time() - cpu_s < 0.5


@real
async def test_what_the_headers_tell_is_refused_before_the_body(site: Site) -> None:
    """The promised body is never sent: who would wait for it would not answer, or not close."""
    promise = "POST /v1/tasks HTTP/1.1\r\nHost: [::]\r\nContent-Length: {}\r\n{}\r\n"
    assert (await refused(site, promise.format(1000, "")))[0] == 401
    assert (await refused(site, promise.format(1000, "Authorization: Bearer no\r\n")))[0] == 401
    status, answer = await refused(site, promise.format(2 << 20, TOKEN))
    assert (status, answer["detail"]) == (413, "the body is larger than 1,048,576 bytes")
    nowhere = promise.replace("/v1/tasks", "/v1/nowhere").format(1000, TOKEN)
    assert (await refused(site, nowhere))[0] == 404
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    chunked = f"POST /v1/tasks HTTP/1.1\r\nHost: [::]\r\nTransfer-Encoding: chunked\r\n{TOKEN}\r\n"
    assert (await refused(site, chunked, chunk * 40))[0] == 413


@real
async def test_a_client_hears_why_its_body_was_not_read(site: Site) -> None:
    for token, status in (("secret", 413), ("wrong", 401)):
        with pytest.raises(Refused) as refusal:
            await asyncio.to_thread(Client(site.url, token).post, "/v1/tasks", "x" * (8 << 20))
        assert refusal.value.status == status


@real
async def test_a_body_that_does_not_come_is_given_up(site: Site) -> None:
    with mock.patch.object(api_http, "BODY_S_MAX", 0.2):
        status, answer = await refused(
            site,
            f"POST /v1/freeze HTTP/1.1\r\nHost: [::]\r\nContent-Length: 10\r\n{TOKEN}\r\n",
            b"{",
        )
    assert (status, answer["detail"]) == (408, "the body did not arrive within 0.2 s")
    assert (await site.ask("GET", "/v1/state"))[1]["cluster"]["healing"] == "on"


@real
async def test_a_malformed_body_is_no_error_of_the_server(site: Site) -> None:
    """Neither one that comes with the headers, nor one that comes later: aiohttp's parser ends then
    without a word to the reader of the body."""
    head = f"POST /v1/freeze HTTP/1.1\r\nHost: [::]\r\nTransfer-Encoding: chunked\r\n{TOKEN}\r\n"
    assert (await refused(site, head, b"no size\r\n"))[0] == 400
    link = await Link.to(site)
    with mock.patch.object(api_http, "BODY_S_MAX", 1.0):
        await link.say(head)
        await asyncio.sleep(0.2)
        await link.say("no size\r\n")
        answer = await link.rest()
    assert answer.split()[1] in (b"400", b"408"), answer
    assert b"Connection: close" in answer


def test_malformed_requests_are_json_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with asyncio.timeout(150), serving() as site:
            for number in range(50):
                wrong = (
                    f"GET /{number} HTTP/9.9\r\n\r\n",
                    "\x00\x01\x02\r\n\r\n",
                    "GET / HTTP/1.1\r\nbad header\r\n\r\n",
                    f"GET /{'x' * 20_000} HTTP/1.1\r\n\r\n",
                )[number % 4]
                status, answer = await refused(site, wrong)
                assert status == 400
                assert len(answer["detail"]) < ERROR_CHARS_MAX + 40

    with capture_logs() as lines, caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    told = [line for line in lines if line["event"] == "malformed request"]
    assert len(told) == 1
    assert len(told[0]["why"]) <= ERROR_CHARS_MAX
    assert "\n" not in told[0]["why"]
    assert not [r for r in caplog.records if r.name == "aiohttp.server"], caplog.text


def test_a_client_that_leaves_early_writes_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """aiohttp answers `Expect` itself, before it looks for a token."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), serving() as site:
            for _ in range(20):
                link = await Link.to(site)
                await link.say(
                    "POST /v1/tasks HTTP/1.1\r\nHost: [::]\r\nContent-Length: 5\r\n"
                    "Expect: 100-continue\r\n\r\n"
                )
                link.writer.write_eof()
                await link.rest()
                link.writer.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert "Traceback" not in caplog.text


def test_lines_are_counted_that_are_not_logged() -> None:
    seldom = Seldom(3600.0)
    assert [seldom.due() for _ in range(3)] == [1, 0, 0]
    often = Seldom(0.0)
    assert [often.due() for _ in range(3)] == [1, 1, 1]


def test_half_open_connections_end() -> None:
    async def main() -> None:
        limits = ConnectionLimits(headers_s_max=0.5)
        async with asyncio.timeout(150), serving(limits=limits) as site:
            silent, half = await Link.to(site), await Link.to(site)
            await half.say("GET /v1/health HTTP/1.1\r\nHost: [::]\r\n")
            slow = asyncio.create_task(_trickle(site))
            assert await silent.is_closed_by_server(LIMIT_S)
            assert await half.is_closed_by_server(LIMIT_S)
            assert await slow < LIMIT_S

    asyncio.run(main())


async def _trickle(site: Site) -> float:
    """Send a header byte by byte until the server closes; returns for how long, in seconds."""
    began_s, link = time.monotonic(), await Link.to(site)
    await link.say("GET /v1/health HTTP/1.1\r\nX: ")
    while not link.reader.at_eof() and time.monotonic() - began_s < LIMIT_S:
        await link.say("x")
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.05):
                await link.reader.read(1)
    return time.monotonic() - began_s


def test_strangers_make_room() -> None:
    """Beyond the limit the oldest connections without a token end, and those with one stay."""

    async def main() -> None:
        async with (
            asyncio.timeout(150),
            serving(limits=ConnectionLimits(connections_num_max=10)) as site,
        ):
            follower = await Link.to(site)
            await follower.say(f"GET /v1/log?follow=1 HTTP/1.1\r\nHost: [::]\r\n{TOKEN}\r\n")
            assert b"200 OK" in await follower.reader.read(1 << 16)
            half = [await Link.to(site) for _ in range(40)]
            for link in half:
                await link.say("GET /v1/health HTTP/1.1\r\n")
            for link in half[:30]:
                assert await link.is_closed_by_server(LIMIT_S)
            assert (await site.ask("GET", "/v1/state"))[0] == 200
            left = [link for link in half[31:] if not await link.is_closed_by_server(0.01)]
            assert left, "the newest stay"
            await site.ask("POST", "/v1/freeze", {"reason": "it follows on"})
            async with asyncio.timeout(LIMIT_S):
                while b"it follows on" not in await follower.reader.read(1 << 16):
                    pass

    asyncio.run(main())


async def _held(site: Site, num: int, path: str = "/v1/health") -> list[Link]:
    """Connections that have asked with the site's token, and stay open."""
    links = [await Link.to(site) for _ in range(num)]
    for link in links:
        await link.say(f"GET {path} HTTP/1.1\r\nHost: [::]\r\n{TOKEN}\r\n")
        with contextlib.suppress(ConnectionError):
            await link.reader.read(1 << 16)
    return links


def test_no_token_keeps_out_others() -> None:
    """Beyond the limit the token that holds most makes room, by what is idle longest."""

    async def main() -> None:
        limits = ConnectionLimits(connections_num_max=10)
        async with asyncio.timeout(150), serving(limits=limits) as site:
            other = (await site.ask("POST", "/v1/tokens", {"name": "other", "role": "view"}))[1]
            (follower,) = await _held(site, 1, "/v1/log?follow=1")
            idle = await _held(site, 30)
            for said in (f"Authorization: Bearer {other['token']}\r\n", ""):  # then a probe
                link = await Link.to(site)
                await link.say(
                    f"GET /livez HTTP/1.1\r\nHost: [::]\r\n{said}Connection: close\r\n\r\n"
                )
                assert b"200 OK" in await link.rest()
            closed = [await link.is_closed_by_server(0.01) for link in idle]
            assert closed[:20] == [True] * 20
            assert not any(closed[-6:]), "the newest stay"
            assert not await follower.is_closed_by_server(0.01), "it is not idle"

    asyncio.run(main())


async def test_the_user_of_this_machine_is_kept_out_by_nobody(tmp_path: Path) -> None:
    app = web.Application()
    limits = ConnectionLimits(connections_num_max=2)
    listener = Listener(app, stop_s_max=1.0, limits=limits)
    port = await listener.start("127.0.0.1", 0)
    await listener.start_locally(tmp_path / "here.sock")
    many = [Link(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(4)]
    async with asyncio.timeout(LIMIT_S):
        own = [
            Link(*await asyncio.open_unix_connection(str(tmp_path / "here.sock"))) for _ in range(5)
        ]
        for link in own:
            await link.say("GET /nowhere HTTP/1.1\r\nHost: [::]\r\n\r\n")
            assert b"404" in await link.reader.readuntil(b"\r\n")
    assert not await many[-1].is_closed_by_server(0.01), "they are counted apart"
    for link in (*many, *own):
        link.writer.close()
    await listener.stop()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_tls_handshake_that_does_not_complete_counts(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    limits = ConnectionLimits(connections_num_max=10, headers_s_max=LIMIT_S)
    listener = Listener(web.Application(), stop_s_max=1.0, limits=limits)
    port = await listener.start(
        "127.0.0.1", 0, ServerCertificate(pair.certificate, pair.key).context
    )
    silent = [Link(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(40)]
    for link in silent[:30]:
        assert await link.is_closed_by_server(LIMIT_S / 2)
    left = [link for link in silent[31:] if not await link.is_closed_by_server(0.01)]
    assert left, "the newest stay"
    link = Link(
        *await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls.client_context(pair.ca.read_text())
        )
    )
    await link.say("GET /v1/nowhere HTTP/1.1\r\nHost: [::]\r\nConnection: close\r\n\r\n")
    assert b"404" in await link.rest()
    for one in silent:
        one.writer.close()
    await listener.stop()


@real
async def test_health_tells_a_stranger_only_that_it_leads(site: Site) -> None:
    async with site.client.get(site.url + "/v1/health") as reply:
        assert await reply.json() == {"ok": True}
    _, answer = await site.ask("GET", "/v1/health")
    assert (answer["cluster"], answer["epoch"], answer["leader"]) == ("test", 1, True)
    await site.refused(401, "GET", "/v1/health", Authorization="Bearer wrong")


@real
async def test_a_connection_serves_many_requests(site: Site) -> None:
    for number in range(3):
        await site.ask(
            "POST",
            "/v1/tasks",
            {**JOB, "name": f"j{number}", "train": {"iterations": 3, "output": f"/o{number}"}},
        )
    link = await Link.to(site)
    for _ in range(3):
        await link.say(f"GET /v1/health HTTP/1.1\r\nHost: [::]\r\n{TOKEN}\r\n")
        async with asyncio.timeout(LIMIT_S):
            assert b'"leader":true' in await link.reader.readuntil(b"}")
