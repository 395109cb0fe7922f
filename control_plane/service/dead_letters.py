"""Dead letters: what was in the intake and is no report, in two files of bounded size."""

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from ...events.decoding import from_json
from ...events.log.port import Rejected
from ...events.object_storage import reason
from ...events.private_files import write_private
from ...events.process_io import Seldom

FILE_BYTES_MAX = 4 << 20
"""Size at which the file becomes the former one, in place of the one before: so there are two."""
DATA_BYTES_MAX = 64 << 10
"""Of a longer entry only the first HEAD_BYTES are kept: it cannot be replayed."""
KEPT_BYTES_MAX = 256 << 10
"""Of what one turn rejects, so much is kept whole: a flood must not hold up the leader."""
HEAD_BYTES = 1 << 10
TEXT_CHARS_MAX = 200
LOG_S = 1.0
"""Shortest time between two lines of the log about entries that are dropped."""
_logger = structlog.get_logger("control_plane")


class Letter(Struct, frozen=True, kw_only=True):
    """An entry of the intake that is no report, as a JSON line of the file. `data` is in Base64."""

    number: int = 0
    """Its name for operators. Releases before 0.4 wrote none."""
    at: float
    """When it was rejected, in seconds since 1970."""
    why: str
    source: str
    """Whose it says it is."""
    num_bytes: int
    data: bytes

    @property
    def is_whole(self) -> bool:
        """Whether all of the entry was kept."""
        return len(self.data) == self.num_bytes


class DeadLetters:
    """Counts what the intake rejects, and keeps it in two private files, the newest at the end.
    When both are full, the older one goes. Other threads may call all methods."""

    def __init__(
        self, path: Path | None = None, count: Callable[[int], None] = lambda num: None
    ) -> None:
        """`path`: None keeps nothing. `count` is called with each number of entries."""
        self._files: tuple[Path, ...] = (
            (path.with_suffix(".1.jsonl"), path) if path is not None else ()
        )
        self._count = count
        self._seldom = Seldom(LOG_S)
        self._lock = threading.Lock()
        self._nums = [0 for _ in self._files]
        """Letters in each file."""
        self._last = 0
        """The number of the newest letter."""
        with suppress(OSError):  # a full disk, for one: then the leader goes on without them
            self._number_all()

    @property
    def num(self) -> int:
        """Letters that are kept."""
        return sum(self._nums)

    def keep(self, rejected: Sequence[Rejected]) -> None:
        """Count and keep these entries. A full disk loses them: the leader goes on."""
        if not rejected:
            return
        self._count(len(rejected))
        why_not = ""
        if self._files:
            with self._lock:
                try:
                    self._write(self._letters(rejected))
                except OSError as error:
                    why_not = reason(error)
        for entry in rejected:
            if num := self._seldom.due():
                _logger.warning(
                    "dropped a report",
                    why=entry.why[:TEXT_CHARS_MAX],
                    source=entry.source[:TEXT_CHARS_MAX],
                    num_since_last_line=num,
                    kept_in="" if why_not else str(*self._files[1:]),
                    **{"not_kept": why_not} if why_not else {},
                )

    def all(self) -> list[Letter]:
        """The letters, the oldest first."""
        with self._lock:
            return [letter for file in self._files for letter in _read(file)]

    def remove(self, numbers: Collection[int]) -> None:
        """Remove these letters. Raises OSError."""
        with self._lock:
            for place, file in enumerate(self._files):
                letters = list(_read(file))
                left = [each for each in letters if each.number not in numbers]
                if len(left) < len(letters):
                    write_private(file, b"".join(map(_line, left)))
                    self._nums[place] = len(left)

    def _letters(self, rejected: Sequence[Rejected]) -> list[Letter]:
        letters, room = list[Letter](), KEPT_BYTES_MAX
        for entry in rejected:
            self._last += 1
            is_whole = len(entry.data) <= min(DATA_BYTES_MAX, room)
            room -= len(entry.data) * is_whole
            letters.append(
                Letter(
                    number=self._last,
                    at=round(time.time(), 3),
                    why=_text(entry.why),
                    source=_text(entry.source),
                    num_bytes=entry.num_bytes or len(entry.data),
                    data=entry.data if is_whole else entry.data[:HEAD_BYTES],
                )
            )
        return letters

    def _write(self, letters: Sequence[Letter]) -> None:
        former, path = self._files[0], self._files[1]
        lines = b"".join(map(_line, letters))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if not size or size + len(lines) <= FILE_BYTES_MAX:
                if file.write(lines) < len(lines):  # the disk is full: no cut line stays behind
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._nums[1] += len(letters)
                return
        path.replace(former)
        self._nums = [self._nums[1], 0]
        self._write(letters)

    def _number_all(self) -> None:
        """Number the letters that an older release has written, and go on after the newest."""
        for place, file in enumerate(self._files):
            letters, numbered = list(_read(file)), list[Letter]()
            self._nums[place] = len(letters)
            for letter in letters:
                self._last = max(self._last + 1, letter.number)
                numbered.append(replace(letter, number=self._last))
            if numbered != letters:
                write_private(file, b"".join(map(_line, numbered)))


def _read(file: Path) -> Iterator[Letter]:
    """The letters of a file, without damaged lines. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as opened:
        lines = opened.read(2 * FILE_BYTES_MAX).splitlines()
    for line in lines:
        with suppress(msgspec.MsgspecError):
            yield from_json(line, Letter)


def _line(letter: Letter) -> bytes:
    return msgspec.json.encode(letter) + b"\n"


def _text(text: str) -> str:
    """At most TEXT_CHARS_MAX characters; msgspec encodes no lone surrogates."""
    return text[:TEXT_CHARS_MAX].encode(errors="replace").decode()
