"""How many connections a server has, and which one ends at the limit."""

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, NamedTuple, cast

BACKLOG_NUM = 128
STRANGERS = ""
"""The holder of connections that have shown no secret."""


def _always() -> bool:
    return True


class _Held(NamedTuple):
    """A connection, and whether it could end without cutting an answer."""

    transport: asyncio.Transport
    is_idle: Callable[[], bool]


class Admission:
    """The connections of one server, each from its acceptance on: TLS handshakes count too. A
    connection is a stranger's until it shows a secret; then it is its holder's (a token, a user).
    At the limit, whoever holds most makes room, all strangers together as one: no holder keeps out
    the others, and clients without a secret keep out nobody."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._held: dict[str, dict[object, _Held]] = {STRANGERS: {}}
        """By holder and socket; first the one whose last request is the longest ago."""
        self._holders: dict[object, str] = {}

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
        if key in self._holders:
            return
        self._hold(key, STRANGERS, _Held(cast(asyncio.Transport, transport), _always))
        if len(self._holders) > self._num_max:
            self._make_room()

    def trust(
        self,
        transport: asyncio.BaseTransport,
        holder: str,
        is_idle: Callable[[], bool] = _always,
    ) -> None:
        """The client has shown a secret of `holder`, again at each request. A connection that is
        not idle makes room after those that are."""
        key = transport.get_extra_info("socket")
        if (held := self._release(key)) is not None:
            self._hold(key, holder, _Held(held.transport, is_idle))

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """The connection has ended."""
        self._release(transport.get_extra_info("socket"))

    def _hold(self, key: object, holder: str, held: _Held) -> None:
        self._held.setdefault(holder, {})[key] = held
        self._holders[key] = holder

    def _release(self, key: object) -> _Held | None:
        holder = self._holders.pop(key, None)
        if holder is None:
            return None
        held = self._held[holder].pop(key)
        if not self._held[holder] and holder != STRANGERS:
            del self._held[holder]
        return held

    def _make_room(self) -> None:
        most = max(self._held.values(), key=len)  # of equals the strangers, which are first
        oldest = next((key for key, held in most.items() if held.is_idle()), next(iter(most)))
        if (held := self._release(oldest)) is not None:
            held.transport.abort()


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
