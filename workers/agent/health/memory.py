"""Memory of the machine, or of the container: how much is left, and who waits for it."""

from __future__ import annotations

import re
from pathlib import Path

from .finding import Finding, Look, worst
from .limits import (
    AVAILABLE_SHARE_DEGRADED,
    MEMORY_EVERY_S,
    MEMORY_S_MAX,
    STALLED_PERCENT_DEGRADED,
)
from .steady import Ladder

_FULL = re.compile(r"^full avg10=([0-9.]+)", re.MULTILINE)


class Memory:
    """`root` holds `proc` and `sys`: the machine's, or a test's."""

    name = "memory"
    every_s, s_max = MEMORY_EVERY_S, MEMORY_S_MAX

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._machine = Ladder(AVAILABLE_SHARE_DEGRADED)
        self._container = Ladder(AVAILABLE_SHARE_DEGRADED)
        # Of 100 % of the time, so much was not lost.
        self._calm = Ladder(100.0 - STALLED_PERCENT_DEGRADED, back_ratio=1.1)

    def read(self) -> Look:
        """Raises OSError, LookupError, ValueError where /proc is not as Linux has it."""
        found: list[Finding] = []
        of = _fields(self._root / "proc/meminfo")
        share = of["MemAvailable"] / of["MemTotal"]
        if self._machine.level(share) != "healthy":
            found.append(Finding(self.name, "degraded", f"{share:.1%} of memory is available",
                                 rule="memory-low"))
        left = self._of_container()
        if left is not None and self._container.level(left) != "healthy":
            found.append(Finding(self.name, "degraded",
                                 f"{left:.1%} of the container's memory is left",
                                 rule="memory-container-low"))
        stalled = self._stalled_percent()
        if stalled is not None and self._calm.level(100.0 - stalled) != "healthy":
            found.append(Finding(self.name, "degraded",
                                 f"everything waited for memory {stalled:.0f} % of 10 s",
                                 rule="memory-pressure"))
        return Look([worst(self.name, found)])

    def _stalled_percent(self) -> float | None:
        try:
            found = _FULL.search((self._root / "proc/pressure/memory").read_text("ascii"))
        except OSError:  # a kernel without CONFIG_PSI, or one started with psi=0
            return None
        return None if found is None else float(found[1])

    def _of_container(self) -> float | None:
        """The share of our own limit that is left; None without a limit. Page cache is free."""
        for limit, used, stat, cache in (
                ("memory.max", "memory.current", "memory.stat", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat",
                 "total_inactive_file")):
            for folder in self._folders("" if limit == "memory.max" else "memory"):
                try:
                    told = (folder / limit).read_text("ascii").strip()
                    if told == "max" or int(told) >= 1 << 60:  # the old hierarchy's "no limit"
                        continue
                    in_use = int((folder / used).read_text("ascii"))
                    in_use -= _fields(folder / stat).get(cache, 0)
                except OSError:
                    continue
                return 1.0 - in_use / max(int(told), 1)
        return None

    def _folders(self, controller: str) -> list[Path]:
        """Where our group is: seen from the machine, and from within a container."""
        top = self._root / "sys/fs/cgroup" / controller
        folders = [top]
        try:
            lines = (self._root / "proc/self/cgroup").read_text("utf-8").splitlines()
        except OSError:
            return folders
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == controller and path != "/":
                folders.insert(0, top / path.lstrip("/"))
        return folders


def _fields(path: Path) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` a line; numbers as they stand."""
    found: dict[str, int] = {}
    for line in path.read_text("ascii").splitlines():
        name, value, *_ = [*line.replace(":", " ").split(), "", ""]
        if value.isdecimal():
            found[name] = int(value)
    return found
