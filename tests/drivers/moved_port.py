"""A port that leads to a server, and from a moment on to another one, as that of a proxy."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

PASS_BYTES = 1 << 16


class MovedPort:
    """Set `to` to another port to lead new connections there; open ones stay, until `cut`."""

    def __init__(self, to: int) -> None:
        self.to, self.port = to, 0
        self._ends = set[asyncio.StreamWriter]()

    async def __aenter__(self) -> MovedPort:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End all open connections."""
        for end in self._ends:
            end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        with suppress(OSError, asyncio.CancelledError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.to)
            ends.add(server_writer)
            self._ends |= ends
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, server_writer)),
                    asyncio.ensure_future(_copy(server_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        for end in ends:
            end.close()
        self._ends -= ends


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(PASS_BYTES):
            writer.write(data)
            await writer.drain()
