"""The control plane's process: server, leadership and HTTP, from start to a clean stop.

For tests that kill it at a chosen record, four variables of the environment are read here and
nowhere else. Each ends the process with SIGKILL around one append:

- `UNICRON_CRASH_AFTER_SEQ=N`: right after the append that holds record N is acknowledged;
- `UNICRON_CRASH_BEFORE_SEQ=N`: right before that append;
- `UNICRON_CRASH_AFTER_KIND=Kind[:n]`: after the append that holds the n-th record (default the
  first) of that kind which this process writes;
- `UNICRON_CRASH_BEFORE_KIND=Kind[:n]`: right before it.

An append is atomic, so between the records of one append there is no moment to be killed in.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

import msgspec
import structlog
from aiohttp import web
from msgspec import Struct
from unicron import __version__

from ..events.errors import Fenced, Unavailable, UsageError
from ..events.log.embedded_server import start_time
from ..events.log.redis_streams import RedisLog
from ..events.process_io import Talk
from ..events.records.envelope import KINDS, Record
from ..events.spec.policy import Policy
from .api.http import Address, Http
from .service.coordinator import Coordinator

CONNECT_S_MAX = 5.0
SHUTDOWN_S_MAX = 2.0
EXIT_DONE, EXIT_FAILED = 0, 1


class Options(Struct, frozen=True, kw_only=True):
    """What `unicron control-plane` is told. `port` 0 takes any free one."""

    state: Path
    redis_url: str
    host: str = "127.0.0.1"
    port: int = 0
    cluster: str = "default"
    policy: Policy = Policy()
    """Whatever the log had before."""


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code: 0 stopped, 1 fenced.

    Raises UsageError for what a person must mend (a port in use, a server that is not
    reached or refuses the password), CorruptLog for a log that cannot be trusted.

    Start order: server, HTTP port (before anybody is fenced), token and
    `control_plane.json`, leadership. Stop order: leadership after its turn, HTTP with the streams
    that it still serves, the file, the server's connections. A cancel does the same.
    """
    _speak()
    return asyncio.run(_serve(options))


async def _serve(options: Options) -> int:
    talk = structlog.get_logger("control_plane")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log = _CrashingLog(options.redis_url, options.cluster, os.environ)
    try:
        await _reach(log)
        coordinator = Coordinator(log, clock=steady_clock(), nonce=secrets.token_hex(8),
                                  code=__version__, policy=options.policy)
        token = _token(options.state)
        address = Address(redis_url=options.redis_url, cluster=options.cluster)
        http = Http(coordinator, log, token=token, address=address)
        runner = web.AppRunner(http.app(), access_log=None, shutdown_timeout=SHUTDOWN_S_MAX)
        url = await _listen(runner, options.host, options.port)
        file = options.state / "control_plane.json"
        try:
            pid = os.getpid()
            _write(file, msgspec.json.encode({
                "url": url, "token": token, "pid": pid, "start_time": start_time(pid),
                "cluster": options.cluster}))
            talk.info("listening", url=url, cluster=options.cluster)
            return await _lead(coordinator, stop)
        finally:
            await runner.cleanup()
            _remove(file)
    finally:
        await log.close()


async def _lead(coordinator: Coordinator, stop: asyncio.Event) -> int:
    """Lead until told to stop. Raises what ends the leadership, but Fenced: that is a line."""
    leading = asyncio.create_task(coordinator.run(), name="leadership")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
        coordinator.stop()
        done, _ = await asyncio.wait((leading,), timeout=SHUTDOWN_S_MAX)
        if not done:
            leading.cancel()
            await asyncio.wait((leading,))
        if not leading.cancelled():
            leading.result()
    except Fenced as error:
        structlog.get_logger("control_plane").error("fenced, stopping", why=str(error))
        return EXIT_FAILED
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]  # pyright: ignore
        if isinstance(first, UsageError):
            raise first from None
        raise
    finally:
        stopping.cancel()
        leading.cancel()
    return EXIT_DONE


async def _reach(log: RedisLog) -> None:
    deadline_s = time.monotonic() + CONNECT_S_MAX
    while True:
        try:
            await log.check()
            return
        except Unavailable as error:
            if time.monotonic() >= deadline_s:
                raise UsageError(f"the server cannot be reached: {error}",
                                 "is it running? check --redis") from None
        await asyncio.sleep(0.1)


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        why = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {why}",
                         "choose another port, or stop what uses it") from None
    taken = runner.addresses[0][1]
    return f"http://[{host}]:{taken}" if ":" in host else f"http://{host}:{taken}"


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that never jump: the wall clock's at the start, then the monotonic one."""
    origin_s = time.time() - time.monotonic()
    return lambda: origin_s + time.monotonic()


def _token(state: Path) -> str:
    """The cluster's token: made once, kept in the state folder, readable by its owner alone."""
    path = state / "token"
    try:
        found = path.read_text(encoding="ascii").strip()
        if found:
            return found
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a folder of yours: --state") from None
    token = secrets.token_urlsafe(32)
    _write(path, token.encode() + b"\n")
    return token


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, for its owner alone. Raises UsageError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        new.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a folder of yours: --state") from None


def _remove(path: Path) -> None:
    """Remove our own note, never a successor's."""
    try:
        if msgspec.json.decode(path.read_bytes())["pid"] == os.getpid():
            path.unlink()
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return


def _speak() -> None:
    """structlog on stderr: for people on a terminal, else JSON lines."""
    stderr = sys.stderr
    last = (structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
            if stderr.isatty() else structlog.processors.JSONRenderer())
    structlog.configure(
        processors=[structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso", utc=True), last],
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, Talk(stderr))))


class _CrashingLog(RedisLog):
    """The Redis log; where a crash is ordered (see the caption), it ends the process there."""

    def __init__(self, url: str, cluster: str, environment: Mapping[str, str]) -> None:
        super().__init__(url, cluster)
        self._seqs: dict[str, int] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        self._written: dict[str, int] = {}
        for when in ("BEFORE", "AFTER"):
            seq = environment.get(f"UNICRON_CRASH_{when}_SEQ", "")
            kind, _, number = environment.get(f"UNICRON_CRASH_{when}_KIND", "").partition(":")
            if (seq and not seq.isdecimal()) or (number and not number.isdecimal()):
                raise UsageError(f"UNICRON_CRASH_{when}_*: not a number", "N, or Kind:n")
            if kind and kind not in KINDS:
                raise UsageError(f"UNICRON_CRASH_{when}_KIND: {kind!r} is no kind of record")
            if seq:
                self._seqs[when] = int(seq)
            if kind:
                self._kinds[when] = kind, int(number or 1)

    async def append(self, records: Sequence[Record], *, epoch: int, expect: int,
                     cursor: str, acked: Mapping[str, int]) -> None:
        """As RedisLog, with the ordered end before or after it."""
        for record in records:
            self._written[record.kind] = self._written.get(record.kind, 0) + 1
        self._crash("BEFORE", records)
        await super().append(records, epoch=epoch, expect=expect, cursor=cursor, acked=acked)
        self._crash("AFTER", records)

    def _crash(self, when: str, records: Sequence[Record]) -> None:
        kind, number = self._kinds.get(when, ("", 0))
        seq = self._seqs.get(when)
        if any(r.seq == seq for r in records) or (
                kind in {r.kind for r in records} and self._written[kind] >= number):
            os.kill(os.getpid(), signal.SIGKILL)
