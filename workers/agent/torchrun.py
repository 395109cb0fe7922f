"""The summary that torchrun prints when one of its processes fails, found in its output. Pure.

Source: ChildFailedError in torch/distributed/elastic/multiprocessing/errors.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TITLE = "Root Cause (first observed failure):"
_FIELD = re.compile(r"^ {2}(rank|exitcode|error_file|traceback)\s*: ?(.*)$")
_EXIT = re.compile(r"(-?\d{1,6}) \(pid: (\d{1,9})\)")
_END = re.compile(r"^={20,}\s*$")
_NO_TRACE = re.compile(r"To enable traceback see|Signal \d+ \(.*\) received by PID")
_TRACEBACK = "Traceback (most recent call last):"


class Root(NamedTuple):
    """The process that torchrun saw fail first. What it does not say is 0 or empty."""

    rank: str
    exit_code: int
    """Below 0: it ended by this signal."""
    pid: int
    error_file: str
    trace: str
    before: str
    """What was printed before torchrun's own words on it."""


def root_of(text: str) -> Root | None:
    """The root cause of the last summary in `text`; None: there is none. Linear in its length."""
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
    return Root(
        rank=fields.get("rank", [""])[0].split(" ")[0],
        exit_code=int(exited[1]) if exited is not None else 0,
        pid=int(exited[2]) if exited is not None else 0,
        error_file=file if file.startswith("/") else "",
        trace="" if _NO_TRACE.match(trace) else trace.strip(),
        before=_before(text[:at]))


def _before(text: str) -> str:
    """Without the summary's beginning, torchrun's own traceback and its words on each process."""
    at = text.rfind(_TRACEBACK)
    if at >= 0 and "ChildFailedError" in text[at:]:
        text = text[:at]
    return "".join(line for line in text.splitlines(keepends=True)
                   if "failed (exitcode: " not in line and " closing signal SIG" not in line)
