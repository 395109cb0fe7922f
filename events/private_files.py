"""Files that hold secrets: only their owner may read them."""

import os
import stat
import tempfile
from pathlib import Path

from .errors import UsageError

FILE_BYTES_MAX = 16 << 20


def write_private(path: Path, data: bytes, *, replaces: bool = True) -> None:
    """Write the file atomically, with mode 0600, under a name that nobody can foresee first. Raises
    OSError, without `replaces` FileExistsError if there is one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # O_EXCL, 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if replaces:
            Path(name).replace(path)
        else:
            os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def read_private(path: Path) -> bytes:
    """The content of a file that only this user may read or change. Raises UsageError if others
    may, if it is another user's, or no file; OSError."""
    # a fifo would block without O_NONBLOCK
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is not a file", "use a folder of yours: --state")
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}: "
                "its owner knows what it holds",
                "start as that user, or remove the file and use new secrets",
            )
        if mode := stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: others may "
                f"{'read' if mode & 0o044 else 'change'} it",
                f"chmod 600 {path}, or remove it if others may have read it",
            )
        return file.read(FILE_BYTES_MAX)
