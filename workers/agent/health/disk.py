"""The disk under the agent's folder: room, rights, and whether a write comes back."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from ....events.detected import CheckHealth
from .finding import Finding, Look, worst
from .limits import (
    DISK_EVERY_S,
    DISK_S_MAX,
    FREE_BYTES_DEGRADED,
    FREE_BYTES_UNHEALTHY,
    INODES_SHARE_DEGRADED,
    INODES_SHARE_UNHEALTHY,
    PROBE_BYTES,
    PROBE_S_DEGRADED,
)
from .steady import Ladder

_NEEDS_A_HAND = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)


class Disk:
    """A folder of the agent's. A write that hangs ends as Late: nobody knows what the disk does."""

    name = "disk"
    every_s, s_max = DISK_EVERY_S, DISK_S_MAX

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic,
                 look_at: Callable[[Path], os.statvfs_result] = os.statvfs) -> None:
        self._folder = folder
        self._probe = folder / f".unicron-probe-{os.getpid()}"
        self._clock = clock
        self._look_at = look_at
        self._bytes = Ladder(FREE_BYTES_DEGRADED, FREE_BYTES_UNHEALTHY)
        self._inodes = Ladder(INODES_SHARE_DEGRADED, INODES_SHARE_UNHEALTHY)

    def read(self) -> Look:
        """Raises OSError where the folder cannot be looked at."""
        told = self._look_at(self._folder)
        found: list[Finding] = []

        def add(health: CheckHealth, why: str, rule: str) -> None:
            if health != "healthy":
                found.append(Finding(self.name, health, f"{self._folder}: {why}", rule=rule))

        free_bytes = told.f_bavail * told.f_frsize
        add(self._bytes.level(free_bytes), f"{free_bytes / (1 << 20):.0f} MiB free", "disk-full")
        if told.f_files:  # some file systems count none
            share = told.f_favail / told.f_files
            add(self._inodes.level(share), f"{share:.1%} of inodes free", "disk-inodes")
        if told.f_flag & os.ST_RDONLY:
            add("unhealthy", "mounted read-only", "disk-read-only")
        else:
            took_s, error = self._write()
            if error is not None:
                add("unhealthy" if error.errno in _NEEDS_A_HAND else "unknown",
                    f"a write fails: {error.strerror}", "disk-write")
            elif took_s > PROBE_S_DEGRADED:
                add("degraded", f"a small write took {took_s:.0f} s", "disk-slow")
        return Look([worst(self.name, found)])

    def _write(self) -> tuple[float, OSError | None]:
        began_s = self._clock()
        try:
            fd = os.open(self._probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, bytes(PROBE_BYTES))
                os.fsync(fd)
            finally:
                os.close(fd)
                os.unlink(self._probe)
        except OSError as error:
            return 0.0, error
        return self._clock() - began_s, None
