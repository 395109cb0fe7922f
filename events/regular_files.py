"""Opens files that others may have made: regular ones only, and so many bytes.

A pipe without another end blocks whoever opens it, a device such as /dev/zero has no end, and a
link leads anywhere.
"""

import errno
import os
import stat
from io import BufferedReader, BufferedWriter
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


def open_to_write(path: Path, *, appends: bool = False) -> BufferedWriter:
    """Open a regular file to write it, from its beginning or, with `appends`, behind its end; make
    it if there is none. A pipe, link or device in its place is removed. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_APPEND if appends else os.O_TRUNC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise
        descriptor = -1
    if descriptor >= 0 and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        descriptor = -1
    if descriptor < 0:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, flags | os.O_EXCL, 0o666)
    os.set_blocking(descriptor, True)  # a process may inherit it
    return os.fdopen(descriptor, "ab" if appends else "wb")
