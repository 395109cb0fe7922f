"""The process that answers reads beside a control plane.

It folds the log along, up to the last record that the control plane has acknowledged, and serves
the API's reads on a unix socket.
Its argument is the number of the socket, which listens. Its standard input begins with `Begin`;
then each `Told` says how far the log is. It ends with that input. On its standard output it says
that it runs.
"""

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
from aiohttp import web

from ...events.decoding import from_json, from_msgpack
from ...events.errors import LogError, Unavailable
from ...events.log.identity import SECRET_BYTES, Identities
from ...events.log.port import ReaderPort
from ...events.log.redis_streams import RedisLog
from ...events.log.segments import Folder
from ...events.process_log import configure_logging
from ..fold.fold import fold
from ..service.coordinator import Coordinator
from ..service.tail import PAGE_RECORDS_MAX, Tail
from ..state.cluster import ClusterState, decode_state
from .connections import ConnectionLimits, Listener
from .http import HttpApi
from .metrics import Metrics, gauges_of
from .read_messages import ALIVE_S, GAUGES, LENGTH_BYTES, TOLD, TOLD_BYTES_MAX, Begin, Told
from .routes import ROUTES
from .tokens import Tokens

REACH_S_MAX = 10.0
RECENT_RECORDS_MAX = 4_096
SEGMENTS_S = 30.0
"""It looks so often which segments are the log's."""
IDLE_S = 5.0
STREAM_PAUSE_S = 0.1
STOP_S_MAX = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FollowedLog:
    """The log and its state as the control plane has told: what the API reads of a coordinator."""

    away = ""

    def __init__(self, log: ReaderPort) -> None:
        self._log = log
        self.tail = Tail(
            log, kept_num_max=RECENT_RECORDS_MAX, idle_s=IDLE_S, pause_s=STREAM_PAUSE_S
        )
        self._state, self._fold = ClusterState(), 0
        self._told = Told(
            seq=0,
            fold=0,
            now_s=0.0,
            leading=False,
            leader_url="",
            followers=[],
            ca="",
            num_dead_letters=0,
            old_agents=[],
        )
        self._heard_s = time.monotonic()
        self._folding = asyncio.Lock()
        self._begun = asyncio.Event()

    def hear(self, told: Told) -> None:
        """Follow what is told, unless something newer was told before."""
        if told.state:
            self._state, self._fold = decode_state(told.state), told.fold
            self.tail.clear()
            self._begun.set()
        if (told.fold, told.seq, told.now_s) >= (
            self._told.fold,
            self._told.seq,
            self._told.now_s,
        ):
            self._told, self._heard_s = told, time.monotonic()

    @property
    def leading(self) -> bool:
        return self._told.leading

    @property
    def leader_url(self) -> str:
        return self._told.leader_url

    @property
    def followers(self) -> list[str]:
        return self._told.followers

    @property
    def num_dead_letters(self) -> int:
        return self._told.num_dead_letters

    @property
    def old_agents(self) -> list[str]:
        return self._told.old_agents

    @property
    def ca(self) -> str:
        return self._told.ca

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def seq(self) -> int:
        return self._state.seq

    @property
    def now_s(self) -> float:
        return self._told.now_s + time.monotonic() - self._heard_s

    async def settled(self) -> ClusterState:
        """The state, which has all that is told. Read it before the next await. Raises LogError."""
        try:
            async with asyncio.timeout(REACH_S_MAX), self._folding:
                while self._fold != self._told.fold:
                    self._begun.clear()
                    await self._begun.wait()
                while (num := self._told.seq - self._state.seq) > 0:
                    await self._fold_page(min(num, PAGE_RECORDS_MAX))
        except TimeoutError:
            raise Unavailable("the log cannot be reached") from None
        return self._state

    async def _fold_page(self, num_max: int) -> None:
        before = self._state
        page = await self._log.read(after=before.seq, num_max=num_max)
        if self._state is not before:  # the log is folded anew
            return
        if not page or page[0].seq != before.seq + 1:
            raise Unavailable(f"record {before.seq + 1} cannot be read at the moment")
        for record in page:
            fold(before, record)
        self.tail.add(page)


def main() -> None:
    """Serve until the standard input ends."""
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the control plane ends it
    asyncio.run(_serve())
    sys.stderr.flush()
    os._exit(0)  # the interpreter takes up to a second to clean up, and the control plane waits


async def _serve() -> None:
    told, transport = asyncio.StreamReader(), sys.stdin
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(told), transport
    )
    alive = asyncio.create_task(_say_alive())
    with suppress(asyncio.IncompleteReadError):
        begin = from_msgpack(await _frame(told), Begin)
        folder = Folder(begin.folder, begin.cluster)
        # A key of its own: it neither writes orders nor reads reports.
        identities = Identities(os.urandom(SECRET_BYTES), begin.cluster)
        log = RedisLog(
            begin.redis_url, begin.cluster, identities.key, None, begin.ca, folder, begin.policy
        )
        followed = FollowedLog(log)
        api = HttpApi(
            [route for route in ROUTES if route.is_read],
            cast(Coordinator, followed),
            log,
            tokens=Tokens(Path("/nonexistent"), owner=begin.token),
            address=begin.address,
            identities=identities,
            metrics=Metrics(),
            ca=lambda: followed.ca,
            folder=folder,
        )
        limits = ConnectionLimits(header_bytes_max=TOLD_BYTES_MAX)
        listener = Listener(_hearing(api.app(), followed), stop_s_max=STOP_S_MAX, limits=limits)
        try:
            await listener.start_at(socket.socket(fileno=int(sys.argv[1])))
            opened_s = -math.inf
            while True:
                followed.hear(from_msgpack(await _frame(told), Told))
                with suppress(LogError):  # what cannot be read now is read for the next request
                    if time.monotonic() - opened_s > SEGMENTS_S:  # older ones may be pruned
                        await log.open_segments()
                        opened_s = time.monotonic()
                    await followed.settled()
        finally:
            followed.tail.stop()
            alive.cancel()
            await listener.stop()
            await log.close()


async def _say_alive() -> None:
    os.set_blocking(sys.stdout.fileno(), False)  # nobody may read it for a time
    while True:
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b".")
        await asyncio.sleep(ALIVE_S)


def _hearing(app: web.Application, followed: FollowedLog) -> web.Application:
    @web.middleware
    async def hear(request: web.Request, handler: Handler) -> web.StreamResponse:
        followed.hear(from_json(request.headers[TOLD], Told))
        return await handler(request)

    async def gauges(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await gauges_of(cast(Coordinator, followed))))

    app.middlewares.append(hear)
    app.router.add_get(GAUGES, gauges)
    return app


async def _frame(source: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await source.readexactly(LENGTH_BYTES), "big")
    return await source.readexactly(length)


if __name__ == "__main__":
    main()
