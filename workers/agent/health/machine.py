"""Checks the machine: disk, memory, and processes blocked in the kernel."""

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....events.records.reports import CheckHealth
from ....events.regular_files import open_to_write
from ....events.shortage import is_full
from ...host import linux
from ...host.memory_cgroups import folders_of, limit_and_free
from . import limits
from .debounce import Thresholds
from .finding import Finding, Reading, worst

_PERSISTENT = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)


class Disk:
    """The disk of a folder. If a write hangs, the call raises Late, and the disk is "unknown"."""

    name = "disk"
    s_max = limits.DISK_S_MAX

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        look_at: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._folder = folder
        self._probe = folder / f".unicron-probe-{os.getpid()}"
        self._clock = clock
        self._look_at = look_at
        self._bytes = Thresholds(limits.FREE_BYTES_DEGRADED, limits.FREE_BYTES_UNHEALTHY)
        self._inodes = Thresholds(limits.INODES_SHARE_DEGRADED, limits.INODES_SHARE_UNHEALTHY)
        self._num_soon = 0

    @property
    def every_s(self) -> float:
        """The time until the next look: short until all know that it is unhealthy, or no more."""
        return limits.DISK_AGAIN_S if self._num_soon else limits.DISK_EVERY_S

    def read(self) -> Reading:
        """Raises OSError if the folder cannot be read."""
        finding = self._finding()
        is_bad = finding.health == "unhealthy"
        self._num_soon = limits.LOOKS_BETTER_NUM if is_bad else max(self._num_soon - 1, 0)
        return Reading([finding])

    def _finding(self) -> Finding:
        stat = self._look_at(self._folder)
        findings: list[Finding] = []

        def add(health: CheckHealth, why: str, rule: str) -> None:
            if health != "healthy":
                findings.append(Finding(self.name, health, f"{self._folder}: {why}", rule=rule))

        free_bytes = stat.f_bavail * stat.f_frsize
        add(self._bytes.level(free_bytes), f"{free_bytes / (1 << 20):.0f} MiB free", "disk-full")
        if stat.f_files:  # some file systems do not count inodes
            share = stat.f_favail / stat.f_files
            add(self._inodes.level(share), f"{share:.1%} of inodes free", "disk-inodes")
        if stat.f_flag & os.ST_RDONLY:
            add("unhealthy", "mounted read-only", "disk-read-only")
        else:
            took_s, error = self._write()
            if error is not None:
                add(
                    "unhealthy" if error.errno in _PERSISTENT else "unknown",
                    f"a write fails: {error.strerror}",
                    "disk-full" if is_full(error) else "disk-write",
                )
            elif took_s > limits.PROBE_S_DEGRADED:
                add("degraded", f"a small write took {took_s:.0f} s", "disk-slow")
        return worst(self.name, findings)

    def _write(self) -> tuple[float, OSError | None]:
        began_s = self._clock()
        try:
            try:
                with open_to_write(self._probe) as probe:
                    probe.write(bytes(limits.PROBE_BYTES))
                    probe.flush()
                    os.fsync(probe.fileno())
            finally:
                self._probe.unlink(missing_ok=True)
        except OSError as error:
            return 0.0, error
        return self._clock() - began_s, None


# --- Memory of the machine or the container: available memory and pressure. ---

_FULL = re.compile(r"^full avg10=([0-9.]+)", re.MULTILINE)


class Memory:
    """Available memory and memory pressure. `root` contains `proc` and `sys`."""

    name = "memory"
    every_s, s_max = limits.MEMORY_EVERY_S, limits.MEMORY_S_MAX

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._machine = Thresholds(limits.AVAILABLE_SHARE_DEGRADED)
        self._container = Thresholds(limits.AVAILABLE_SHARE_DEGRADED)
        # The percentage of time without a stall: lower is worse.
        self._running = Thresholds(100.0 - limits.STALLED_PERCENT_DEGRADED, back_ratio=1.1)

    def read(self) -> Reading:
        """Raises OSError, LookupError, ValueError if /proc is not as on Linux."""
        found: list[Finding] = []
        memory = _fields(self._root / "proc/meminfo")
        share = memory["MemAvailable"] / memory["MemTotal"]
        if self._machine.level(share) != "healthy":
            found.append(
                Finding(
                    self.name, "degraded", f"{share:.1%} of memory is available", rule="memory-low"
                )
            )
        left = self._of_container()
        if left is not None and self._container.level(left) != "healthy":
            found.append(
                Finding(
                    self.name,
                    "degraded",
                    f"{left:.1%} of the container's memory is left",
                    rule="memory-container-low",
                )
            )
        stalled = self._stalled_percent()
        if stalled is not None and self._running.level(100.0 - stalled) != "healthy":
            found.append(
                Finding(
                    self.name,
                    "degraded",
                    f"all processes stalled on memory for {stalled:.0f} % of 10 s",
                    rule="memory-pressure",
                )
            )
        return Reading([worst(self.name, found)])

    def _stalled_percent(self) -> float | None:
        try:
            found = _FULL.search((self._root / "proc/pressure/memory").read_text("ascii"))
        except OSError:  # a kernel without CONFIG_PSI, or one started with psi=0
            return None
        return None if found is None else float(found[1])

    def _of_container(self) -> float | None:
        """The free share (with page cache) of our container's limit; None without a limit."""
        for folders, is_v1 in folders_of(self._root / "proc/self", self._root / "sys/fs/cgroup"):
            for folder in (folders[0], folders[-1]):
                found = limit_and_free(folder, ("inactive_file",), is_v1=is_v1)
                if found is not None and found[0] < 1 << 60:  # "no limit" in cgroup v1
                    return found[1] / max(found[0], 1)
        return None


def _fields(path: Path) -> dict[str, int]:
    """Parse lines `Name: 12 kB` or `name 12`; units are ignored."""
    found: dict[str, int] = {}
    for line in path.read_text("ascii").splitlines():
        name, value, *_ = [*line.replace(":", " ").split(), "", ""]
        if value.isdecimal():
            found[name] = int(value)
    return found


# --- Processes blocked in the kernel (long in state D without running): they cannot be killed. ---

_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_KTHREADD_NUM = 2
"""The pid of kthreadd. Its children are kernel threads, and some are always in state D."""


class _Waits(NamedTuple):
    start_ticks: int
    num_switches: int
    since_s: float


class BlockedProcesses:
    """Checks each process's main thread. `mark` begins an environment entry of our processes."""

    name = "processes"
    every_s, s_max = limits.BLOCKED_EVERY_S, limits.BLOCKED_S_MAX

    def __init__(
        self,
        mark: bytes,
        clock: Callable[[], float] = time.monotonic,
        table: Callable[[], list[linux.Proc]] = linux.table,
        proc: Path = Path("/proc"),
    ) -> None:
        self._mark = mark
        self._clock = clock
        self._table = table
        self._proc = proc
        self._waits: dict[int, _Waits] = {}

    def read(self) -> Reading:
        """Name the longest wait (at least BLOCKED_S), our processes first; count the others."""
        now_s = self._clock()
        waits: dict[int, _Waits] = {}
        for proc in self._table():
            if proc.state != "D" or proc.ppid == _KTHREADD_NUM:
                continue
            # Context switches grow while a process reads a slow disk: it is not blocked.
            switches = sum(map(int, _SWITCHES.findall(self._text(proc.pid, "status"))))
            before = self._waits.get(proc.pid)
            same = before is not None and before[:2] == (proc.start_ticks, switches)
            waits[proc.pid] = (
                before if before is not None and same else _Waits(proc.start_ticks, switches, now_s)
            )
        self._waits = waits
        stuck = sorted(
            (one.since_s, pid)
            for pid, one in waits.items()
            if now_s - one.since_s >= limits.BLOCKED_S
        )
        if not stuck:
            return Reading([Finding(self.name, "healthy")])
        ours = [
            one
            for one in stuck
            if any(entry.startswith(self._mark) for entry in linux.environ(one[1]))
        ]
        since_s, pid = (ours or stuck)[0]
        where = self._text(pid, "wchan") or "?"
        more = f", and {len(stuck) - 1} others" if len(stuck) > 1 else ""
        why = (
            f"{self._text(pid, 'comm') or '?'} (pid {pid}{', ours' if ours else ''}) cannot be "
            f"killed: in {where} for {now_s - since_s:.0f} s{more}"
        )
        # No debouncing: BLOCKED_S already spans several readings.
        return Reading([Finding(self.name, "degraded", why, rule="process-blocked", is_fact=True)])

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_text("utf-8", "replace").strip()
        except OSError:
            return ""
