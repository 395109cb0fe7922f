"""Space of files on their disk: what is free, room beyond the end of a file, holes in it."""

from __future__ import annotations

import ctypes
import errno
import math
import os
from pathlib import Path
from typing import NamedTuple

from .words import files_in_words

_KEEP_SIZE_CODE, _PUNCH_HOLE_CODE = 1, 2
"""Of linux/falloc.h."""
_libc = ctypes.CDLL(None, use_errno=True)


class Room(NamedTuple):
    """What is free for this user on a file system, or the least that has to be."""

    num_bytes: int
    num_files: float = math.inf
    """How many files can be made; infinite: it has no such limit (btrfs)."""

    def is_below(self, least: Room) -> bool:
        """Whether it has less of bytes or of files."""
        return self.num_bytes < least.num_bytes or self.num_files < least.num_files

    def in_words(self, least: Room) -> str:
        """`12 MiB free`, or `room for 3 files` where only these are fewer than `least`."""
        if self.num_bytes >= least.num_bytes and self.num_files < least.num_files:
            return files_in_words(int(self.num_files))
        return f"{self.num_bytes >> 20} MiB free"


def room(place: int | Path) -> Room:
    """On the file system of a folder or an open file. Raises OSError."""
    disk = os.statvfs(place)
    num_files = disk.f_favail if disk.f_files else math.inf
    return Room(disk.f_bavail * disk.f_frsize, num_files)


def free_bytes(place: int | Path) -> int:
    """Room for this user on the file system of a folder or an open file. Raises OSError."""
    return room(place).num_bytes


def allocate(file: int, offset: int, num_bytes: int) -> None:
    """Reserve room from `offset` on, also beyond the end of the file, whose size stays. Raises
    OSError."""
    _fallocate(file, _KEEP_SIZE_CODE, offset, num_bytes)


def punch(file: int, offset: int, num_bytes: int) -> bool:
    """Give bytes back to the disk, which are read as zeros then; all offsets stay. False: it takes
    none back, for some file systems have no holes (NFS before 4.2)."""
    try:
        _fallocate(file, _KEEP_SIZE_CODE | _PUNCH_HOLE_CODE, offset, num_bytes)
    except OSError:
        return False
    return True


def _fallocate(file: int, code: int, offset: int, num_bytes: int) -> None:
    call = getattr(_libc, "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, "fallocate is of Linux")
    if call(file, code, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
