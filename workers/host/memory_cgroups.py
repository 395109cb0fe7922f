"""The memory cgroups of a process: their folders, their limits and what is free in them.

Source: "Control Group v2" and "Memory Resource Controller" (v1) in the kernel's documentation.
"""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def folders_of(process: Path, cgroups: Path = CGROUPS) -> Iterator[tuple[list[Path], bool]]:
    """Yield the cgroup of a process (its folder in /proc), then those around it up to the root; and
    whether it is of cgroup v1. In a container the path may be the host's: then only the root is
    there."""
    try:
        lines = (process / "cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "memory" in controllers.split(","):
            root = cgroups / "memory" if controllers else cgroups
            own = root / path.lstrip("/")
            yield ([own, *own.parents[: len(own.parts) - len(root.parts)]], bool(controllers))


def limit_and_free(folder: Path, cache: tuple[str, ...], *, is_v1: bool) -> tuple[int, int] | None:
    """The limit of a cgroup and what is free in it, in bytes; None without a limit. `cache`: keys
    of memory.stat. This part of the page cache counts as free, since the kernel can drop it."""
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if is_v1
        else ("memory.max", "memory.current")
    )
    try:
        bytes_max = int((folder / limit).read_text("ascii"))
        stat = dict(
            entry.split() for entry in (folder / "memory.stat").read_text("ascii").splitlines()
        )
        cached = sum(int(stat.get(f"{'total_' * is_v1}{key}", 0)) for key in cache)
        return bytes_max, bytes_max - int((folder / used).read_text("ascii")) + cached
    except (OSError, ValueError):  # no such file, or "max"
        return None
