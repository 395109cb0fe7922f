"""How long a thread has waited for a core, as the kernel counts it: nobody's work, nobody's fault.

The second number of /proc/PID/schedstat. A read takes about a microsecond.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

NUM_THREADS_MAX = 4


def starved_s(pid: int) -> float:
    """Of the process's main thread, since it began; 0 where the kernel does not say."""
    try:
        return _seconds(Path(f"/proc/{pid}/schedstat").read_bytes())
    except (OSError, IndexError):
        return 0.0


class Starved:
    """Of the threads that have asked, together: where one hands over to another, one works.

    A thread that asks for the first time has not waited yet. Takes one thread at a time.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._total_s = 0.0

    def in_s(self) -> float:
        """Until now; 0 where the kernel does not say."""
        for thread, fd in list(self._fds.items()):
            try:
                now_s = _seconds(os.pread(fd, 64, 0))
            except (OSError, IndexError):
                self._drop(thread)  # it has ended; another may have its number now
                continue
            self._total_s += max(0.0, now_s - self._last_s[thread])
            self._last_s[thread] = now_s
        if threading.get_ident() not in self._fds:
            self._begin()
        return self._total_s

    def _begin(self) -> None:
        if len(self._fds) >= NUM_THREADS_MAX:
            self._drop(list(self._fds)[1])  # the first is the one that works most
        thread = threading.get_ident()
        try:
            fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._last_s[thread] = _seconds(os.pread(fd, 64, 0))
        except (OSError, IndexError):
            os.close(fd)
            return
        self._fds[thread] = fd

    def _drop(self, thread: int) -> None:
        os.close(self._fds.pop(thread))
        self._last_s.pop(thread)


def _seconds(text: bytes) -> float:
    return int(text.split()[1]) / 1e9
