"""Space of files on their disk: how much is free, room beyond the end of a file, holes in it."""

import ctypes
import errno
import os
from pathlib import Path

_KEEP_SIZE_CODE, _PUNCH_HOLE_CODE = 1, 2
"""Of linux/falloc.h."""
_libc = ctypes.CDLL(None, use_errno=True)


def free_bytes(place: int | Path) -> int:
    """Room for this user on the file system of a folder or an open file. Raises OSError."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


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
