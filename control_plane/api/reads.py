"""Reads of the API: so many at a time for each token, answered by a process of their own.

So they do not hold up the control plane's loop.
"""

import asyncio
import math
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import aiohttp
import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import StrOrURL

from ...events import unix_socket
from ...events.decoding import from_json
from ...events.errors import Unavailable
from ..service.admission import BACKLOG_NUM
from ..service.coordinator import Coordinator
from ..state.cluster import ClusterState, encode_state
from .metrics import Gauges
from .read_messages import GAUGES, TOLD, Begin, Told, frame
from .requests import Refusal

READS_NUM_MAX = 8
STREAMS_NUM_MAX = 64
"""Reads and streams of the log in progress, for each token."""
PLACE_S_MAX = 1.0
"""How long a read waits for a place. A client that is refused should wait as long."""
REST_S = 0.02
"""How long a place rests after its read: many short reads cost the leader time as well."""
PROGRAM = "unicron.control_plane.api.read_process"
KEPT_S = 5.0
"""How long a connection to the process stays open without a request."""
STOP_S_MAX = 1.0
START_EVERY_S = 1.0
TELL_S = 0.2
"""The process hears so often how far the log is, and with each request."""
TELL_BYTES_MAX = 1 << 16
"""It hears nothing while so much waits to be read."""
SILENT_S_MAX, BEGIN_S_MAX = 10.0, 30.0
"""The process says every second that it runs. After so long without a word the control plane looks
once more, for it may itself have been stopped; then it ends the process. BEGIN_S_MAX: until the
first word."""
CHECK_S = 5.0
"""How often a stream without records checks that its client is there and may still read."""
HEADERS = ("Content-Type", "ETag", "Cache-Control")
"""Those of the process's answers that the client gets."""
ASKED = ("Accept", "Content-Type", "Last-Event-ID")
"""Those of the client's request that the process gets."""
_logger = structlog.get_logger("control_plane")


class ReadsAway(Unavailable):
    """The process has ended, or does not begin."""


class ReadProcess:
    """The process (read_process.py), as its control plane sees it. The next read starts it again if
    it has ended; it is ended if it hangs."""

    def __init__(
        self, begin: Begin, coordinator: Coordinator, ca: Callable[[], str], socket: Path
    ) -> None:
        """`socket`: the path of the unix socket on which it serves."""
        self._begin, self._coordinator, self._ca = begin, coordinator, ca
        self._socket = str(socket)
        self._process: Process | None = None
        self._started_s = -math.inf
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._session: aiohttp.ClientSession | None = None
        self._state: ClusterState | None = None
        """The one that the process has got a copy of, which it folds along."""
        self._fold = 0
        self._due: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the process, without waiting until it listens. Raises ReadsAway."""
        if time.monotonic() - self._started_s < START_EVERY_S:
            raise ReadsAway("the process that answers reads starts again")
        self._started_s = time.monotonic()
        await self._end()
        path = unix_socket.address(self._socket)
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                Path(path).unlink(missing_ok=True)
                listening.bind(path)
                os.chmod(path, 0o600)
                listening.listen(BACKLOG_NUM)
                number = listening.fileno()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", PROGRAM, str(number)),
                    stdin=PIPE,
                    stdout=PIPE,
                    pass_fds=[number],
                )
        except OSError as error:
            raise ReadsAway(f"no process can be started that answers reads ({error})") from None
        self._watching = asyncio.create_task(_watch(self._process))
        self._send(self._begin)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0, keepalive_timeout=KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def stop(self) -> None:
        """End the process for good: reads are refused from now on."""
        self._is_stopped = True
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        process, session = self._process, self._session
        self._process = self._session = self._state = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(STOP_S_MAX):  # it ends its streams
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if session is not None:
            await session.close()
            Path(self._socket).unlink(missing_ok=True)

    def folded(self, state: ClusterState) -> None:
        """The control plane has folded new records: let the process do so too, soon."""
        if state is not self._state:
            self._state = None  # it was folded anew: the next read gives the process a copy
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._due = None
        stdin = self._process.stdin if self._process is not None else None
        if stdin is None or stdin.is_closing() or self._state is None:
            return
        if stdin.transport.get_write_buffer_size() < TELL_BYTES_MAX:
            self._send(self._told())

    def _told(self, state: bytes = b"") -> Told:
        of = self._coordinator
        return Told(
            seq=of.seq,
            fold=self._fold,
            now_s=of.now_s,
            leading=of.leading,
            leader_url=of.leader_url,
            followers=of.followers,
            ca=self._ca(),
            num_dead_letters=of.num_dead_letters,
            old_agents=sorted(of.old_agents),
            state=state,
        )

    def _send(self, message: Begin | Told) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(frame(message))

    async def _ready(self) -> tuple[aiohttp.ClientSession, Told]:
        """A session with the process, and what it is told with a request. Raises ReadsAway, or
        LogError as `settled`."""
        async with self._starting:
            if self._is_stopped:
                raise ReadsAway("the control plane stops")
            if self._process is None or self._process.returncode is not None:
                await self.start()
        state = await self._coordinator.settled()
        session = self._session
        if session is None:
            raise ReadsAway("the process that answers reads starts again")
        if state is not self._state:
            self._state, self._fold = state, self._fold + 1
            self._send(self._told(encode_state(state)))
        return session, self._told()

    async def gauges(self) -> Gauges:
        """As gauges_of. Raises LogError."""
        async with await self._ask("GET", f"http://localhost{GAUGES}", b"", {}) as reply:
            try:
                data = await reply.read()
            except aiohttp.ClientError as error:
                raise _away(error) from None
        if reply.status != HTTPStatus.OK:
            raise ReadsAway(f"the process that answers reads refuses: {reply.status}")
        return from_json(data, Gauges)

    async def _ask(
        self, method: str, url: StrOrURL, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Raises ReadsAway, or LogError as `settled`."""
        session, told = await self._ready()
        headers |= {
            "Authorization": f"Bearer {self._begin.token}",
            TOLD: msgspec.json.encode(told).decode(),
        }
        try:
            return await session.request(method, url, data=body or None, headers=headers)
        except aiohttp.ClientError as error:
            raise _away(error) from None

    async def answer(
        self, request: web.Request, ended: Callable[[], bytes] | None
    ) -> web.StreamResponse:
        """The process's answer, passed on as it comes. `ended`, of a stream: the last line if the
        client may read no more, else nothing. Raises ReadsAway, or LogError as `settled`."""
        async with await self._ask(
            request.method,
            # As it is: what was let pass here must not become another path.
            request.rel_url.build(
                scheme="http",
                host="localhost",
                path=request.rel_url.raw_path,
                query_string=request.rel_url.raw_query_string,
                encoded=True,
            ),
            await request.read(),
            {name: request.headers[name] for name in ASKED if name in request.headers},
        ) as reply:
            response = web.StreamResponse(
                status=reply.status,
                headers={name: reply.headers[name] for name in HEADERS if name in reply.headers},
            )
            response.content_length = reply.content_length
            await response.prepare(request)
            try:
                await (
                    _pass_on(reply, response)
                    if ended is None
                    else _pass_on_stream(reply, response, request, ended)
                )
            except aiohttp.ClientError:  # the process has ended: the client must see it
                if request.transport is not None:
                    request.transport.abort()
        return response


class Reads:
    """How many reads each token has in progress, and the process that answers them."""

    def __init__(self, process: ReadProcess) -> None:
        self.process = process
        self._free: dict[tuple[str, int], asyncio.Semaphore] = {}

    @asynccontextmanager
    async def place(self, token: str, *, is_stream: bool = False) -> AsyncGenerator[None]:
        """Hold a place for a read. Raises Refusal if none is free within PLACE_S_MAX."""
        num_max = STREAMS_NUM_MAX if is_stream else READS_NUM_MAX
        free = self._free.setdefault((token, num_max), asyncio.Semaphore(num_max))
        try:
            async with asyncio.timeout(PLACE_S_MAX):
                await free.acquire()
        except TimeoutError:
            raise Refusal(
                429,
                f"the token {token} has {num_max} {'streams' if is_stream else 'reads'} in "
                "progress, as many as it may",
                "wait for an answer; a token for each program: unicron token create",
            ) from None
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(REST_S, free.release)


async def _watch(process: Process) -> None:
    """End the process when it says nothing any more: whoever waits for it is told so."""
    limit_s, num_silent = BEGIN_S_MAX, 0
    assert process.stdout is not None
    while num_silent < 2:
        try:
            async with asyncio.timeout(limit_s):
                if not await process.stdout.read(1 << 10):
                    return  # it has ended
            limit_s, num_silent = SILENT_S_MAX, 0
        except TimeoutError:
            num_silent += 1
    _logger.error(
        "the process that answers reads hangs, and is ended", pid=process.pid, silent_s=2 * limit_s
    )
    with suppress(ProcessLookupError):
        process.kill()


def _away(error: aiohttp.ClientError) -> ReadsAway:
    return ReadsAway(f"reads are not answered at the moment ({error})")


async def _pass_on(reply: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    async for part in reply.content.iter_any():
        await response.write(part)
    await response.write_eof()


async def _pass_on_stream(
    reply: aiohttp.ClientResponse,
    response: web.StreamResponse,
    request: web.Request,
    ended: Callable[[], bytes],
) -> None:
    is_whole = True  # no record is cut here
    while request.transport is not None and not request.transport.is_closing():
        part, is_end = b"", is_whole
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                part, is_end = await reply.content.readchunk()
                if not part and not is_end:
                    break
        if is_whole and (last := ended()):
            await response.write(last)
            break
        if part:
            await response.write(part)
        is_whole = is_end
    await response.write_eof()
