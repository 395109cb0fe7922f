"""Opens files that others may have made: regular ones only, and so many bytes.

A pipe without a writer blocks whoever opens it, a device such as /dev/zero has no end, and a link
leads anywhere.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follow: bool = True, uid: int | None = None) -> BufferedReader:
    """Open a regular file to read it. `follow`: also through a link as its last part; `uid`: only a
    file of this user. Raises OSError, which names the file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.EINVAL, "a symbolic link", str(path)) from None
        raise
    opened = os.fstat(descriptor)
    if stat.S_ISREG(opened.st_mode) and uid in (None, opened.st_uid):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(opened.st_mode):
        raise OSError(errno.EPERM, f"belongs to user {opened.st_uid}", str(path))
    if stat.S_ISDIR(opened.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a fifo, not a regular file" if stat.S_ISFIFO(opened.st_mode) else "not a regular file"
    raise OSError(errno.EINVAL, kind, str(path))


def read_regular(
    path: Path, bytes_max: int, *, follow: bool = True, uid: int | None = None
) -> bytes:
    """All bytes of a regular file. Raises OSError, also if it has more than `bytes_max`."""
    with open_regular(path, follow=follow, uid=uid) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
    return data
