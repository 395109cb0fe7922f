"""How much memory there is to take: the machine's, or what a container may have of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """Of a cgroup: its bound, what it uses, and what its pages of files are called."""

    bound: str
    used: str
    cache: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes",
             ("total_inactive_file", "total_active_file"))
_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of MemAvailable and of what each cgroup that this process is in has left.

    `proc` and `cgroups` are where Linux shows them: proc(5), and "Control Group v2" and "Memory
    Resource Controller" (v1) in the kernel's documentation.
    """
    lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return max(0, min(available_kib * 1024, *_left_bytes(proc, cgroups)))


def _left_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """Of each cgroup with a bound. In a container the path may be the host's: then the root is it.

    Pages of files count as left, as they do in MemAvailable: they go when they are in the way.
    """
    yield 1 << 62
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files, root = (_V1, cgroups / "memory") if controllers else (_V2, cgroups)
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.parts) - len(root.parts)]):
            try:
                bound = int((folder / files.bound).read_text(encoding="ascii"))
                used = int((folder / files.used).read_text(encoding="ascii"))
                stat = dict(entry.split() for entry in
                            (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):  # none of that here, or "max"
                continue
            yield bound - used + sum(int(stat.get(name, 0)) for name in files.cache)
