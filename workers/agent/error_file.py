"""torch's error file: what a script under torch's @record writes when it raises.

`TORCHELASTIC_ERROR_FILE` names it (torch/distributed/elastic/multiprocessing/errors). torchrun has
one for each of its processes, and copies the first that failed into its own.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

NAME = "TORCHELASTIC_ERROR_FILE"
FILE_BYTES_MAX = 1 << 20
"""A larger one is none of torch's."""
TEXT_CHARS_MAX = 1 << 15
"""Of a message, and of a traceback, that are read: of a longer one its two ends."""


class Recorded(NamedTuple):
    """An exception as torch wrote it: its type and message, and its traceback ("": none)."""

    message: str
    trace: str


def beside(log_path: Path) -> Path:
    """The error file of the process that writes to this log."""
    return log_path.with_suffix(".error.json")


def read(path: Path) -> Recorded | None:
    """What the file says; None where there is none, or it is not such a file.

    Never waits: only a regular file of this user's is opened for reading, and only one of at most
    FILE_BYTES_MAX is read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(fd)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_size > FILE_BYTES_MAX:
            return None
        data = os.read(fd, FILE_BYTES_MAX)
    except OSError:
        return None
    finally:
        os.close(fd)
    return understood(data)


def understood(data: bytes) -> Recorded | None:
    """Of `{"message": {"message": TEXT, "extraInfo": {"py_callstack": TEXT}}}`, all of it optional
    but for a text, or of `{"message": TEXT}`."""
    try:
        told: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    message = _of(told, "message")
    if isinstance(message, str):
        return Recorded(_bounded(message), "") if message.strip() else None
    text, trace = _of(message, "message"), _of(_of(message, "extraInfo"), "py_callstack")
    found = Recorded(*(_bounded(one) if isinstance(one, str) else "" for one in (text, trace)))
    return found if found.message.strip() or found.trace.strip() else None


def _of(told: Any, key: str) -> Any:
    return cast(dict[str, Any], told).get(key) if isinstance(told, dict) else None


def _bounded(text: str) -> str:
    half = TEXT_CHARS_MAX // 2
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:half]}\n{text[-half:]}"
