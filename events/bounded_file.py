"""Bounds files that other processes append to: the first bytes and the last stay on the disk.

The middle is given back to the disk as a hole, so all offsets stay. A writer notices nothing, and
never waits for a reader, as it would with a pipe. Why: docs/decisions/bounded-output.md.
"""

import codecs
import errno
import io
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .file_space import free_bytes, punch
from .regular_files import open_to_write

HEAD_BYTES = 64 << 10
"""What stays of the beginning; also the unit of what is dropped, above the blocks of disks."""
BYTES_MIN = 4 << 20
"""A file may always take so much, also on a full disk."""
LOG_BYTES_MAX = 16 << 20
"""The bound of a log of Unicron's own processes."""
SIZE_BYTES_MAX = 1 << 40
"""A file with a hole that is larger begins anew: ext4 refuses a write beyond 16 TiB."""
ASIDE = ".1"
"""Suffix of the file with the head and the tail of one that began anew."""
TAIL_BYTES = 1 << 20
RATE_BYTES_PER_S = 2e9
"""No process writes faster (measured: 1.3e9 to a file in memory)."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.25
"""Shortest and longest pause between two looks at a file, FULL_PAUSE_S if the disk is nearly full:
together with RATE_BYTES_PER_S they say by how much a file may exceed its bound for a moment."""
FULL_PAUSE_S = 0.005
FREE_SHARE = 4
"""A file may take one part of so many of what is free: that leaves room also beside several."""


class Part(NamedTuple):
    """Bytes of a file from `begin` on; none: its end, `begin`, is reached."""

    begin: int
    data: bytes


def read_part(file: int, offset: int, num_bytes_max: int) -> Part:
    """The first bytes at `offset` or behind it: what was dropped is passed over, and a character of
    UTF-8 that is cut there. Raises OSError."""
    while True:
        begin = _next_data(file, offset)
        if begin < offset:
            return Part(begin, b"")
        end = _next_hole(file, begin)
        data = os.pread(file, min(num_bytes_max, end - begin), begin)
        if _next_data(file, begin) != begin:  # it was dropped meanwhile, and read as zeros
            continue
        if data and begin + len(data) == end < _next_data(file, end):
            data = data[: codecs.utf_8_decode(data, "replace")[1]]
            if not data:
                offset = end
                continue
        return Part(begin, data)


class DataReader(io.RawIOBase):
    """Reads what a regular file has: what was dropped is one line's end, and not zeros, which may
    be a TB."""

    def __init__(self, file: int) -> None:
        """`file`: open as long as this reads it."""
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase. Raises OSError."""
        part = read_part(self._file, self._at, len(buffer))
        if self._at < part.begin and part.data:
            self._at = part.begin
            buffer[:1] = b"\n"
            return 1
        buffer[: len(part.data)] = part.data
        self._at = part.begin + len(part.data)
        return len(part.data)


def _next_data(file: int, offset: int) -> int:
    """Where the file has data at `offset` or behind it; the file's end if it has none."""
    size = os.fstat(file).st_size
    if offset >= size:
        return size
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset


def allowed_bytes(place: int | Path, bytes_max: int) -> int:
    """How much files there may take of their disk: `bytes_max`, but at most a FREE_SHARE of what is
    free, and at least BYTES_MIN. Raises OSError."""
    return max(min(bytes_max, free_bytes(place) // FREE_SHARE), BYTES_MIN)


def _next_hole(file: int, begin: int) -> int:
    """Where the data at `begin` ends: at a hole, or at the file's end."""
    try:
        return os.lseek(file, begin, os.SEEK_HOLE)
    except OSError as error:
        return begin if error.errno == errno.ENXIO else os.fstat(file).st_size


class BoundedFile:
    """A regular file at `path`, which may take `allowed_bytes` of its disk. Raises OSError."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._path, self._bytes_max = path, bytes_max
        self._file = os.open(path, flags)
        self._size, self._pause_s = -1, 0.0
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        self._dropped_to = _next_data(self._file, HEAD_BYTES)

    def look(self) -> float:
        """Drop the middle if the file takes too much: half of that stays. Returns the time in
        seconds until the next look. Raises OSError."""
        size = os.fstat(self._file).st_size
        if size == self._size:
            return self._pause_s
        if size < self._dropped_to:  # somebody has emptied it
            self._dropped_to = 0
        bytes_max = allowed_bytes(self._file, self._bytes_max)
        if size - self._dropped_to > bytes_max:
            self._drop(size, (size - bytes_max // 2) // HEAD_BYTES * HEAD_BYTES)
            size = os.fstat(self._file).st_size
        room = bytes_max - (size - self._dropped_to)
        full_pause_s = max(free_bytes(self._file) / FREE_SHARE / RATE_BYTES_PER_S, FULL_PAUSE_S)
        self._size = size
        self._pause_s = min(max(room / RATE_BYTES_PER_S, PAUSE_S_MIN), full_pause_s, PAUSE_S_MAX)
        return self._pause_s

    def close(self) -> None:
        """Release the file."""
        os.close(self._file)

    def _drop(self, size: int, to: int) -> None:
        """Give the bytes from HEAD_BYTES up to `to` back to the disk."""
        if size <= SIZE_BYTES_MAX and punch(self._file, HEAD_BYTES, to - HEAD_BYTES):
            self._dropped_to = to
            return
        head = os.pread(self._file, HEAD_BYTES, 0)
        tail = os.pread(self._file, TAIL_BYTES, size - TAIL_BYTES)
        dropped = f"\n[{size - len(head) - len(tail)} bytes were dropped here]\n".encode()
        aside = self._path.with_name(self._path.name + ASIDE)
        with suppress(OSError), open_to_write(aside) as file:
            file.write(head + dropped + tail)
        os.ftruncate(self._file, 0)
        self._dropped_to = 0


class _Wanted(NamedTuple):
    path: Path
    bytes_max: int


class BoundedFiles:
    """Bounds files by a thread of its own: a disk that hangs holds up nothing else. It opens them
    by their paths, also later if they are not there yet."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, key: str, path: Path, bytes_max: int) -> None:
        """Bound a file from now on; in place of another one that has this key."""
        with self._changed:
            self._wanted[key] = _Wanted(path, bytes_max)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bounded-files", daemon=True)
            self._thread.start()

    def drop(self, key: str) -> None:
        """Bound a file for the last time. A second call does nothing."""
        with self._changed:
            if self._wanted.pop(key, None) is not None:
                self._changed.notify()

    def _run(self) -> None:
        opened: dict[_Wanted, BoundedFile] = {}
        while True:
            with self._changed:
                wanted = set(self._wanted.values())
            pause_s = PAUSE_S_MAX
            for file in {*opened, *wanted}:
                pause_s = min(pause_s, _look(opened, file))
                if file not in wanted and file in opened:
                    opened.pop(file).close()
            with self._changed:
                if wanted == set(self._wanted.values()):
                    self._changed.wait(pause_s if wanted else None)


def _look(opened: dict[_Wanted, BoundedFile], file: _Wanted) -> float:
    """Look at a file; the time until the next look, the longest if it cannot be looked at now."""
    try:
        if file not in opened:
            opened[file] = BoundedFile(*file)
        return opened[file].look()
    except OSError:
        return PAUSE_S_MAX
