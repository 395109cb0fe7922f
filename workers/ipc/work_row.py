"""The work row of a progress page: what a rank does for which its task waits, and how much is done.

A restart reads, receives or builds a state of any size: nothing but its progress says that it goes
on. The rank writes the row after each part, in a microsecond; its agent reads it at any time.

Layout: two places, written in turn, so that one is always complete. A complete row begins and ends
with the same number, which grows by one with each write.
"""

import mmap
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .violation import Violation

BYTES = 512
COMPILES = "compiles"
"""What a rank does whose torch.compile compiles: that has no usual time, also in an iteration."""
_PLACE_BYTES = 256
_ROW = struct.Struct("<Q80s16sQQBQ")
_NUMBER = struct.Struct("<Q")
_DONE_NUM_MAX = 1 << 62
assert 2 * _PLACE_BYTES <= BYTES
assert _ROW.size <= _PLACE_BYTES


class WorkRow(NamedTuple):
    """How much of `what` is done; "": nothing that lasts. `num` changes with each write. `unit`: B
    for bytes, or a noun in the plural; "": nothing is counted. `total` 0: unknown. `is_storage`: it
    reads or writes a checkpoint."""

    num: int
    what: str
    unit: str
    done: int
    total: int
    is_storage: bool


_NOTHING = WorkRow(0, "", "", 0, 0, False)


class RowWriter:
    """The rank's side, at `begin` of a page that it has mapped."""

    def __init__(self, page: mmap.mmap, begin: int) -> None:
        self._page, self._begin = page, begin

    def write(self, what: str, unit: str, done: int, total: int, is_storage: bool) -> None:
        places = (self._begin, self._begin + _PLACE_BYTES)
        num = 1 + max(_NUMBER.unpack_from(self._page, at)[0] for at in places)
        at = self._begin + (num & 1) * _PLACE_BYTES
        texts = what.encode(), unit.encode()
        _ROW.pack_into(self._page, at, num, *texts, done, total, is_storage, num)


def read(data: bytes, again: bytes) -> WorkRow | None:
    """The newest complete row of two copies of the part; None: there is none yet. Raises
    Violation."""
    newest: tuple[Any, ...] = (0,)
    for at in (0, _PLACE_BYTES):
        part = data[at : at + _ROW.size]
        if part == again[at : at + _ROW.size]:
            fields = _ROW.unpack(part)
            if fields[0] == fields[-1] and fields[0] > newest[0]:
                newest = fields
    if not newest[0]:
        return None
    num, what, unit, done, total, is_storage, _ = newest
    if max(done, total) > _DONE_NUM_MAX:
        raise Violation(f"work of {max(done, total)}")
    return WorkRow(num, _text(what), _text(unit), done, total, bool(is_storage))


def _text(data: bytes) -> str:
    text = data.rstrip(b"\0").decode("ascii", "replace")
    return "".join(char if char.isprintable() else " " for char in text)


class WorkCount:
    """Counts what this process does of something that may last. Any thread may call `add`.

    `goes_on` is asked at each part: if it says no, `add` raises RuntimeError, since whoever waits
    for the work waits no longer."""

    def __init__(
        self, row: RowWriter | None = None, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        self._row, self._goes_on = row, goes_on
        self._lock = threading.Lock()
        self._now = _NOTHING

    @contextmanager
    def of(
        self, what: str, total: int = 0, unit: str = "B", *, is_storage: bool = False
    ) -> Generator[None]:
        """Within the context `add` counts this. The fields are as in WorkRow."""
        before = self._now
        self._set(WorkRow(0, what, unit, 0, total, is_storage))
        try:
            yield
        finally:
            self._set(before)

    def add(self, num: int) -> None:
        """So much more is done. Raises RuntimeError."""
        with self._lock:
            self._now = self._now._replace(done=self._now.done + num)
            self._write()
        if not self._goes_on():
            raise RuntimeError("interrupted while it moved its state")

    def _set(self, now: WorkRow) -> None:
        with self._lock:
            self._now = now
            self._write()

    def _write(self) -> None:
        if self._row is not None:
            self._row.write(*self._now[1:])


UNCOUNTED = WorkCount()
"""For what nobody waits for under a limit."""
