"""Trace files: CSV (docs/guides/traces.md)."""

import csv
import math
from collections.abc import Iterable, Iterator

from ....events.errors import SpecError, UsageError
from ...incidents.severity import TABLE, row_of
from .external_event import AT_S_MAX, EVENTS, ExternalEvent

HEADER = ("at_s", "node", "event", "cause")
REPAIR = "repair_s"
NAME_CHARS_MAX = 253
SHOWN_CHARS_MAX = 60
FORM = f"CSV with the header {','.join(HEADER)}"


def read(text: str, source: str) -> list[ExternalEvent]:
    """Read a trace and sort it by time, then by line. Raises UsageError, which names the line."""
    lines = [
        "" if line.lstrip().startswith("#") else line
        for line in text.removeprefix("\ufeff").splitlines()
    ]
    found = [one for where, line in _csv(lines, source) for one in _events_of(line, where)]
    return sorted(found, key=lambda one: one.at_s)


def _csv(lines: Iterable[str], source: str) -> Iterator[tuple[str, dict[str, str]]]:
    header: tuple[str, ...] = ()
    for where, row in _rows(lines, source):
        if not header:
            header = tuple(word.strip() for word in row)
            if header not in (HEADER, (*HEADER, REPAIR)):
                more = f"; a fifth column is {REPAIR}" if header[: len(HEADER)] == HEADER else ""
                shown = ",".join(header)[:SHOWN_CHARS_MAX]
                raise UsageError(
                    f"{where}: the header is {shown if shown.isprintable() else repr(shown)}",
                    f"write {FORM}{more}",
                )
            continue
        if len(row) != len(header):
            more = (
                f"; a fifth, {REPAIR}, must be in the header, too"
                if (len(row) == len(header) + 1 == len(HEADER) + 1)
                else ""
            )
            raise UsageError(
                f"{where}: {len(row)} columns", f"{len(header)}: {','.join(header)}{more}"
            )
        yield where, dict(zip(header, (word.strip() for word in row), strict=True))
    if not header:
        raise UsageError(f"{source}: line 1: the header is missing", f"write {FORM}")


def _rows(lines: Iterable[str], source: str) -> Iterator[tuple[str, list[str]]]:
    rows = csv.reader(lines)
    try:
        for row in rows:
            if row:
                yield f"{source}: line {rows.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{source}: line {rows.line_num}: {error}", f"write {FORM}") from None


def _seconds(word: str, name: str, where: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        raise UsageError(
            f"{where}: {name} is {word[:SHOWN_CHARS_MAX]!r}", "a number of seconds"
        ) from None
    if not (math.isfinite(seconds) and 0 <= seconds <= AT_S_MAX):
        raise UsageError(
            f"{where}: {name} is {seconds:g}", f"seconds, at least 0 and at most {AT_S_MAX:g}"
        )
    return seconds


def _events_of(line: dict[str, str], where: str) -> Iterator[ExternalEvent]:
    """A fault with `repair_s` above 0 is followed by `repaired`."""
    at_s, node, event = _seconds(line["at_s"], "at_s", where), line["node"], line["event"]
    repair_s = _seconds(line.get(REPAIR) or "0", REPAIR, where)
    try:
        check_name(node, "")
    except SpecError as error:
        raise UsageError(f"{where}: {error}", error.hint) from None
    kind = EVENTS.get(event)
    if kind is None:
        raise UsageError(
            f"{where}: event is {event[:SHOWN_CHARS_MAX]!r}", f"one of {', '.join(EVENTS)}"
        )
    cause = row_of(line["cause"]) if kind == "fault" else line["cause"]
    if kind == "fault" and not cause:
        raise UsageError(
            f"{where}: cause is {line['cause'][:SHOWN_CHARS_MAX]!r}", f"one of {', '.join(TABLE)}"
        )
    if kind != "fault" and repair_s:
        raise UsageError(f"{where}: {REPAIR} without a fault", "leave it empty")
    yield ExternalEvent(at_s, node, kind, cause)
    if repair_s:
        yield ExternalEvent(at_s + repair_s, node, "repaired")


def check_name(name: str, path: str) -> None:
    """Raises SpecError if the name is not valid for a node."""
    if not (name and len(name) <= NAME_CHARS_MAX and name.isprintable() and name == name.strip()):
        raise SpecError(
            path,
            f"{name[:SHOWN_CHARS_MAX]!r} names no node",
            f"printable text, at most {NAME_CHARS_MAX} characters",
        )
