"""`unicron classify`: the status and severity of each line of a log, and how Unicron handles it."""

import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from ...control_plane.incidents.severity import HANDLING, severity_of
from ...events.bounded_file import DataReader
from ...events.decoding import from_loose_json
from ...events.errors import UsageError
from ...workers.diagnosis.classifier import Verdict
from ...workers.diagnosis.classifier import classify as verdict_on
from ..terminal import console
from ..terminal import format as fmt

LINE_BYTES_MAX = 1 << 20
"""Of a longer line this many bytes of its beginning and of its end are classified, as text."""
FAULT_LINES_NUM_MAX = 200_000
"""The page ends behind so many lines of a fault, so that an endless repetition takes no time."""
KEYS = ("text", "event", "msg", "message", "log", "error", "exception")
"""Keys that hold the message of a JSON object; without them, the line is used."""
INDENT_COLUMNS = 10
PEER_LINES_NUM_MIN = 3
"""A peer is shown if as many lines name it, and most of all that name a peer."""
PEERS_NUM_MAX = 4096
"""Peers that are counted; further ones are not, so that memory is bounded."""


class Group(Struct):
    """Lines with one status, matched by one rule."""

    severity: str
    verdict: Verdict
    first: int
    """The number of the first line, from 1."""
    num_lines: int = 0


def classify(file: Path | None, *, as_json: bool) -> None:
    """Read the text, classify each line, print. Raises UsageError for input that is not text."""
    with ExitStack() as stack:
        if file is None or str(file) == "-":
            name, stream = "standard input", sys.stdin.buffer
            if sys.stdin.isatty():
                console.talk("reading standard input; Ctrl-D ends it")
        else:
            try:
                name, stream = str(file), stack.enter_context(file.open("rb"))
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                raise UsageError(
                    f"{file}: {why.lower()}", "give the name of a text file, or pipe the text in"
                ) from None
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream = BufferedReader(DataReader(stream.fileno()), LINE_BYTES_MAX)
        verdicts = _verdicts(stream, name)
        if as_json:
            for text, verdict in verdicts:
                console.data(plain(text, verdict))
        else:
            console.lines(screen(verdicts))


def plain(text: str, verdict: Verdict) -> fmt.Plain:
    """One verdict as plain data, without empty fields."""
    fields: fmt.Plain = {
        "text": text,
        "status": verdict.status or "none",
        "severity": _severity(verdict),
        "rule": verdict.rule,
    }
    rest = {
        "line": verdict.line,
        "peer": verdict.peer,
        "second_hand": verdict.second_hand,
        "can_pass": verdict.can_pass,
        "code": verdict.code,
        "device": verdict.device,
    }
    return fields | {key: value for key, value in rest.items() if value}


def screen(verdicts: Iterator[tuple[str, Verdict]]) -> Iterator[str]:
    """The page: each status and rule once, the most severe first; then their handling. The memory
    in use does not grow with the length of the log. Reading ends after FAULT_LINES_NUM_MAX lines of
    a fault, because each takes time and the first ones tell the cause."""
    groups: dict[tuple[str, str], Group] = {}
    peers: Counter[str] = Counter()
    num_lines = num_faults = 0
    for num_lines, (_, verdict) in enumerate(verdicts, 1):
        if not verdict.status:
            continue
        num_faults += 1
        group = groups.setdefault(
            (verdict.status, verdict.rule), Group(_severity(verdict), verdict, num_lines)
        )
        group.num_lines += 1
        host = verdict.peer.rpartition(":")[0] or verdict.peer
        if host and (host in peers or len(peers) < PEERS_NUM_MAX):
            peers[host] += 1
        if num_faults == FAULT_LINES_NUM_MAX:
            break
    yield (
        f"{fmt.number_of(num_lines, 'line')}: {fmt.count(num_faults)} of a fault, "
        f"{fmt.count(num_lines - num_faults)} that mean nothing"
    )
    if num_faults == FAULT_LINES_NUM_MAX:
        yield from fmt.labelled("left out", "what follows: -o json classifies all of it")
    if not groups:
        return
    found = sorted(groups.values(), key=lambda one: (one.severity, one.first))
    yield ""
    head, *lines = fmt.table(
        ("SEVERITY", "STATUS", "RULE", "LINES", "FIRST"),
        [
            [
                one.severity,
                one.verdict.status,
                one.verdict.rule,
                fmt.count(one.num_lines),
                fmt.count(one.first),
            ]
            for one in found
        ],
        right=(3, 4),
    )
    yield head
    for line, one in zip(lines, found, strict=True):
        words = "".join(letter if letter.isprintable() else " " for letter in one.verdict.line)
        peer = "(peer) " * one.verdict.second_hand
        yield line
        yield fmt.clipped(" " * INDENT_COLUMNS + peer + " ".join(words.split()), fmt.SCREEN_COLUMNS)
    yield ""
    for severity, (first, _, then) in sorted(HANDLING.items()):
        if any(one.severity == severity for one in found):
            yield from fmt.labelled(
                severity, first if severity == "SEV1" else f"{first}; else {then}"
            )
    if any(one.verdict.second_hand for one in found):
        yield from fmt.labelled(
            "(peer)", "reports the end of another process, or a wait for it: find the cause there"
        )
    for host, num in peers.most_common(1):
        if num >= PEER_LINES_NUM_MIN and 2 * num > peers.total():
            yield from fmt.labelled(
                "peer", f"{host} is named by {fmt.count(num)} lines: look at that node first"
            )


def _severity(verdict: Verdict) -> str:
    return severity_of(verdict.status) if verdict.status else "NONE"


def _verdicts(stream: BinaryIO, name: str) -> Iterator[tuple[str, Verdict]]:
    """Each text with its verdict. A line below the `File` line of a traceback is classified
    together with that line: quoted source code is not an error."""
    ahead, begun = "", False
    while raw := stream.readline(LINE_BYTES_MAX):
        end = raw
        while not end.endswith(b"\n") and (more := stream.readline(LINE_BYTES_MAX)):
            end = (end + more)[-LINE_BYTES_MAX:]
        if b"\0" in raw and not begun:
            raise UsageError(
                f"{name} is not text",
                "a packed file: zcat, xzcat or zstdcat FILE | "
                "unicron classify; another encoding: iconv -t UTF-8",
            )
        begun = True
        line = (raw if end is raw else raw + b"\n" + end).decode("utf-8-sig", "replace")
        line = line.rstrip("\r\n")
        if (text := _text_of(line)) is not None:
            ahead = ""
            yield text, verdict_on(text)
        else:
            yield line, verdict_on(f"{ahead}\n{line}" if ahead else line)
            ahead = line if '", line ' in line else ""


def _text_of(line: str) -> str | None:
    """The text of a JSON object; None if the line is not JSON or has no text."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        fields = from_loose_json(line)
    except ValueError:
        return None
    said = [fields[key] for key in KEYS if isinstance(fields.get(key), str)]
    return "\n".join(said) if said else None
