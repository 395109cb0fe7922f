"""Dead letters: what was in the intake and is no report, in a file of bounded size."""

import base64
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from ...events.log.port import Rejected
from ...events.process_io import Seldom

FILE_BYTES_MAX = 1 << 20
"""Size at which the file becomes the former one, in place of the one before: so there are two."""
DATA_BYTES_MAX = 1 << 10
"""How much of one entry is kept."""
TEXT_CHARS_MAX = 200
LOG_S = 1.0
"""Shortest time between two lines of the log about entries that are dropped."""
_logger = structlog.get_logger("control_plane")


class DeadLetters:
    """Counts what the intake rejects, and keeps it in a private file of JSON lines: `at` in seconds
    since 1970, `why`, `source`, `num_bytes`, and `data`, the first bytes in Base64."""

    def __init__(
        self, path: Path | None = None, count: Callable[[int], None] = lambda num: None
    ) -> None:
        """`path`: None keeps nothing. `count` is called with each number of entries."""
        self._path, self._count = path, count
        self._seldom = Seldom(LOG_S)

    def keep(self, rejected: Sequence[Rejected]) -> None:
        """Count and keep these entries. A full disk loses them: the leader goes on."""
        if not rejected:
            return
        self._count(len(rejected))
        for one in rejected:
            if num := self._seldom.due():
                _logger.warning(
                    "dropped a report",
                    why=one.why[:TEXT_CHARS_MAX],
                    source=one.source[:TEXT_CHARS_MAX],
                    num_since_last_line=num,
                    kept_in=str(self._path or ""),
                )
        if self._path is not None:
            with suppress(OSError):
                self._write(self._path, b"".join(map(_line, rejected)))

    def _write(self, path: Path, lines: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            size = file.seek(0, os.SEEK_END)
            if not size or size + len(lines) <= FILE_BYTES_MAX:
                file.write(lines)
                return
        path.replace(path.with_suffix(".1.jsonl"))
        self._write(path, lines)


def _line(one: Rejected) -> bytes:
    return (
        json.dumps(
            {
                "at": round(time.time(), 3),
                "why": one.why[:TEXT_CHARS_MAX],
                "source": one.source[:TEXT_CHARS_MAX],
                "num_bytes": len(one.data),
                "data": base64.b64encode(one.data[:DATA_BYTES_MAX]).decode(),
            }
        ).encode()
        + b"\n"
    )
