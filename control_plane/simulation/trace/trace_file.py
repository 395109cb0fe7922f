"""Trace files: CSV, and churn of spot nodes (docs/guides/traces.md)."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import NamedTuple

from ....events.errors import SpecError, UsageError
from ....events.records.statuses import LOST_CONNECTION
from ...incidents.severity import TABLE, row_of
from .external_event import AT_S_MAX, EVENTS, Event, ExternalEvent

HEADER = ("at_s", "node", "event", "cause")
REPAIR = "repair_s"
CHURN = re.compile(r"\s*[-+.\w]*\s*,\s*(add|remove)\s*,")
CHURN_EVENTS = ("add", "remove")
NAME_CHARS_MAX = 253
SHOWN_CHARS_MAX = 60
FORMS = f"CSV with the header {','.join(HEADER)}, or time_ms,add|remove,node"
DOCS = "see docs/guides/simulate.md"


class Trace(NamedTuple):
    """External events by time. `nodes`: the nodes at the start, if the file names them (churn)."""

    events: list[ExternalEvent]
    nodes: tuple[str, ...] = ()


class Line(NamedTuple):
    """One event of a file. The node of a fault is `repaired` after `repair_s`, unless that is 0."""

    at_s: float
    node: str
    event: str
    cause: str = ""
    repair_s: float = 0.0


def read(text: str, source: str) -> Trace:
    """Read a trace and sort it by time, then by line. Raises UsageError, which names the line."""
    lines = ["" if line.lstrip().startswith("#") else line
             for line in text.removeprefix("\ufeff").splitlines()]
    first = next((line for line in lines if line.strip()), "")
    if CHURN.match(first):
        return _churn(lines, source)
    found = [one for where, line in _csv(lines, source) for one in _events_of(line, where)]
    return Trace(sorted(found, key=lambda one: one.at_s))


def _csv(lines: Iterable[str], source: str) -> Iterator[tuple[str, Line]]:
    header: tuple[str, ...] = ()
    for where, row in _rows(lines, source):
        if not header:
            header = tuple(word.strip() for word in row)
            if header not in (HEADER, (*HEADER, REPAIR)):
                more = f"; a fifth column is {REPAIR}" if header[:len(HEADER)] == HEADER else ""
                raise UsageError(f"{where}: the header is {_shown(header)}", f"write {FORMS}{more}")
            continue
        if len(row) != len(header):
            more = f"; a fifth, {REPAIR}, must be in the header, too" if (
                len(row) == len(header) + 1 == len(HEADER) + 1) else ""
            raise UsageError(f"{where}: {len(row)} columns",
                             f"{len(header)}: {','.join(header)}{more}")
        fields = dict(zip(header, (word.strip() for word in row), strict=True))
        repair_s = _seconds(fields.pop(REPAIR, "") or "0", REPAIR, where)
        yield where, Line(at_s=_seconds(fields["at_s"], "at_s", where), node=fields["node"],
                          event=fields["event"], cause=fields["cause"], repair_s=repair_s)
    if not header:
        raise UsageError(f"{source}: line 1: the header is missing", f"write {FORMS}")


def _rows(lines: Iterable[str], source: str) -> Iterator[tuple[str, list[str]]]:
    rows = csv.reader(lines)
    try:
        for row in rows:
            if row:
                yield f"{source}: line {rows.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{source}: line {rows.line_num}: {error}", f"write {FORMS}") from None


def _seconds(word: str, name: str, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UsageError(f"{where}: {name} is {word[:SHOWN_CHARS_MAX]!r}",
                         "a number of seconds") from None


def _events_of(line: Line, where: str) -> Iterator[ExternalEvent]:
    for name, seconds in (("at_s", line.at_s), (REPAIR, line.repair_s)):
        if not (math.isfinite(seconds) and 0 <= seconds <= AT_S_MAX):
            raise UsageError(f"{where}: {name} is {seconds:g}",
                             f"seconds, at least 0 and at most {AT_S_MAX:g}")
    try:
        check_name(line.node, "")
    except SpecError as error:
        raise UsageError(f"{where}: {error}", error.hint) from None
    kind = EVENTS.get(line.event)
    if kind is None:
        raise UsageError(f"{where}: event is {line.event[:SHOWN_CHARS_MAX]!r}",
                         f"one of {', '.join(EVENTS)}")
    cause = row_of(line.cause) if kind == "fault" else line.cause
    if kind == "fault" and not cause:
        raise UsageError(f"{where}: cause is {line.cause[:SHOWN_CHARS_MAX]!r}",
                         f"one of {', '.join(TABLE)}")
    if kind != "fault" and line.repair_s:
        raise UsageError(f"{where}: {REPAIR} without a fault", "leave it empty")
    yield ExternalEvent(line.at_s, line.node, kind, cause)
    if line.repair_s:
        yield ExternalEvent(line.at_s + line.repair_s, line.node, "repaired")


def check_name(name: str, path: str) -> None:
    """Raises SpecError if the name is not valid for a node."""
    if not (name and len(name) <= NAME_CHARS_MAX and name.isprintable() and name == name.strip()):
        raise SpecError(path, f"{name[:SHOWN_CHARS_MAX]!r} names no node",
                        f"printable text, at most {NAME_CHARS_MAX} characters")


def _shown(words: Sequence[str]) -> str:
    text = ",".join(words)[:SHOWN_CHARS_MAX]
    return text if text.isprintable() else repr(text)


# --- churn --------------------------------------------------------------------------------------
def _churn(lines: Iterable[str], source: str) -> Trace:
    """Read churn: a spot node is lost without notice, and its replacement has another name."""
    events: list[tuple[ExternalEvent, str]] = []
    for where, row in _rows(lines, source):
        words = [word.strip() for word in row]
        if len(words) != 3 or words[1] not in CHURN_EVENTS:
            raise UsageError(f"{where}: is {_shown(words)}",
                             "time_ms, add or remove, node; no header")
        kind: Event = "joined" if words[1] == "add" else "fault"
        line = Line(at_s=_seconds(words[0], "time_ms", where) / 1000, node=words[2], event=kind,
                    cause=LOST_CONNECTION if kind == "fault" else "")
        events += ((one, where) for one in _events_of(line, where))
    present: dict[str, bool] = {}
    for one, where in sorted(events, key=lambda pair: pair[0].at_s):
        if present.get(one.node, False) == (one.event == "joined"):
            raise UsageError(f"{where}: {'add' if one.event == 'joined' else 'remove'} of "
                             f"{one.node}, which is "
                             f"{'present' if one.event == 'joined' else 'not present'}", DOCS)
        present[one.node] = one.event == "joined"
    begin = {one.node: one for one, _ in events if one.at_s == 0 and one.event == "joined"}
    if not begin:
        raise UsageError(f"{source}: no node is there at time 0", "begin with 0,add,NODE")
    return Trace(sorted((one for one, _ in events if begin.get(one.node) is not one),
                        key=lambda one: one.at_s), tuple(begin))


def written(happenings: Iterable[ExternalEvent]) -> Iterator[str]:
    """The lines of an equivalent CSV file."""
    lines = StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(HEADER)
    for one in happenings:
        rows.writerow((f"{one.at_s:.3f}".rstrip("0").rstrip("."), one.node, one.event, one.cause))
    yield from lines.getvalue().splitlines()
