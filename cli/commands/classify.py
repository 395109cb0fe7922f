"""`unicron classify`: the status and severity of each line of a log, and how Unicron handles it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from ...control_plane.incidents.severity import HANDLING, severity_of
from ...events.errors import UsageError
from ...events.records.statuses import NCCL_TIMEOUT, TASK_HANG
from ...workers.diagnosis.classifier import Verdict
from ...workers.diagnosis.classifier import classify as verdict_on
from ..terminal import console
from ..terminal import format as fmt

READ_BYTES_MAX = 16 * 1024 * 1024
"""A longer line is not parsed as JSON."""
HALF_BYTES = 512 * 1024
"""Of a line longer than 2 x HALF_BYTES, only its beginning and its end are classified."""
LOOK_BYTES = 8192
FAULT_LINES_NUM_MAX = 200_000
"""Lines of a fault that the page counts; an endless repetition behind them takes no time."""
ROWS_NUM_MAX = 40
INDENT_COLUMNS = 10
KEYS = ("event", "msg", "message", "log", "error", "exception")
"""Keys that hold the message of a JSON object without `text`; without them, the line is used."""
PACKED = {b"\x1f\x8b": ("gzip", "zcat"), b"\xfd7zXZ": ("xz", "xzcat"),
          b"(\xb5/\xfd": ("zstd", "zstdcat"), b"BZh": ("bzip2", "bzcat")}
HINT = "give a log as it is, or one JSON object with text a line"
DEVICES_NUM_MAX = 64
DEVICES_SHOWN_NUM = 4
NONE, NO_SEVERITY = "none", "NONE"
DONE: dict[str, str] = {
    severity: f"{first}; else {then}" if severity != "SEV1" else first
    for severity, (first, _, then) in HANDLING.items()}


class Group(Struct):
    """Lines with one status, matched by one rule."""

    severity: str
    verdict: Verdict
    first: int
    """The number of the first line, from 1."""
    num_lines: int = 0
    devices: dict[str, None] = {}
    """The first DEVICES_NUM_MAX GPUs that these lines name, in order."""


def classify(file: Path | None, *, as_json: bool) -> None:
    """Read the text, classify each line, print. Raises UsageError for input that is not text."""
    file = None if str(file) == "-" else file
    name = str(file) if file is not None else "standard input"
    with ExitStack() as stack:
        stream = _opened(file, stack)
        _check(_begins(stream), name, str(file) if file is not None else "FILE")
        texts = _texts(stream, name)
        verdicts = _verdicts(texts)
        if as_json:
            for _, text, verdict in verdicts:
                console.data(plain(text, verdict))
        else:
            console.lines(screen(name if file is not None else "", verdicts, texts))


def plain(text: str, verdict: Verdict) -> fmt.Plain:
    """One verdict as plain data, without empty fields."""
    fields: fmt.Plain = {"text": text, "status": verdict.status or NONE,
                            "severity": _severity(verdict), "rule": verdict.rule}
    rest = {"line": verdict.line, "peer": verdict.peer, "second_hand": verdict.second_hand,
            "code": verdict.code, "device": verdict.device}
    return fields | {key: value for key, value in rest.items() if value}


def screen(name: str, verdicts: Iterator[tuple[int, str, Verdict]],
           texts: Iterator[tuple[int, str, bool]]) -> Iterator[str]:
    """The page: each status and rule once, the most severe first; then the handling and the next
    command. Behind FAULT_LINES_NUM_MAX lines of a fault the lines of `texts` are only counted."""
    groups: dict[tuple[str, str], Group] = {}
    num_lines = num_speaking = num_left = 0
    for number, _, verdict in verdicts:
        num_lines += 1
        if verdict.status:
            num_speaking += 1
            group = groups.setdefault((verdict.status, verdict.rule),
                                      Group(_severity(verdict), verdict, number))
            group.num_lines += 1
            if verdict.device and len(group.devices) < DEVICES_NUM_MAX:
                group.devices[verdict.device] = None
            if num_speaking == FAULT_LINES_NUM_MAX:
                num_left = sum(1 for _ in texts)
                break
    if not num_lines:
        yield f"0 lines: {f'{name} is empty' if name else 'nothing was piped in?'}"
        return
    yield (f"{fmt.number_of(num_lines, 'line')}: {fmt.count(num_speaking)} of a fault, "
           f"{fmt.count(num_lines - num_speaking)} that mean nothing")
    if num_left:
        rest = f"tail -n +{num_lines + 1} {shlex.quote(name or 'FILE')} | unicron classify"
        yield from fmt.labelled("left out", f"{fmt.count(num_left)} lines behind these: "
                                            f"{fmt.command(rest)}")
    if not groups:
        return
    found = sorted(groups.values(), key=lambda one: (one.severity, one.first))
    yield ""
    rows = found[:ROWS_NUM_MAX]
    lines = iter(fmt.table(
        ("SEVERITY", "STATUS", "RULE", "LINES", "FIRST"),
        [[one.severity, one.verdict.status, one.verdict.rule, fmt.count(one.num_lines),
          fmt.count(one.first)] for one in rows], right=(3, 4)))
    yield next(lines)
    for line, one in zip(lines, rows, strict=True):
        yield line
        yield fmt.clipped(" " * INDENT_COLUMNS + _said(one.verdict), fmt.SCREEN_COLUMNS)
        if one.devices:
            yield f"{'':{INDENT_COLUMNS}}{_gpus(one.devices)}"
    if len(found) > ROWS_NUM_MAX:
        yield f"and {len(found) - ROWS_NUM_MAX} rules more: {fmt.command('-o json')}"
    yield ""
    for severity in sorted({one.severity for one in found}):
        yield from fmt.labelled(severity, DONE[severity])
    if any(one.verdict.second_hand for one in found):
        yield from fmt.labelled("(peer)", "reports the end of another process, or a wait for it: "
                                "find the cause there")
    yield from _next(name, found)


def _next(name: str, found: list[Group]) -> Iterator[str]:
    """The next commands, for the most severe status. A line names its GPU, but not its node."""
    of_gpus = [one for one in found if one.severity == "SEV1" and one.devices]
    devices = dict.fromkeys(device for one in of_gpus for device in one.devices)
    steps: list[str] = []
    if devices:
        rules = " ".join(dict.fromkeys(one.verdict.rule for one in of_gpus))
        steps.append(f"{fmt.command(f'unicron drain NODE --reason {shlex.quote(rules)}')}: the "
                     f"node that wrote it, for {_gpus(devices)}; one slot cannot be drained alone")
    elif found[0].severity == "SEV1":
        steps.append(f"{fmt.command('unicron status nodes')}: whether the node that it names is "
                     f"out; else {fmt.command('unicron drain NODE')}")
    if any(one.verdict.status in (NCCL_TIMEOUT, TASK_HANG) for one in found):
        steps.append(f"{fmt.command('unicron locate DUMP...')}: whom they wait for")
    if not steps:
        words = " ".join(["unicron classify", *([name] if name else []), "-o json"])
        steps.append(f"{fmt.command(words)}: each line, with the peer that it names")
    for label, step in zip(("next", *[""] * len(steps)), steps, strict=False):
        yield from fmt.labelled(label, step)


def _gpus(devices: Iterable[str]) -> str:
    """For example `GPU 0000:4e:00, 0000:9b:00`."""
    return f"GPU {fmt.listed(list(devices), DEVICES_SHOWN_NUM)}"


def _said(verdict: Verdict) -> str:
    words = "".join(letter if letter.isprintable() else " " for letter in verdict.line)
    return ("(peer) " if verdict.second_hand else "") + " ".join(words.split())


def _severity(verdict: Verdict) -> str:
    return severity_of(verdict.status) if verdict.status else NO_SEVERITY


# --- Input. ---
def _opened(file: Path | None, stack: ExitStack) -> BinaryIO:
    if file is None:
        if sys.stdin.isatty():
            console.talk("reading standard input; Ctrl-D ends it")
        return sys.stdin.buffer
    try:
        return stack.enter_context(file.open("rb"))
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder", "name a file, or pipe the text in") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{file}: {why.lower()}", "give the name of a text file, or pipe the "
                         "text in") from None


def _begins(stream: BinaryIO) -> bytes:
    """The first bytes of the stream, without consuming them."""
    peek = getattr(stream, "peek", None)
    return bytes(peek(LOOK_BYTES))[:LOOK_BYTES] if peek is not None else b""


def _check(head: bytes, name: str, file: str) -> None:
    """Raises UsageError for compressed input or an unsupported encoding."""
    for magic, (what, command_) in PACKED.items():
        if head.startswith(magic):
            raise UsageError(f"{name} is packed by {what}", f"{command_} {file} | unicron classify")
    if b"\0" not in head:
        return
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{name} is UTF-16", f"iconv -f UTF-16 -t UTF-8 {file} | unicron classify")
    raise UsageError(f"{name} is not text", HINT)


def _verdicts(texts: Iterator[tuple[int, str, bool]]) -> Iterator[tuple[int, str, Verdict]]:
    """Each text with its verdict. A line below the `File` line of a traceback is classified
    together with that line: quoted source code is not an error."""
    ahead = ""
    for number, text, whole in texts:
        yield number, text, verdict_on(text if whole or not ahead else f"{ahead}\n{text}")
        ahead = text if not whole and '", line ' in text else ""


def _texts(stream: BinaryIO, name: str) -> Iterator[tuple[int, str, bool]]:
    """(line number, text, is_whole): the text in the line's JSON object (whole), or the line."""
    number = 0
    while raw := stream.readline(READ_BYTES_MAX):
        number += 1
        if cut := len(raw) == READ_BYTES_MAX and not raw.endswith(b"\n"):
            tail = rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(READ_BYTES_MAX)
                tail = (tail + rest)[-HALF_BYTES:]
            raw = raw[:HALF_BYTES] + b"\n" + tail
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").rstrip("\r\n")
        words = line.strip()
        text = _text_of(words) if not cut and words.startswith("{") else None
        if text is not None:
            yield number, text, True
        else:
            if len(raw) > 2 * HALF_BYTES:
                line = f"{line[:HALF_BYTES]}\n{line[-HALF_BYTES:]}"
                console.talk(f"line {number} of {name} is longer than {fmt.count(2 * HALF_BYTES)} "
                             f"bytes: its first and last {fmt.count(HALF_BYTES)} are classified")
            yield number, line, False


def _text_of(words: str) -> str | None:
    """The text of a JSON object; None if the line is not JSON or has no text."""
    try:
        fields = json.loads(words)
    except (ValueError, RecursionError):
        return None
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    said = [fields[key] for key in KEYS if isinstance(fields.get(key), str)]
    return "\n".join(said) if said else None
