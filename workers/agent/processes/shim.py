"""The agent's side of the shim (workers/host/shim.py), the parent of its processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from ....events import unix_socket
from ....events.bounded_file import LOG_BYTES_MAX
from ....events.decoding import Decoder
from ....events.errors import UnicronError
from ....events.regular_files import open_to_write
from ...host import linux, shim

ARGV = (sys.executable, "-P", "-m", "unicron.workers.host.shim")
CALL_S_MAX = 30.0
"""A call takes a millisecond. The first one waits until a new shim has started."""
NODE, SHIM, STORE, STORE_PROCESS, ZYGOTE = "node", "shim", "store", "store-process", "zygote"
PROBES = "probes"
CHECK, OUTPUT = "check/", "output/"
"""Keys of what is held, other than the ranks' `task.rank.attempt`; CHECK begins that of a check,
OUTPUT that of the output of what has the rest as its key."""

_log = structlog.get_logger("agent")
_replies = Decoder(shim.Reply)
_helds = Decoder(shim.Held)


class ShimLost(UnicronError):
    """The shim is gone, and with it all processes of the node."""


class Held(NamedTuple):
    """What a former agent has left with the shim."""

    note: bytes
    pid: int
    files: list[int]


def _failed(reply: shim.Reply) -> OSError:
    error = OSError(reply.error)
    error.errno = reply.errno or None
    return error


class Shim:
    """Starts, asks about and reaps processes by the shim. Each call raises ShimLost if it is gone.
    `held` is what former agents have left, by key: who takes an entry, owns its files."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        """`path`: where the shim listens. May block for a second. Raises ShimLost."""
        self._path = path
        self.held: dict[str, Held] = {}
        self._connection = connection
        self._connection.settimeout(CALL_S_MAX)
        self._end_of_shim = select.poll()
        self._end_of_shim.register(connection, select.POLLIN)
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pid = 0
        self.pids: dict[str, int] = {}
        """The processes that it holds, by key."""
        reply = self._call(shim.Attach(), self._changed)
        if reply.error:
            raise ShimLost(f"the shim cannot be used now: {reply.error}")
        self.pid, self.contains = reply.pid, reply.contains
        for _ in range(reply.num):
            held, files = shim.receive(self._connection, _helds)
            self.held[held.key] = Held(held.note, held.pid, files)
            if held.pid:
                self.pids[held.key] = held.pid

    @classmethod
    def open(
        cls, path: Path, env: Mapping[str, str], marker: tuple[str, str], log_path: Path
    ) -> Shim:
        """Connect to the shim that listens on `path`, or start one. Raises OSError, ShimLost."""
        connection, address = socket.socket(socket.AF_UNIX), unix_socket.address(str(path))
        try:
            connection.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = open_to_write(log_path, appends=True)
            with socket.socket(socket.AF_UNIX) as listener, log:
                listener.bind(address)
                listener.listen()
                subprocess.Popen(
                    [*ARGV, "--listen", str(listener.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**env, marker[0]: marker[1]},
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                ).returncode = 0
                connection.connect(address)
        shim_of_node = cls(connection, path)
        shim_of_node.bound(SHIM, log_path, LOG_BYTES_MAX)
        return shim_of_node

    def serve(self, gone_s: float) -> None:
        """From now on, the shim ends all if no agent has served for `gone_s`."""
        self._call(shim.Served(gone_s))

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` called when a process has stopped, continued or ended."""

        def changed() -> None:
            with suppress(BlockingIOError):
                os.eventfd_read(self._changed)
            call()

        asyncio.get_running_loop().add_reader(self._changed, changed)

    def check(self) -> None:
        """Raise ShimLost if the shim is gone."""
        if self._end_of_shim.poll(0):  # it sends replies only
            raise ShimLost(f"the shim, pid {self.pid}, is gone")

    def start(
        self,
        key: str,
        note: bytes,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: int,
        *,
        files: Mapping[str, int],
        held: Sequence[int] = (),
        folder: str = "",
        user: str = "",
        cgroup: str | None = None,
    ) -> int:
        """Start a process and return its pid. `files`: the name of an option or of an environment
        variable, and the file that it gets; `held`: the agent's ends; `cgroup`: of a rank. Raises
        OSError."""
        reply = self._call(
            shim.Start(key, note, tuple(argv), dict(env), folder, tuple(files), user, cgroup),
            log,
            *files.values(),
            *held,
        )
        if reply.error:
            raise _failed(reply)
        self.pids[key] = reply.pid
        return reply.pid

    def hold(self, key: str, note: bytes, files: Sequence[int] = (), pid: int = 0) -> None:
        """Hold files, and a child of the shim that it has not started itself. Raises OSError."""
        reply = self._call(shim.Held(key, note, pid), *files)
        if reply.error:
            raise _failed(reply)
        if pid:
            self.pids[key] = pid

    def answer_probes(self, port: int, secret: bytes) -> None:
        """From now on, also without an agent, probes that arrive at this socket are answered. A
        former shim does not do it. Raises OSError."""
        reply = self._call(shim.Held(PROBES, secret, answers=True), port)
        if reply.error:
            raise _failed(reply)

    def bound(self, key: str, path: Path, bytes_max: int) -> None:
        """From now on, also without an agent, the output of a process may take so much of its disk:
        its beginning and its end stay (events/bounded_file.py). A former shim does not do it."""
        self._call(shim.Held(OUTPUT + key, os.fsencode(path), bytes_max=bytes_max))

    def status(self, pid: int) -> shim.Reply:
        """How a process has ended, if it has."""
        return self._call(shim.Status(pid))

    def reap(self, *pids: int, key: str = "") -> None:
        """Reap ended processes, and release what is held under `key`, and its output."""
        self._call(shim.Reap(pids, key))
        if key:
            self._call(shim.Reap((), OUTPUT + key))
        self.pids.pop(key, None)

    def discard(self, key: str, pid: int) -> None:
        """Kill a process and release its key; a sweep reaps it."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.reap(pid, key=key)

    def end(self) -> None:
        """Kill all processes, and end the shim."""
        with suppress(OSError):
            shim.send(self._connection, shim.End())
        with suppress(OSError):
            self._connection.recv(1)  # until it is gone: the next one has the same address
        self._path.unlink(missing_ok=True)
        self.pids.clear()

    def kill_unknown(self, marker: bytes) -> None:
        """Kill processes of former agents that the shim does not hold. `marker` is the beginning of
        the environment entry of all processes of this node; it ends in `:` and a key."""
        known = {self.pid, *(held.pid for held in self.held.values())}

        def is_known(proc: linux.Proc, entry: bytes) -> bool:
            key = entry.rpartition(b":")[2].decode(errors="replace")
            return proc.pid in known or proc.sid in known or (key != ZYGOTE and key in self.held)

        for proc in linux.kill_marked(marker, is_known):
            _log.warning("killed an orphaned process of an earlier agent", pid=proc.pid)

    def _call(self, message: msgspec.Struct, *files: int) -> shim.Reply:
        try:
            shim.send(self._connection, message, files)
            reply, _ = shim.receive(self._connection, _replies)
        except (OSError, EOFError) as error:
            raise ShimLost(f"the shim, pid {self.pid}, is gone: {error}") from None
        return reply
