"""One process of a rank: started, watched by its pidfd, ended and reaped with all it started.

The process leads a session of its own, dies with the agent (PR_SET_PDEATHSIG), and writes to a
file. Its exit is seen at once and it is left unreaped until nothing of its group lives: so its pid,
which is also the number of its group and session, cannot become another's meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...host import linux
from .zygote import Zygote

ADOPTED_S_MAX = 5.0
"""A fork of the zygote becomes the agent's child when what forked it has ended."""
FOLLOW_S = 0.1
"""So long after a process that it stands for, what was started to run it may still live."""
_POLL_S_MIN, _POLL_S_MAX = 0.002, 0.1


class Exit(NamedTuple):
    """How a process ended: exactly one of the first two is set."""

    exit_code: int | None
    signal: int | None
    dumped: bool = False
    """It left a core."""


class Process:
    """A running process. `marker` is an environment entry that all its descendants inherit."""

    def __init__(self, pid: int, log_path: Path, log_start: int, marker: bytes, *,
                 popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.log_path = log_path
        self._popen = popen
        self._is_reaped = False
        self.log_start = log_start
        """Where in the file that it shares with others its own output begins."""
        self._marker = marker
        self._loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # no descriptor is left: what nobody can watch must not run
            self._pidfd = -1
            self.signal_group(signal.SIGKILL)
            self._reap()
            raise
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._followed = 0
        self._followed_fd = -1
        self._loop.add_reader(self._pidfd, self._see_end)

    @classmethod
    def start(cls, argv: Sequence[str], *, env: Mapping[str, str], marker: tuple[str, str],
              log_path: Path, pass_fds: Sequence[int] = ()) -> Process:
        """Start `argv`; stdout and stderr are appended to `log_path`. Raises OSError."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with log_path.open("ab") as log:
            log_start = log.tell()
            popen = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**env, marker[0]: marker[1]}, pass_fds=tuple(pass_fds),
                start_new_session=True, preexec_fn=lambda: linux.die_with(parent))
        return cls(popen.pid, log_path, log_start, f"{marker[0]}={marker[1]}".encode(),
                   popen=popen)

    @classmethod
    def fork(cls, zygote: Zygote, *, env: Mapping[str, str], marker: tuple[str, str],
             log_path: Path, pass_fds: Sequence[int]) -> Process:
        """The same out of a zygote: a training rank that is given its pipe and its pulse's page.

        Raises OSError.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log_start = log.tell()
            pid = zygote.fork({**env, marker[0]: marker[1]}, log.fileno(), *pass_fds)
        return cls(pid, log_path, log_start, f"{marker[0]}={marker[1]}".encode())

    async def wait(self) -> Exit:
        """Until the process has ended; it stays a zombie until `end_group`."""
        await asyncio.shield(self._ended)
        await self._until_adopted()
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert status is not None, f"{self.pid} has ended without a status"
        if status.si_code == os.CLD_EXITED:
            return Exit(status.si_status, None)
        return Exit(None, status.si_status, status.si_code == os.CLD_DUMPED)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def is_stopped(self) -> bool | None:
        """Whether it stands still by a signal; None where it has ended, or a debugger holds it."""
        proc = linux.read(self._followed or self.pid) if not self._is_reaped else None
        return None if proc is None or proc.state in "tZX" else proc.state == "T"

    def follow(self, pid: int) -> bool:
        """This process, which was started by it, is what counts: when that ends, it is to end too,
        FOLLOW_S later at most. False where it is no such process."""
        if pid == self.pid or self._marker not in linux.environ(pid):
            return pid == self.pid
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        self.unfollow()
        self._followed, self._followed_fd = pid, descriptor
        self._loop.add_reader(descriptor, self._see_followed_end)
        return True

    def unfollow(self) -> None:
        """What it started may end before it; twice is harmless."""
        if self._followed_fd >= 0:
            self._loop.remove_reader(self._followed_fd)
            os.close(self._followed_fd)
            self._followed, self._followed_fd = 0, -1

    def _see_followed_end(self) -> None:
        """A shell around it says how it ended by its own exit code; one that goes on is ended."""
        self.unfollow()
        self._loop.call_later(FOLLOW_S, self._end_alone)

    def _end_alone(self) -> None:
        if not self.has_ended:
            self.signal_group(signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """Send to the process and its group; nothing if they are gone."""
        if not self._is_reaped:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    async def wait_group(self, s_max: float) -> bool:
        """Until nothing that the ended process started is left; False after `s_max`."""
        return await self._until_alone(s_max, kill=False)

    async def end_group(self, s_max: float) -> bool:
        """Kill and reap what the process started, then reap it; False if some live after `s_max`.

        Afterwards (True) its number is free. Call it again after False.
        """
        last_s = self._loop.time() + s_max
        self.signal_group(signal.SIGKILL)
        # What it started in a session of its own is found as its orphan: so it has to be gone.
        await asyncio.wait([self._ended], timeout=s_max)
        if not self.has_ended or not await self._until_alone(last_s - self._loop.time(), kill=True):
            return False
        self._reap()
        self.close()
        return True

    def output(self, bytes_max: int) -> bytes:
        """The end of what it wrote, of this attempt alone. Raises OSError."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            begin = self.log_start if self.log_start <= end else 0  # somebody emptied it
            log.seek(max(begin, end - bytes_max))
            return log.read(bytes_max)

    def close(self) -> None:
        """Stop watching."""
        self.unfollow()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _reap(self) -> None:
        if self._popen is not None:
            self._popen.wait()
        else:
            linux.reap(self.pid)
        self._is_reaped = True

    def _see_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _until_adopted(self) -> None:
        """One that was forked and killed at once may still be the child of what forked it."""
        deadline = self._loop.time() + ADOPTED_S_MAX
        while ((proc := linux.read(self.pid)) is not None and proc.ppid != os.getpid()
               and self._loop.time() < deadline):
            await asyncio.sleep(_POLL_S_MIN)

    async def _until_alone(self, s_max: float, *, kill: bool) -> bool:
        deadline, pause_s = self._loop.time() + s_max, _POLL_S_MIN
        while left := self._descendants():
            if self._loop.time() > deadline:
                return False
            for proc in left if kill else ():
                linux.kill(proc)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
        return True

    def _descendants(self) -> list[linux.Proc]:
        """What lives of its session and group, and of orphans that the agent adopted from it."""
        procs, me = linux.table(), os.getpid()
        roots: set[int] = set()
        for proc in procs:
            if proc.pid == self.pid:
                continue
            ours = self.pid in (proc.sid, proc.pgid)
            if ours or (proc.ppid == me and self._marker in linux.environ(proc.pid)):
                roots.add(proc.pid)
                if proc.state == "Z" and proc.ppid == me:
                    linux.reap(proc.pid)
        return [proc for proc in linux.descendants(roots, procs) if proc.state not in "ZX"]
