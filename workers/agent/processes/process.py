"""One process of a rank: starts it, monitors its pidfd, ends and reaps it with its descendants.

It leads its own session, and dies with its parent, the shim. Its descendants are found by its
cgroup; without one, as orphans, which it has adopted while it lived. It is reaped after all of
them: until then the kernel cannot reuse its pid, which is also the number of its group and session,
so a signal to the group hits no stranger.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ....events.bounded_file import ASIDE, HEAD_BYTES, TAIL_BYTES
from ....events.regular_files import open_regular, open_to_write
from ...host import linux, rank_cgroups
from . import former_outputs
from .shim import OUTPUT, ZYGOTE, Shim
from .zygote import Zygote

ADOPTED_S_MAX = 5.0
"""Maximum wait until a fork is the shim's child: the intermediate process must exit first."""
FOLLOW_S = 0.1
"""After the exit of a followed process, the command that started it has this long to exit too."""
EXECVE_S_MAX = 2.0
"""Maximum wait for an adopted orphan inside execve: its environment says then whose it is. execve
takes milliseconds; a slow disk holds it for longer."""
_POLL_S_MIN, _POLL_S_MAX = 0.002, 0.1


class Exit(NamedTuple):
    """How a process ended. Exactly one of `exit_code` and `signal` is set."""

    exit_code: int | None
    signal: int | None
    dumped: bool = False
    """It dumped core."""


class Output(NamedTuple):
    """The file that a process writes to, and how much of its disk that may take."""

    path: Path
    bytes_max: int


class Process:
    """A running process. `marker` is an environment entry that all its descendants inherit, unless
    they are started without. `shim` is its parent, and holds it under `key`. `cgroup`: its own;
    None: it has none."""

    def __init__(
        self,
        pid: int,
        log_path: Path,
        log_start: int,
        marker: bytes,
        shim: Shim,
        key: str,
        cgroup: Path | None = None,
    ) -> None:
        self.pid = pid
        self.log_path = log_path
        self.folder = log_path.parent
        """Where the process may write files for the agent."""
        self.uid = os.geteuid()
        self._shim, self._key = shim, key
        self._cgroup = cgroup
        self._is_reaped = False
        self.log_start = log_start
        """Where its own output begins in the log file, which it may share."""
        self._marker = marker
        self._loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # out of file descriptors: an unmonitored process must not run
            self._pidfd = -1
            self.signal_group(signal.SIGKILL)
            self._reap()
            raise
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._followed = 0
        self._followed_fd = -1
        self._loop.add_reader(self._pidfd, self._see_end)

    @classmethod
    def start(
        cls,
        parent: Shim,
        key: str,
        note: Callable[[int], bytes],
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        marker: tuple[str, str],
        output: Output,
        files: Mapping[str, int] | None = None,
        held: Sequence[int] = (),
        folder: str = "",
        user: str = "",
        cgroup: Path | None = None,
    ) -> Process:
        """Have the shim start `argv`, with stdout and stderr appended to `output`. `note` makes
        what the shim holds, of the place where the output begins; the rest as for Shim.start.
        Raises OSError."""
        if folder and not os.path.isdir(folder):
            raise NotADirectoryError(
                f"its folder {folder} is not on this node: submit from a "
                "folder that all nodes have, or name one with folder:"
            )
        with _opened(parent, key, output) as log:
            log_start = log.tell()
            pid = parent.start(
                key,
                note(log_start),
                argv,
                {**env, marker[0]: marker[1]},
                log.fileno(),
                files=files or {},
                held=held,
                folder=folder,
                user=user,
                cgroup=str(cgroup or ""),
            )
        entry = f"{marker[0]}={marker[1]}".encode()
        return cls(pid, output.path, log_start, entry, parent, key, cgroup)

    @classmethod
    def fork(
        cls,
        zygote: Zygote,
        parent: Shim,
        key: str,
        note: Callable[[int], bytes],
        *,
        env: Mapping[str, str],
        marker: tuple[str, str],
        output: Output,
        files: Sequence[int],
        held: Sequence[int],
        cgroup: Path | None = None,
    ) -> Process:
        """Fork a training rank, with pipe and page, for the shim to adopt. Raises OSError."""
        with _opened(parent, key, output) as log:
            log_start = log.tell()
            pid = zygote.fork(
                {**env, marker[0]: marker[1]}, str(cgroup or ""), log.fileno(), *files
            )
            parent.hold(key, note(log_start), held, pid)
        entry = f"{marker[0]}={marker[1]}".encode()
        return cls(pid, output.path, log_start, entry, parent, key, cgroup)

    async def wait(self) -> Exit:
        """Wait until the process has ended; it stays a zombie until `end_group`."""
        await asyncio.shield(self._ended)
        await self._until_adopted()
        reply = self._shim.status(self.pid)
        assert reply.has_ended, f"{self.pid} has ended without a status"
        return Exit(reply.exit_code, reply.signal, reply.dumped)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def is_stopped(self) -> bool | None:
        """Whether a signal has stopped it; None if it has ended or a debugger holds it."""
        proc = linux.read(self.trained_by) if not self._is_reaped else None
        return None if proc is None or proc.state in "tZX" else proc.state == "T"

    def follow(self, pid: int) -> bool:
        """Follow the descendant `pid`, the process that trains: after its exit this process must
        exit within FOLLOW_S or is killed. False if `pid` is not a descendant."""
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

    @property
    def trained_by(self) -> int:
        """The process that trains: the followed descendant, or itself."""
        return self._followed or self.pid

    def live(self) -> list[linux.Proc]:
        """The live processes of its cgroup, session and group, with their descendants. Linear in
        the number of all processes."""
        procs = linux.table()
        inside = rank_cgroups.pids(self._cgroup) if self._cgroup is not None else set[int]()
        roots = {
            proc.pid for proc in procs if self.pid in (proc.sid, proc.pgid) or proc.pid in inside
        }
        return [proc for proc in linux.descendants(roots, procs) if proc.state not in "ZX"]

    def unfollow(self) -> None:
        """Stop following, so that the descendant may end first. A second call does nothing."""
        if self._followed_fd >= 0:
            self._loop.remove_reader(self._followed_fd)
            os.close(self._followed_fd)
            self._followed, self._followed_fd = 0, -1

    def _see_followed_end(self) -> None:
        """Let the command exit with the exit code of the descendant; kill it after FOLLOW_S."""
        self.unfollow()
        self._loop.call_later(FOLLOW_S, self._end_alone)

    def _end_alone(self) -> None:
        if not self.has_ended:
            self.signal_group(signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group; does nothing if it is gone."""
        if not self._is_reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def wait_group(self, s_max: float) -> bool:
        """Wait until no descendant of the ended process is left; False after `s_max`."""
        return await self._until_alone(s_max, kill=False)

    async def end_group(self, s_max: float, *, reap: bool = True) -> bool:
        """Kill and reap all descendants, then the process; False if some live after `s_max`: call
        it again. With `reap` False, `reap` is to be called after True."""
        last_s = self._loop.time() + s_max
        self.signal_group(signal.SIGKILL)
        if self._cgroup is not None and not self._is_reaped:
            rank_cgroups.kill(self._cgroup)
        # Descendants in other sessions are found only as orphans, after the process has ended.
        await asyncio.wait([self._ended], timeout=s_max)
        if not self.has_ended or not await self._until_alone(last_s - self._loop.time(), kill=True):
            return False
        if reap:
            self.reap()
        return True

    def reap(self) -> None:
        """Reap the ended process."""
        self._reap()
        self.close()
        if self._cgroup is not None:
            rank_cgroups.remove(self._cgroup)

    def output(self, bytes_max: int) -> bytes:
        """The end of this attempt's output, also of what was before it began anew. Raises
        OSError."""
        with open_regular(self.log_path) as log:  # its process may have put a pipe there
            end = log.seek(0, os.SEEK_END)
            begin = self.log_start if self.log_start <= end else 0  # the file was truncated
            log.seek(max(begin, end - bytes_max))
            data = log.read(bytes_max)
        aside = self.log_path.with_name(self.log_path.name + ASIDE)
        if len(data) < bytes_max and aside.exists():
            with open_regular(aside) as log:
                data = (log.read(HEAD_BYTES + 2 * TAIL_BYTES) + data)[-bytes_max:]
        return data

    def close(self) -> None:
        """Stop monitoring."""
        self.unfollow()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _reap(self) -> None:
        self._shim.reap(self.pid, key=self._key)
        self._is_reaped = True

    def _see_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _until_adopted(self) -> None:
        """Wait until the shim has adopted a fork: it may have been killed before."""
        deadline = self._loop.time() + ADOPTED_S_MAX
        while (
            (proc := linux.read(self.pid)) is not None
            and proc.ppid != self._shim.pid
            and self._loop.time() < deadline
        ):
            await asyncio.sleep(_POLL_S_MIN)

    async def _until_alone(self, s_max: float, *, kill: bool) -> bool:
        now_s = self._loop.time()
        deadline, unknown_deadline, pause_s = now_s + s_max, now_s + EXECVE_S_MAX, _POLL_S_MIN
        while True:
            if kill and self._cgroup is not None:
                rank_cgroups.kill(self._cgroup)
            left, unknown = self._descendants()
            now_s = self._loop.time()
            if now_s >= unknown_deadline:
                left += unknown if self._shim.contains else []
            if not left and not (unknown and now_s < unknown_deadline):
                return True
            if now_s > deadline:
                return False
            for proc in left if kill else ():
                linux.kill(proc)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)

    def _descendants(self) -> tuple[list[linux.Proc], list[linux.Proc]]:
        """(Live processes of the cgroup, session and group, and the orphans that the shim has
        adopted; other children of the shim that may be such: inside execve they have no
        environment)."""
        procs = {proc.pid: proc for proc in linux.table()}
        inside = rank_cgroups.pids(self._cgroup) if self._cgroup is not None else set[int]()
        roots, unknown = set[int](), list[linux.Proc]()
        for proc in procs.values():
            if proc.pid == self.pid:
                continue
            is_ours = self.pid in (proc.sid, proc.pgid) or proc.pid in inside
            if not is_ours and proc.ppid == self._shim.pid and proc.state not in "ZX":
                entries = linux.environ_after_execve(proc.pid)
                is_ours = entries is not None and self._is_orphan(proc.pid, entries, procs)
                if entries is None and proc.pid not in self._shim.pids.values():
                    unknown.append(proc)
            if is_ours:
                roots.add(proc.pid)
                if proc.state == "Z" and proc.ppid == self._shim.pid:
                    self._shim.reap(proc.pid)
        of_ours = linux.descendants(roots, list(procs.values()))
        return [proc for proc in of_ours if proc.state not in "ZX"], unknown

    def _is_orphan(
        self, pid: int, entries: Sequence[bytes], procs: Mapping[int, linux.Proc]
    ) -> bool:
        """Whether a child of the shim descends from this ended process: by its environment, or, if
        that does not name anyone, because no live process can have lost it to the shim. A live rank
        adopts its orphans itself, or has a cgroup."""
        if self._marker in entries:
            return True
        if (
            not self._shim.contains
            or pid in self._shim.pids.values()
            or rank_cgroups.path_of(pid) != rank_cgroups.path_of(self._shim.pid)
            or not linux.may_signal(pid)
        ):
            return False
        node = self._marker.rpartition(b":")[0] + b":"
        named = next((entry[len(node) :] for entry in entries if entry.startswith(node)), b"")
        key = named.decode("utf-8", "replace")
        if key and not key[0].isdecimal() and key != ZYGOTE:
            return False  # of a check or of the checkpoint store
        other = procs.get(self._shim.pids.get(key, 0))
        return other is None or other.state != "Z"  # else it has ended too, and looks for its own


@contextmanager
def _opened(shim: Shim, key: str, output: Output) -> Generator[BinaryIO]:
    """The file that gets the output of a process that is started, bounded by the shim."""
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with open_to_write(output.path, appends=True) as file:  # a former attempt may be hostile
        former_outputs.mark_used(file.fileno())
        shim.bound(key, output.path, output.bytes_max)
        try:
            yield file
        except OSError:
            shim.reap(key=OUTPUT + key)
            raise
