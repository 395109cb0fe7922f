"""Limits of the HTTP server's connections: number, time to send headers, lines in the log.

aiohttp has the limit of time: `keepalive_timeout` counts from the start of a connection and from
the end of each answer until the next headers are complete.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from ...events import unix_socket
from ...events.process_io import Seldom
from ..service.admission import BACKLOG_NUM, Admission
from .messages import Problem


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits of one server."""

    connections_num_max: int = 1_024
    relayed_num_max: int = 0
    """Connections through the relay to the log's server; 0: there is no relay."""
    headers_s_max: float = 10.0
    """Also of a TLS handshake, and the longest time without a request on an open connection."""
    header_bytes_max: int = 8_190
    """Of one header."""
    log_every_s: float = 10.0
    """At most one line about malformed requests in this time."""


DESCRIPTORS_NUM_RESERVED = 256
"""For the log, files, this user's connections, and connections that are accepted only to be
refused, a backlog at most."""
LOCAL_NUM_MAX = 64
"""Connections at the unix socket, beside the limit of the others: nobody keeps this user out."""
ERROR_CHARS_MAX = 200


class Connection(web.RequestHandler):
    """One connection. It is a stranger until a request on it has shown a valid token."""

    __slots__ = ("_admission", "_listener")

    def __init__(
        self,
        listener: Listener,
        admission: Admission,
        server: web.Server,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=cast(Any, None),
            keepalive_timeout=limits.headers_s_max,
            lingering_time=0.0,  # a refused body is not read
            max_field_size=limits.header_bytes_max,
            auto_decompress=False,
        )  # the API takes no compressed bodies
        self._listener, self._admission = listener, admission

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._admission.admit(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.transport is not None:
            self._admission.forget(self.transport)
        super().connection_lost(exc)

    def authorised(self, token: str) -> None:
        """A request on this connection has shown the valid token of this name."""
        if self.transport is not None:
            self._admission.trust(self.transport, token, self._is_idle)

    def _is_idle(self) -> bool:
        return self._current_request is None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a malformed request, or to one that met a bug; the connection ends."""
        if isinstance(exc, HttpProcessingError):
            self._listener.tell_malformed(request, exc.message)
            answer = error_answer(
                400, f"not an HTTP request: {_bounded(exc.message)}", "docs/guides/api.md"
            )
        elif isinstance(exc, ConnectionError):  # the client has closed; nobody reads the answer
            answer = error_answer(400, "the connection is closed", "")
        else:
            super().handle_error(request, status, exc, message)  # logs the traceback
            answer = error_answer(
                status,
                "the control plane met an error of its own",
                "see the log of the control plane",
            )
        answer.headers["Connection"] = "close"  # aiohttp adds none to an answer as HTTP/1.0
        answer.force_close()
        return answer


class Listener:
    """Serves an application on one TCP port, and on a unix socket."""

    def __init__(
        self, app: web.Application, *, stop_s_max: float, limits: ConnectionLimits | None = None
    ) -> None:
        self._limits = limits or ConnectionLimits()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=stop_s_max)
        self._admission = Admission(self._limits.connections_num_max)
        self._malformed = Seldom(self._limits.log_every_s)
        self._logger = structlog.get_logger("http")
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port. Raises OSError."""
        await self._runner.setup()
        try:
            server = await self._admission.listen(
                self._made(self._admission),
                host,
                port,
                tls,
                handshake_s_max=self._limits.headers_s_max,
            )
        except OSError:
            await self._runner.cleanup()
            raise
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def start_locally(self, path: Path) -> None:
        """Listen on a unix socket as well, for this user only; after `start`. Raises OSError."""
        name = unix_socket.address(str(path))
        self._servers.append(
            await asyncio.get_running_loop().create_unix_server(
                self._made(Admission(LOCAL_NUM_MAX)), name, backlog=BACKLOG_NUM
            )
        )
        os.chmod(name, 0o600)

    async def start_at(self, listening: socket.socket) -> None:
        """Serve on a unix socket that listens already, alone."""
        await self._runner.setup()
        self._servers.append(
            await asyncio.get_running_loop().create_unix_server(
                self._made(self._admission), sock=listening, backlog=BACKLOG_NUM
            )
        )

    def _made(self, admission: Admission) -> Callable[[], Connection]:
        server = self._runner.server
        assert server is not None
        return lambda: Connection(self, admission, server, self._limits)

    async def stop(self) -> None:
        """Stop listening, and end the open requests within `stop_s_max`."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def tell_malformed(self, request: web.BaseRequest, why: str) -> None:
        """Log a malformed request, seldom and on one line."""
        if num := self._malformed.due():
            self._logger.warning(
                "malformed request", why=_bounded(why), peer=request.remote, num_since_last_line=num
            )


def error_answer(status: int, detail: str, hint: str) -> web.Response:
    """An error as problem details (RFC 9457)."""
    return web.Response(
        body=problem(status, detail, hint), status=status, content_type="application/problem+json"
    )


def problem(status: int, detail: str, hint: str) -> bytes:
    """A problem on one line; also the last one of a stream of records that breaks off."""
    return (
        msgspec.json.encode(
            Problem(
                title=HTTPStatus(status).phrase,
                status=status,
                detail=" ".join(detail.split()),
                hint=hint,
            )
        )
        + b"\n"
    )


def _bounded(text: str) -> str:
    return " ".join(text.split())[:ERROR_CHARS_MAX]


def limits_of_descriptors(limits: ConnectionLimits) -> tuple[ConnectionLimits, str]:
    """The limits that this process has file descriptors for, after it has raised its soft limit,
    and a line if they are lower."""
    of_connections = limits.connections_num_max + 2 * limits.relayed_num_max
    wanted = of_connections + DESCRIPTORS_NUM_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY, -1) or soft >= wanted:
        return limits, ""
    allowed = wanted if hard in (resource.RLIM_INFINITY, -1) else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return limits, ""
    left = max(allowed - DESCRIPTORS_NUM_RESERVED, allowed // 4, 1)
    num, relayed_num = (
        max(num_max * left // of_connections, 1)
        for num_max in (limits.connections_num_max, limits.relayed_num_max)
    )
    return (
        msgspec.structs.replace(limits, connections_num_max=num, relayed_num_max=relayed_num),
        f"ulimit -n is {allowed}: at most {num} connections instead of "
        f"{limits.connections_num_max}; it should be {wanted}",
    )


def seldom_logged(
    every_s: float = 10.0,
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler for the event loop's errors: a lack of descriptors is a line, seldom, and no
    traceback."""
    seldom, logger = Seldom(every_s), structlog.get_logger("http")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), OSError) and "socket" in context:
            if num := seldom.due():
                logger.error(
                    "cannot accept connections",
                    why=str(context["exception"]),
                    num_since_last_line=num,
                )
            return
        loop.default_exception_handler(context)

    return handle
