"""CPU wait: how long a thread has waited for a core, the second number of /proc/PID/schedstat."""

import os
import threading
from pathlib import Path

NUM_THREADS_MAX = 4


def cpu_wait_s(pid: int) -> float:
    """CPU wait of the process's main thread since its start; 0 if the kernel does not report it."""
    try:
        return _seconds(Path(f"/proc/{pid}/schedstat").read_bytes())
    except (OSError, IndexError):
        return 0.0


class CpuWait:
    """The sum of the CPU waits of all threads that call `in_s`, each from its first call on. Call
    it from one thread at a time; only one of them works at a time. A read takes about a
    microsecond."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._last_s: dict[int, float] = {}
        self._total_s = 0.0

    def in_s(self) -> float:
        """CPU wait so far; 0 if the kernel does not report it."""
        for thread, fd in list(self._fds.items()):
            try:
                now_s = _seconds(os.pread(fd, 64, 0))
            except (OSError, IndexError):
                self._drop(thread)  # the thread has ended; its number may be reused
                continue
            self._total_s += max(0.0, now_s - self._last_s[thread])
            self._last_s[thread] = now_s
        if threading.get_ident() not in self._fds:
            self._begin()
        return self._total_s

    def _begin(self) -> None:
        if len(self._fds) >= NUM_THREADS_MAX:
            self._drop(list(self._fds)[1])  # not the first thread, which works most
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
