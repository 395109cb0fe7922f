"""Reads from /proc what a stalled process does, in any state of the process.

Nothing is sent to the process or injected into it: one that holds its GIL, or is stopped by a
debugger, could not answer.
"""

import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...host import linux, tcp_traffic
from ...host.cpu_wait import cpu_wait_s

_TICKS_HZ = os.sysconf("SC_CLK_TCK")
COMPUTES_SHARE = 0.5
"""A process computes if it has used this share of the available core time since the first look."""
_SYSCALLS = {
    0: "read",
    1: "write",
    7: "poll",
    23: "select",
    35: "nanosleep",
    45: "recvfrom",
    61: "wait4",
    74: "fsync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    271: "ppoll",
    281: "epoll_pwait",
}
"""Waiting syscalls of x86-64 (numbers differ between architectures)."""
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "Z": "ended"}


class ProcessState(NamedTuple):
    """A process at one moment. `cpu_s`: CPU time of all threads. `starved_s`: how long its main
    thread has waited for a core (0 if the kernel does not report it)."""

    at_s: float
    state: str
    cpu_s: float
    starved_s: float


def look(pid: int) -> ProcessState | None:
    """The state of the process now; None if it is gone. About 30 us."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_HZ
    return ProcessState(time.monotonic(), fields[0], cpu_s, cpu_wait_s(pid))


def starved_s(pid: int, before: ProcessState | None) -> float:
    """How long the process has waited for a core since `before`; 0 if unknown."""
    now = look(pid) if before is not None else None
    return now.starved_s - before.starved_s if now and before else 0.0


def describe(pid: int, before: ProcessState | None) -> str:
    """Describe in words what the process does, its CPU use since `before`; "" if unknown."""
    now = look(pid)
    if now is None:
        return ""
    if now.state in _STATES:
        return _STATES[now.state]
    if now.state == "D":
        return f"waits for a device (state D){_inside(pid)}"
    if before is not None:
        span_s = now.at_s - before.at_s - (now.starved_s - before.starved_s)
        share = (now.cpu_s - before.cpu_s) / max(span_s, 2 / _TICKS_HZ)
        if share >= COMPUTES_SHARE:
            return f"computes: {share:.1f} cores"
    return f"runs{_inside(pid)}" if now.state == "R" else f"sleeps{_inside(pid)}"


MOVED_BYTES_MIN = 1 << 20
"""A process that loads or saves reads or writes at least this much within its limit. What monitors
and logs in the same process move is far less."""
_MOVED = ("rchar", "wchar", "read_bytes")
"""What counts of /proc/PID/io: what a process reads from memory-mapped files is in the last alone.
"""
FLOW_EVERY_S = 0.5
"""Time between two looks at what a process has read and written: they read many files of /proc."""


class DataFlow:
    """Whether a process and its descendants read or write. DataLoader's workers are descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: tuple[int, float] | None = None
        """What they had read and written at a time."""
        self._looked_s = 0.0
        self.moved_s = 0.0
        """When they were last seen to have read or written enough; 0: never."""
        self.started_s = 0.0
        """When the newest of its descendants was started, by the last look."""

    def look(self, now_s: float, within_s: float) -> bool:
        """Whether they have read or written MOVED_BYTES_MIN since the last such look, within
        `within_s`."""
        if self._since is not None and now_s < self._looked_s + FLOW_EVERY_S:
            return False
        procs = linux.family(self._pid)
        self._looked_s, moved = now_s, moved_bytes(procs)
        self.started_s = newest_start_s(procs[1:])
        before, since_s = self._since or (moved, now_s)
        before = min(before, moved)  # what closed connections have carried is no longer told
        has_moved = moved >= before + MOVED_BYTES_MIN
        if has_moved:
            self.moved_s = now_s
        if self._since is None or has_moved or now_s > since_s + within_s:
            self._since = moved, now_s
        else:
            self._since = before, since_s
        return has_moved


def moved_bytes(procs: Iterable[linux.Proc]) -> int:
    """What these processes have read and written so far, in bytes, by system calls, by mapped files
    and by their connections; those of which /proc does not tell are left out."""
    num_bytes, sockets = 0, set[int]()
    for proc in procs:
        with suppress(OSError, ValueError):
            lines = Path(f"/proc/{proc.pid}/io").read_text(encoding="ascii").splitlines()
            told = dict(line.split(": ") for line in lines)
            num_bytes += sum(int(told[name]) for name in _MOVED)
        sockets |= tcp_traffic.sockets_of(proc.pid)
    return num_bytes + tcp_traffic.carried_bytes(sockets)


def used_cpu_s(procs: Iterable[linux.Proc]) -> float:
    """The CPU time of these processes so far."""
    states = (look(proc.pid) for proc in procs)
    return sum(state.cpu_s for state in states if state is not None)


def newest_start_s(procs: Sequence[linux.Proc]) -> float:
    """When the newest of these processes was started, on the monotonic clock; 0: there is none."""
    slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    newest = max((proc.start_ticks for proc in procs), default=0)
    return newest / _TICKS_HZ - slept_s if newest else 0.0


def _inside(pid: int) -> str:
    """Where in the kernel the main thread waits; "" without permission to read this."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip()
    except OSError:
        place = ""
    if place in ("", "0"):
        place = _syscall(pid)
    return f" in {place}" if place else ""


def _syscall(pid: int) -> str:
    try:
        first = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return ""
    if not first.isdigit() or os.uname().machine != "x86_64":
        return ""
    return _SYSCALLS.get(int(first), f"system call {first}")


# --- TCP connections on which what the process has sent is not acknowledged ---
PEERS_NUM_MAX = 16


def silent_peers(pid: int) -> tuple[str, ...]:
    """The addresses that did not acknowledge what was sent twice; empty if /proc does not tell."""
    found, own = set[str](), set[str]()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, _, peer, _, queues, _, retries, _, _, inode = line.split()[:10]
                # While this host's own interface is down, the retries stay at 1.
                if (
                    f"socket:[{inode}]" in own
                    and int(retries, 16)
                    and (int(queues.partition(":")[0], 16))
                ):
                    found.add(_address(peer.partition(":")[0]))
    except (OSError, ValueError):  # the process has ended
        return ()
    return tuple(sorted(found)[:PEERS_NUM_MAX])


def _address(text: str) -> str:
    """The address of its hex digits: words of four bytes, each in the machine's order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")
