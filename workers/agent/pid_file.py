"""The agent's note of itself, `agents/NODE.json`: one agent per node and state directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from ...events.errors import UsageError
from .. import linux


class AgentNote(Struct, frozen=True, kw_only=True):
    """Who runs. `start_time` is field 22 of /proc/PID/stat: it tells the pid from a later one."""

    node: str
    pid: int
    start_time: str
    incarnation: int


class PidFile:
    """Held by a lock for as long as the agent lives; removed when it stops on purpose."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self._folder = state_dir / "agents"
        self._node = node
        self._lock = -1

    def take(self, now_s: float) -> int:
        """Lock, write, and give the incarnation: `now_s` in ms, above every one before.

        The lock file keeps it, so that a clock that was set back does no harm. Raises UsageError
        if another agent has the lock.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / f"{self._node}.lock",
                             os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise UsageError(f"an agent for node {self._node} already runs on {self._folder}",
                             "give another --node or --state") from None
        last = os.pread(self._lock, 32, 0).strip()
        incarnation = max(int(now_s * 1000), int(last) + 1 if last.isdigit() else 0)
        os.pwrite(self._lock, b"%d\n" % incarnation, 0)
        proc = linux.read(os.getpid())
        assert proc is not None
        note = AgentNote(node=self._node, pid=proc.pid, start_time=str(proc.start_ticks),
                         incarnation=incarnation)
        path = self._folder / f"{self._node}.json"
        new = path.with_name(path.name + ".new")
        new.write_bytes(msgspec.json.encode(note))
        new.replace(path)
        return incarnation

    def drop(self) -> None:
        """Remove the note, free the lock; twice is harmless."""
        if self._lock >= 0:
            (self._folder / f"{self._node}.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1
