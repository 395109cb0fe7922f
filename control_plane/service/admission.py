"""How many connections a server has, and which one ends at the limit."""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

BACKLOG_NUM = 128


class Admission:
    """The connections of one server, each from its acceptance on: TLS handshakes count too. At the
    limit the oldest stranger makes room: clients without a secret cannot keep out those that have
    one."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._strangers: dict[object, asyncio.Transport] = {}  # by socket, ordered by age
        self._trusted: set[object] = set()

    async def listen(
        self,
        made: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        handshake_s_max: float,
    ) -> asyncio.Server:
        """Listen; `made` gives the protocol of each connection. Raises OSError."""
        loop = asyncio.get_running_loop()

        def accepted() -> Any:
            protocol: asyncio.BaseProtocol = (
                made()
                if tls is None
                else _Tls(
                    loop,
                    made(),
                    tls,
                    cast(Any, None),
                    server_side=True,
                    ssl_handshake_timeout=cast(Any, handshake_s_max),
                )
            )
            if isinstance(protocol, Counted):
                protocol.admission = self
            return protocol

        return await loop.create_server(accepted, host, port, backlog=BACKLOG_NUM)

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


class Counted(asyncio.BaseProtocol):
    """A protocol whose connection is counted, unless it is inside TLS, which is counted itself."""

    admission: Admission | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport_made = transport
        if self.admission is not None:
            self.admission.admit(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Any) -> None:
        if self.admission is not None:
            self.admission.forget(self._transport_made)
        super().connection_lost(exc)


class _Tls(Counted, SSLProtocol):
    """Its own connection is made before the handshake, that of the protocol inside only after."""
