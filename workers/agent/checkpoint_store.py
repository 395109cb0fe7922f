"""Runs the node's checkpoint store: the process that holds in-memory checkpoints of ranks.

The agent listens, and starts the store (workers/checkpoint_store) when a rank connects; the shim
holds both for the next agent. So a node without checkpoints has no such process, and the address
never changes. If the store exits before it held a checkpoint, nothing was lost, and the agent waits
longer before each restart.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from ...events import network_address
from ...events.bounded_file import LOG_BYTES_MAX
from ...events.errors import UsageError
from ...events.records.types import STORES_NUM_MAX
from ...events.regular_files import open_to_write
from ..checkpoint_store import protocol
from ..checkpoint_store.store import BYTES_MAX, bytes_max
from .delivery.log_link import backoff_s
from .processes.shim import STORE, STORE_PROCESS, Shim

ARGV = (sys.executable, "-P", "-m", "unicron.workers.checkpoint_store.server")
BACKLOG_NUM = 64
RESTART_S_MAX = 60.0
"""Longest wait before a restart if the store keeps exiting before it holds a checkpoint."""

_log = structlog.get_logger("agent")


class CheckpointStore:
    """Listens on `host`; raises UsageError if it cannot. Calls `lost` with the task that lost its
    checkpoints (0: all) and why. `start` is the number of the process; it grows by one after each
    that held a checkpoint, at most by STORES_NUM_MAX: higher ones are the next agent's."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        env: Mapping[str, str],
        marker: tuple[str, str],
        log_path: Path,
        lost: Callable[[int, str], None],
        start: int,
        shim: Shim,
    ) -> None:
        self._shim = shim
        former = shim.held.get(STORE)
        self.start = int(former.note) if former is not None else start
        self.bytes_max = bytes_max(env)
        """The memory that its checkpoints may take."""
        self._last = start + STORES_NUM_MAX - 1
        self._secret = secret
        self._env = {**env, marker[0]: marker[1], BYTES_MAX: str(self.bytes_max)}
        self._log_path = log_path
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        try:
            self._listener = (
                socket.socket(fileno=former.files[0])
                if former is not None
                else network_address.listen(host, backlog=BACKLOG_NUM)
            )
        except OSError as error:
            raise UsageError(
                f"the checkpoint store cannot listen at {host}: {error.strerror}",
                "free a port of sysctl net.ipv4.ip_local_port_range",
            ) from None
        self.pid = 0
        """The pid of the store's process; 0: none runs."""
        self._socket: socket.socket | None = None
        self._restart_timer: asyncio.TimerHandle | None = None
        self._has_stored = False
        """The running process has held a checkpoint."""
        self._num_failures = 0
        """Consecutive exits before a first checkpoint."""
        self.endpoint = network_address.endpoint(host, self._listener.getsockname()[1])
        running = shim.held.get(STORE_PROCESS)
        if running is not None:
            self.pid = running.pid
            self._socket = socket.socket(fileno=running.files[0])
            self._has_stored = True  # perhaps: if it exits, that is reported
            self._loop.add_reader(self._socket, self._on_message)
            return
        self._hold()
        self._loop.add_reader(self._listener, self._start)

    def _hold(self) -> None:
        self._shim.hold(STORE, b"%d" % self.start, [self._listener.fileno()])

    def forget(self, task: int) -> None:
        """Drop the checkpoints of a task that has ended."""
        if self._socket is not None:
            with suppress(OSError):  # the store has exited or does not read: its memory is bounded
                self._socket.send(task.to_bytes(protocol.TASK_BYTES, "big"))

    def close(self) -> None:
        """Kill the process and stop listening. A second call does nothing."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listen_no_more()
        if self._restart_timer is not None:
            self._restart_timer.cancel()
        self._end()

    def _listen_no_more(self) -> None:
        """New connections are refused."""
        self._listener.close()
        self._shim.reap(key=STORE)

    def _start(self) -> None:
        """Start the process for a waiting connection."""
        self._loop.remove_reader(self._listener)
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ours.send(self._secret)  # not by the environment, which others may read
                ours.setblocking(False)
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with open_to_write(self._log_path, appends=True) as log:
                    self._shim.bound(STORE_PROCESS, self._log_path, LOG_BYTES_MAX)
                    self.pid = self._shim.start(
                        STORE_PROCESS,
                        b"",
                        [*ARGV, "--start", str(self.start)],
                        self._env,
                        log.fileno(),
                        held=[ours.fileno()],
                        files={"--fd": theirs.fileno(), "--listen": self._listener.fileno()},
                    )
        except OSError as error:
            if ours is not None:
                ours.close()
            self._listen_again("the checkpoint store cannot start", why=str(error))
            return
        self._socket, self._has_stored = ours, False
        self._loop.add_reader(ours, self._on_message)
        _log.info("started the checkpoint store", pid=self.pid, endpoint=self.endpoint)

    def _on_message(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(protocol.TASK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        task = int.from_bytes(data, "big")
        if data and task == protocol.FIRST_CHECKPOINT_CODE:
            self._has_stored, self._num_failures = True, 0
        elif data:
            self._lost(task, "evicted for a checkpoint that did not arrive")
        if data:
            self._socket.recv(protocol.TASK_BYTES)  # only now: the next agent would find it
        else:
            self._end()
            if self._has_stored:
                self._lost(0, "the checkpoint store has exited")
                self.start += 1
                try:
                    self._hold()
                except OSError:  # the next agent would not know the number
                    self.start = self._last + 1
            if self.start > self._last:
                _log.error(
                    "no more checkpoint store until the agent restarts",
                    num=STORES_NUM_MAX,
                    see=str(self._log_path),
                )
                self._listen_no_more()
                return
            self._listen_again(
                "the checkpoint store has exited; its checkpoints are lost"
                if self._has_stored
                else "the checkpoint store has exited before it held a checkpoint",
                see=str(self._log_path),
            )

    def _listen_again(self, what: str, **more: str) -> None:
        pause_s = backoff_s(self._num_failures, RESTART_S_MAX)
        self._num_failures += 1
        _log.warning(what, again_s=round(pause_s, 3), **more)
        self._restart_timer = self._loop.call_later(
            pause_s, lambda: self._loop.add_reader(self._listener, self._start)
        )

    def _end(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        if self.pid:
            self._shim.discard(STORE_PROCESS, self.pid)
        self._socket, self.pid = None, 0
