"""Room on the disk that is kept for the log: its server goes on when all other room is taken.

The room is beyond the end of the server's newest file (fallocate): nobody else can take it, and a
write into it does not fail. Beside it is a file of zeros, which is given up when a process cannot
be started for want of room. A file system without fallocate has the file only.
"""

import os
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError
from ..file_space import Room, allocate, free_bytes
from . import append_only_file

LOG_BYTES = 16 << 20
"""Beyond the end of the server's file. Two idle nodes write 4.6 MB an hour (measured)."""
FILE_BYTES = 8 << 20
"""Of the file. To start the server, a control plane and two agents takes 0.1 MB (measured)."""
ROOM_MIN = Room(32 << 20, 128)
"""With less beside the reserve, no process of a rank is started: what is left is for those that
run. A cluster with one task has 37 files (measured)."""
ROOM_BACK = Room(ROOM_MIN.num_bytes + (ROOM_MIN.num_bytes >> 2), 160)
"""Then there is room again: hysteresis, so that it does not change with each file."""
MARGIN_BYTES = 1 << 20
"""Of the last room this much is left for the small files of a start."""
STEP_BYTES = 1 << 20
"""Less is not reserved by itself, so that one call in minutes is enough."""
FILE = "reserve"


class Reserve:
    """The reserve of a state folder. No method raises: without room, there is no reserve."""

    def __init__(self, folder: Path, server: Path) -> None:
        """`server`: the folder of the embedded server."""
        self._file, self._server = folder / FILE, server
        self._folder = folder

    def keep(self) -> None:
        """Reserve what is missing, as far as there is room."""
        with suppress(OSError, UsageError):
            extend(self._server)
        with suppress(OSError):
            has = self._file.exists() and self._file.stat().st_size == FILE_BYTES
            if not has and free_bytes(self._folder) > FILE_BYTES + ROOM_BACK.num_bytes:
                self._make()

    def give_up(self) -> bool:
        """Remove the file; whether that has made room."""
        with suppress(OSError):
            self._file.unlink()
            return True
        return False

    def _make(self) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
        except OSError:
            self.give_up()
            raise
        finally:
            os.close(descriptor)


def extend(server: Path) -> None:
    """Reserve room beyond the end of the file to which the server appends. Raises OSError,
    UsageError."""
    newest = append_only_file.files(server)[-1:]
    for path in newest:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            stat = os.fstat(descriptor)
            room_bytes = min(_reserved_bytes(stat) + free_bytes(server) - MARGIN_BYTES, LOG_BYTES)
            if room_bytes - _reserved_bytes(stat) >= STEP_BYTES:
                allocate(descriptor, stat.st_size, room_bytes)
        finally:
            os.close(descriptor)


def release(server: Path, *, newest_too: bool = False) -> None:
    """Free what was reserved in former files of a server that does not run. Raises OSError,
    UsageError."""
    for path in append_only_file.files(server)[: None if newest_too else -1]:
        stat = path.stat()
        if _reserved_bytes(stat) > 0:
            os.truncate(path, stat.st_size)


def _reserved_bytes(stat: os.stat_result) -> int:
    return stat.st_blocks * 512 - stat.st_size
