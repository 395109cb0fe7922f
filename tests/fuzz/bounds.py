"""What must hold of a reader of hostile input: it lives, its memory and its logs are bounded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unicron.workers.host import linux

MEMORY_BYTES_MAX, LOG_BYTES_MAX = 192 << 20, 1 << 20
"""Growth of the peak of memory, and of the logs in a folder, for as many cases as a run has."""


class Bounds:
    """Of the process `pid`, and of the files below the folders `logs`."""

    def __init__(
        self,
        pid: int,
        *logs: Path,
        memory_bytes: int = MEMORY_BYTES_MAX,
        log_bytes: int = LOG_BYTES_MAX,
    ) -> None:
        self.pid, self._logs = pid, logs
        process = linux.read(pid)
        assert process is not None, f"process {pid} does not run"
        self._start = process.start_ticks
        self._forget_peak()
        self._memory_max = peak_bytes(pid) + memory_bytes
        self._log_max = log_bytes + size_of(logs)

    def _forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def check(self) -> None:
        """Raises AssertionError."""
        process = linux.read(self.pid)
        assert process is not None, "the reader has ended"
        is_it = process.start_ticks == self._start and process.state != "Z"
        assert is_it, "the reader has ended"
        if (peak := peak_bytes(self.pid)) > self._memory_max:
            self._forget_peak()  # the next case is judged by its own
        assert peak <= self._memory_max, (
            f"the reader had {peak >> 20} MB of memory, above {self._memory_max >> 20} MB"
        )
        size = size_of(self._logs)
        assert size <= self._log_max, f"the logs have {size} bytes, above {self._log_max}"


def peak_bytes(pid: int) -> int:
    """The most resident memory that the process has had."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def size_of(folders: Sequence[Path]) -> int:
    """The bytes of all files below."""
    return sum(
        os.stat(Path(where) / name).st_size
        for folder in folders
        for where, _, names in os.walk(folder)
        for name in names
    )
