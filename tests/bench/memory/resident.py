"""Samples the resident memory of processes, and keeps the peak of each in a phase."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

SAMPLE_S = 0.01
KIB_BYTES = 1024


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process that is resident; 0 if the process has ended.

    Files are left out, since the pages of libraries are shared. Source: proc(5), /proc/PID/status.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = dict(line.split(":", 1) for line in text.splitlines())
    return KIB_BYTES * sum(
        int(found[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in found
    )


class Sampler:
    """Samples every SAMPLE_S in a thread. Use it as a context."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def watch(self, pids: Collection[int]) -> None:
        """Sample these processes too."""
        with self._lock:
            for pid in pids:
                self._peaks.setdefault(pid, 0)

    def peaks(self) -> dict[int, int]:
        """The peak of each process, in bytes, since the last call; a new phase begins."""
        with self._lock:
            found = dict(self._peaks)
            self._peaks = {pid: resident_bytes(pid) for pid in found}
        return found

    def _run(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            with self._lock:
                pids = list(self._peaks)
            for pid in pids:
                now_bytes = resident_bytes(pid)
                with self._lock:
                    self._peaks[pid] = max(self._peaks[pid], now_bytes)
