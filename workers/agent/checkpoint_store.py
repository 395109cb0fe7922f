"""The agent's keeper: a process that holds copies of ranks' state in its memory (workers/keeper).

The agent holds the listening socket and starts the keeper at the first connection, and anew when it
has ended: so a node that keeps nothing has no such process, and a new keeper is found where the
last one was. One that ends before it had a copy is left alone for longer each time, and is nothing
that was lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from ...events.records.types import KEEPERS_NUM_MAX
from ..checkpoint_store import protocol
from ..host import linux
from .delivery.log_link import backoff_s

ARGV = (sys.executable, "-P", "-m", "unicron.workers.checkpoint_store.server")
BACKLOG_NUM = 64
AGAIN_S_MAX = 60.0
"""How long at most it is left alone after its end, where it ends each time before it is of use."""
END_S_MAX = 1.0
"""How long its end is waited for; what takes longer the agent reaps with its other children."""

_log = structlog.get_logger("agent")


class Keeper:
    """Listens on `host`; `lost` hears which task has no copies any more (0: none has), and why.

    `start` is the number of the process that runs, or runs next; it is one more after each that had
    a copy. There are no more than KEEPERS_NUM_MAX: their numbers would be the next agent's.
    """

    def __init__(self, host: str, secret: str, env: Mapping[str, str], marker: tuple[str, str],
                 log_path: Path, lost: Callable[[int, str], None], start: int) -> None:
        self.start = start
        self._last = start + KEEPERS_NUM_MAX - 1
        self._env = {**env, protocol.SECRET: secret, marker[0]: marker[1]}
        self._log_path = log_path
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._listener = socket.create_server((host, 0), backlog=BACKLOG_NUM)
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None
        self._has_kept = False
        """Whether the one that runs has had a copy."""
        self._num_vain = 0
        """How many ended one after the other without having had any."""
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._loop.add_reader(self._listener, self._start)

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none now."""
        return self._popen.pid if self._popen is not None else 0

    def forget(self, task: int) -> None:
        """The task has ended: its copies may go."""
        if self._socket is not None:
            try:
                self._socket.send(task.to_bytes(protocol.TASK_BYTES, "big"))
            except OSError:
                pass  # it has ended, or hears nothing: its memory is bounded

    def close(self) -> None:
        """End it, and listen no more; twice is harmless."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._again is not None:
            self._again.cancel()
        self._end()

    def _start(self) -> None:
        """Somebody wants a keeper."""
        self._loop.remove_reader(self._listener)
        parent = os.getpid()
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ours.setblocking(False)
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                fds = (theirs.fileno(), self._listener.fileno())
                with self._log_path.open("ab") as log:
                    self._popen = subprocess.Popen(
                        [*ARGV, "--fd", str(fds[0]), "--listen", str(fds[1]),
                         "--start", str(self.start)],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env,
                        pass_fds=fds, start_new_session=True,
                        preexec_fn=lambda: linux.die_with(parent))
        except OSError as error:
            if ours is not None:
                ours.close()
            self._listen_again("no keeper", why=str(error))
            return
        self._socket, self._has_kept = ours, False
        self._loop.add_reader(ours, self._hear)
        _log.info("keeps copies", pid=self._popen.pid, endpoint=self.endpoint)

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(protocol.TASK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        task = int.from_bytes(data, "big")
        if data and task == protocol.FIRST_CODE:
            self._has_kept, self._num_vain = True, 0
        elif data:
            self._lost(task, "they made room for one that did not come")
        else:
            self._end()
            if self._has_kept:
                self._lost(0, "the keeper has ended")
                self.start += 1
            if self.start > self._last:
                _log.error("no keeper any more before the agent starts anew", num=KEEPERS_NUM_MAX,
                           see=str(self._log_path))
                self._listener.close()  # who wants one is refused at once
                return
            self._listen_again("the keeper has ended, and with it its copies" if self._has_kept
                               else "the keeper has ended before it had a copy",
                               see=str(self._log_path))

    def _listen_again(self, what: str, **more: str) -> None:
        pause_s = backoff_s(self._num_vain, AGAIN_S_MAX)
        self._num_vain += 1
        _log.warning(what, again_s=round(pause_s, 3), **more)
        self._again = self._loop.call_later(
            pause_s, lambda: self._loop.add_reader(self._listener, self._start))

    def _end(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        if self._popen is not None:
            self._popen.kill()
            try:
                self._popen.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                _log.warning("the keeper does not die", pid=self._popen.pid)
        self._socket = self._popen = None
