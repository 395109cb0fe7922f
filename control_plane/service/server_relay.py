"""The relay to the log's server: agents on other hosts reach it at the control plane's address.

The embedded server listens on this machine only. Each connection at the relay's port is passed on
to it byte by byte; with a certificate, its TLS ends here. Agents need not reach Sentinels: the
relay asks them for each connection.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ...events import network_address, unix_socket
from ...events.errors import Unavailable
from .admission import Admission, Counted

RELAYED_NUM_MAX = 8_192
"""An agent has some four connections; by default a server takes 10,000 clients."""
PASS_BYTES = 1 << 16
CONNECT_S_MAX = 5.0
AUTH = re.compile(rb"\*3\r\n\$4\r\nAUTH\r\n\$\d+\r\n([^\r\n]{1,512})\r\n", re.IGNORECASE)
OTHERS = "default"
SILENT_S, PROBE_S, PROBES_NUM = 60, 10, 3
"""A peer that is gone without a word is noticed after these times."""


def is_local(redis_url: str) -> bool:
    """Whether other hosts cannot reach the server at this URL, or its first Sentinel."""
    parts = network_address.url_parts(network_address.split_sentinels(redis_url)[1])
    return parts.scheme == "unix" or network_address.is_loopback(parts.hostname or "localhost")


def url_at(redis_url: str, host: str, port: int, *, with_tls: bool = False) -> str:
    """The URL of the same server as reached through a relay at `host` and `port`."""
    parts = network_address.url_parts(network_address.split_sentinels(redis_url)[1])
    user, at, _ = parts.netloc.rpartition("@")
    path = "/0" if parts.scheme == "unix" else parts.path
    return f"redis{'s' * with_tls}://{user}{at}{network_address.endpoint(host, port)}{path}"


class ServerRelay:
    """Passes connections on to the server of `redis_url`, or to where `find_server` tells, if the
    URL is of Sentinels. At the limit `num_max` the user of the server that holds most makes room;
    whom the server has not let in is a stranger (see Admission)."""

    def __init__(
        self,
        redis_url: str,
        num_max: int = RELAYED_NUM_MAX,
        find_server: Callable[[], Awaitable[tuple[str, int]]] | None = None,
    ) -> None:
        name, url, _ = network_address.split_sentinels(redis_url)
        self._to = network_address.url_parts(url)
        self._find_server = find_server if name else None
        self._admission = Admission(num_max)
        self._passing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen. Raises OSError."""
        self._server = await self._admission.listen(
            lambda: _Client(asyncio.StreamReader(), self._on_connect),
            host,
            port,
            tls,
            handshake_s_max=CONNECT_S_MAX,
        )

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._pass(reader, writer), name="relay")
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            _notice_gone_peer(writer.get_extra_info("socket"))
            async with asyncio.timeout(CONNECT_S_MAX):
                server_reader, server_writer = await self._connect()
            ends.append(server_writer)
            user: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            copies = [
                asyncio.ensure_future(_ask(reader, server_writer, user)),
                asyncio.ensure_future(self._answer(server_reader, writer, user)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        except (OSError, TimeoutError, Unavailable):  # the client sees it closed, and tries again
            pass
        finally:
            for end in ends:
                end.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        user: asyncio.Future[str],
    ) -> None:
        first = await reader.read(PASS_BYTES)
        # Before a password the server answers with errors, to RESET with +RESET, to QUIT at its end
        if user.done() and not first.startswith((b"-", b"+RESET")):
            self._admission.trust(writer.transport, user.result())
        writer.write(first)
        await _copy(reader, writer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._to.scheme == "unix":
            return await asyncio.open_unix_connection(unix_socket.address(self._to.path))
        found = self._to.hostname or "", self._to.port or 6379
        return await asyncio.open_connection(
            *(await self._find_server() if self._find_server is not None else found)
        )


class _Client(Counted, asyncio.StreamReaderProtocol):
    """A connection as streams."""


def _user_of(asked: bytes) -> str:
    """The user that the first command AUTH names: the first answer is about that command. All
    other clients are one user, also those of a server with one password."""
    match = AUTH.match(asked)
    return match[1].decode(errors="replace") if match else OTHERS


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, user: asyncio.Future[str]
) -> None:
    """Pass on what the client asks, and tell its user."""
    with suppress(OSError):
        first = await reader.read(PASS_BYTES)
        user.set_result(_user_of(first))
        writer.write(first)
        await _copy(reader, writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(PASS_BYTES):
            writer.write(data)
            await writer.drain()


def _notice_gone_peer(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_S),
        ("TCP_KEEPINTVL", PROBE_S),
        ("TCP_KEEPCNT", PROBES_NUM),
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
    ):
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
