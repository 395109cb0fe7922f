"""How many connections a server has, and which one ends at the limit."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

BACKLOG_NUM = 128


class Admission:
    """The connections of one server, each from its acceptance on: TLS handshakes count too.

    At the limit the oldest stranger makes room for a new connection, so that clients without a
    secret cannot keep out those that have one. If there is none, the new one is closed.
    """

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._strangers: dict[object, asyncio.Transport] = {}  # by socket, ordered by age
        self._trusted: set[object] = set()

    async def listen(self, made: Callable[[], asyncio.Protocol], host: str, port: int,
                     tls: ssl.SSLContext | None, *, handshake_s_max: float) -> asyncio.Server:
        """Listen. `made` gives a protocol that admits and forgets its connection. Raises OSError.
        """
        def accepted() -> Any:
            return made() if tls is None else _Tls(self, made(), tls, handshake_s_max)

        return await asyncio.get_running_loop().create_server(
            accepted, host, port, backlog=BACKLOG_NUM)

    def admit(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection as a stranger's; counted already, nothing happens."""
        key = transport.get_extra_info("socket")
        if key in self._trusted:
            return
        self._strangers.setdefault(key, cast(asyncio.Transport, transport))
        if len(self._strangers) + len(self._trusted) > self._num_max:
            self._strangers.pop(next(iter(self._strangers))).abort()

    def trust(self, transport: asyncio.BaseTransport) -> None:
        """The client has shown a valid secret."""
        key = transport.get_extra_info("socket")
        if self._strangers.pop(key, None) is not None:
            self._trusted.add(key)

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """The connection has ended."""
        key = transport.get_extra_info("socket")
        self._strangers.pop(key, None)
        self._trusted.discard(key)


class _Tls(SSLProtocol):
    """TLS of one connection, as asyncio does it for a server. A protocol hears of its connection
    after the handshake, of one that does not complete never: so this one admits and forgets."""

    def __init__(self, admission: Admission, protocol: asyncio.Protocol, tls: ssl.SSLContext,
                 handshake_s_max: float) -> None:
        super().__init__(asyncio.get_running_loop(), protocol, tls, cast(Any, None),
                         server_side=True, ssl_handshake_timeout=cast(Any, handshake_s_max))
        self._admission = admission

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport
        self._admission.admit(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._admission.forget(self._raw)
        super().connection_lost(exc)
