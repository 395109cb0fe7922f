"""Counts OOM kills in the memory cgroups of this node's ranks."""

import threading
import weakref
from collections import deque
from pathlib import Path

from ...host.memory_cgroups import CGROUPS, folders_of

RECENT_S_MAX = 30.0
"""A kill explains an exit that is seen at most this much later. The kernel counts the kill before
it frees the memory, which takes seconds for hundreds of GB."""
_LINE = "oom_kill "


class MemoryCgroup:
    """One memory cgroup. Each kill in it explains the exit of one process only. Thread-safe."""

    def __init__(self, file: Path, count: int) -> None:
        self.file = file
        self._count = count
        self._kills_s: deque[float] = deque()
        self._counting = threading.Lock()

    def look(self, now_s: float) -> None:
        """Read the count again; if the cgroup is gone, the last count remains."""
        with self._counting:
            self._look(now_s)

    def claim(self, now_s: float) -> str:
        """Use up a recent kill and describe it; "" if there is none."""
        with self._counting:
            self._look(now_s)
            if not self._kills_s:
                return ""
            self._kills_s.popleft()
            return f"killed by the kernel's OOM killer (oom_kill {self._count} in {self.file})"

    def _look(self, now_s: float) -> None:
        count = _read(self.file)
        if count is not None:
            self._kills_s.extend([now_s] * (count - self._count))
            self._count = count
        while self._kills_s and now_s - self._kills_s[0] > RECENT_S_MAX:
            self._kills_s.popleft()


class Kills:
    """The memory cgroups of the monitored processes. Times are of any clock that never goes back.

    Source: `oom_kill` of memory.events and memory.oom_control (workers/host/memory_cgroups.py).
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._groups = weakref.WeakValueDictionary[Path, MemoryCgroup]()

    def group(self, pid: int) -> MemoryCgroup | None:
        """The cgroup of a process, monitored while the caller holds it; None: it has none."""
        for folders, is_v1 in folders_of(self._proc / str(pid), self._cgroups):
            for folder in folders:  # that of a rank may have no controller
                file = folder / ("memory.oom_control" if is_v1 else "memory.events")
                known = self._groups.get(file)
                if known is not None:
                    return known
                count = _read(file)
                if count is not None:
                    made = MemoryCgroup(file, count)
                    self._groups[file] = made
                    return made
        return None

    def look(self, now_s: float) -> None:
        """Read all counts and record the time of new kills: about 20 us a cgroup (measured)."""
        for group in list(self._groups.values()):
            group.look(now_s)


def _read(file: Path) -> int | None:
    try:
        lines = file.read_text("ascii", "replace").splitlines()
        return next((int(line[len(_LINE) :]) for line in lines if line.startswith(_LINE)), None)
    except (OSError, ValueError):
        return None
