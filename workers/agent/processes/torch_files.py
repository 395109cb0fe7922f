"""Parses torch's error file and torchrun's failure summary."""

import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from ....events.decoding import from_json
from ....events.regular_files import read_regular

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
FILE_BYTES_MAX = 1 << 20
"""A larger file is not torch's."""
TEXT_CHARS_MAX = 1 << 15
"""Maximum length of a message or traceback. Of a longer text only the two ends are kept."""


class TorchError(NamedTuple):
    """An exception written by torch: its type and message, and its traceback ("": none)."""

    message: str
    trace: str


def error_file_of(log_path: Path, folder: Path) -> Path:
    """The error file, in that folder, of the process whose log this is."""
    return folder / log_path.with_suffix(".error.json").name


def read(path: Path, uid: int) -> TorchError | None:
    """Read an error file of the user `uid`; None if it is missing or invalid. Never blocks: it
    reads only regular files, of at most FILE_BYTES_MAX."""
    try:
        return parse(read_regular(path, FILE_BYTES_MAX, follow=False, uid=uid))
    except (OSError, ValueError):
        return None


def parse(data: bytes) -> TorchError | None:
    """Parse torch's JSON: {"message": TEXT}, or of a mapping with a traceback; None: no text."""
    try:
        decoded: Any = from_json(data)
    except msgspec.MsgspecError:
        return None
    message = _get(decoded, "message")
    if isinstance(message, str):
        return TorchError(_bounded(message), "") if message.strip() else None
    text, trace = _get(message, "message"), _get(_get(message, "extraInfo"), "py_callstack")
    found = TorchError(*(_bounded(one) if isinstance(one, str) else "" for one in (text, trace)))
    return found if found.message.strip() or found.trace.strip() else None


def _get(decoded: Any, key: str) -> Any:
    return cast(dict[str, Any], decoded).get(key) if isinstance(decoded, dict) else None


def _bounded(text: str) -> str:
    half = TEXT_CHARS_MAX // 2
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:half]}\n{text[-half:]}"


# --- torchrun's failure summary. Pure. ---
# Source: ChildFailedError in torch/distributed/elastic/multiprocessing/errors.

_TITLE = "Root Cause (first observed failure):"
_FIELD = re.compile(r"^ {2}(rank|exitcode|error_file|traceback)\s*: ?(.*)$")
_EXIT = re.compile(r"(-?\d{1,6}) \(pid: (\d{1,9})\)")
_END = re.compile(r"^={20,}\s*$")
_NO_TRACE = re.compile(r"To enable traceback see|Signal \d+ \(.*\) received by PID")
_TRACEBACK = "Traceback (most recent call last):"


class RootCause(NamedTuple):
    """The process that failed first according to torchrun. Unknown fields are 0 or empty."""

    rank: str
    exit_code: int
    """Below 0: minus the signal that ended it."""
    pid: int
    error_file: str
    trace: str
    before: str
    """The output before torchrun's own lines."""


def root_cause(text: str) -> RootCause | None:
    """The root cause of the last summary in `text`; None without a summary. Linear time."""
    at = text.rfind(_TITLE)
    if at < 0:
        return None
    fields: dict[str, list[str]] = {}
    last = ""
    for line in text[at:].splitlines()[1:]:
        if _END.match(line):
            break
        found = _FIELD.match(line)
        if found is not None and last != "traceback":
            last = found[1]
            fields[last] = [found[2]]
        elif last == "traceback":
            fields[last].append(line[2:])  # a traceback is indented by two
    exited = _EXIT.match(fields.get("exitcode", [""])[0])
    trace = "\n".join(fields.get("traceback", ()))
    file = fields.get("error_file", [""])[0].strip()
    return RootCause(
        rank=fields.get("rank", [""])[0].split(" ")[0],
        exit_code=int(exited[1]) if exited is not None else 0,
        pid=int(exited[2]) if exited is not None else 0,
        error_file=file if file.startswith("/") else "",
        trace="" if _NO_TRACE.match(trace) else trace.strip(),
        before=_before(text[:at]),
    )


def _before(text: str) -> str:
    """Drop torchrun's own traceback with the summary's beginning, and its lines on each process."""
    at = text.rfind(_TRACEBACK)
    if at >= 0 and "ChildFailedError" in text[at:]:
        text = text[:at]
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if "failed (exitcode: " not in line and " closing signal SIG" not in line
    )
