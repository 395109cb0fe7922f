"""A small file system of a test's own, and what fills it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int, options: str = "") -> Iterator[Path]:
    """A tmpfs at the folder. Skips the test where none can be mounted: it takes root."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}{options}", "tmpfs", str(folder)]
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def fill(disk: Path, but_bytes: int = 0) -> Path:
    """A file that takes all room, but for so much."""
    taken = disk / "taken"
    free = os.statvfs(disk)
    left = free.f_bavail * free.f_frsize - but_bytes
    with taken.open("wb", buffering=0) as file, suppress(OSError):
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
        if not but_bytes:
            while file.write(bytes(1 << 12)):
                pass
    return taken
