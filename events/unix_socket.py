"""Addresses of unix sockets whose path may be longer than the operating system allows."""

import functools
import os
from pathlib import Path

PATH_BYTES_MAX = 103
"""The longest path of a socket: 107 bytes on Linux, 103 on macOS."""


def address(path: str) -> str:
    """A name of the socket `path` that fits into a socket address: a long path goes through a
    descriptor of its folder, on Linux. Raises OSError if the folder cannot be opened. Where there
    is no /proc, the caller's `connect` or `bind` refuses a long path."""
    if len(os.fsencode(path)) <= PATH_BYTES_MAX or not Path("/proc/self/fd").exists():
        return path
    folder, name = os.path.split(path)
    return f"/proc/self/fd/{_folder(folder)}/{name}"


@functools.lru_cache
def _folder(path: str) -> int:
    """A descriptor of the folder, open as long as this process: it may connect again."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
