"""`replay --diff`: the first record and the fields of the state in which logs or moments differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import takewhile

import msgspec

from ...control_plane.decide.replay import replay
from ...control_plane.history.differences import (
    Difference,
    LogDifference,
    differences,
    log_difference,
    state_differences,
)
from ...control_plane.state.cluster import ClusterState
from ...events.errors import UnicronError, UsageError
from ...events.records.codec import to_plain
from ...events.records.envelope import Record
from ..terminal import console
from ..terminal import format as fmt
from ..terminal.record_line import line

FIELDS_NUM_MAX = 10
FIELD_LENGTH_MAX = 98


class DifferError(UnicronError):
    """Two logs differ, or what two decider versions make of one; exit code 1."""


def diff(read: Callable[[], Iterable[Record]] | None, logs: Iterable[Iterable[Record]], a: str,
         b: str, *, as_json: bool) -> None:
    """Compare two moments of the log that `read` reads, each a seq or a time; without it, two
    logs. `a`, `b`: their names. Raises DifferError, UsageError, NewerLog."""
    found = log_difference(*logs) if read is None else _between(read, a, b)
    if found is None:
        console.show({"equal": True}, [f"{a} and {b} are equal"], as_json=as_json)
        return
    records = [to_plain(record) if record is not None else None for record in (found.a, found.b)]
    fields = [next(differences(records[0], records[1]))] if all(records) else []
    lines = ["the first record that differs", *(
        f"  {name:<{max(len(a), len(b))}}  {line(record) if record else 'has no record there'}"
        for name, record in zip((a, b), records, strict=True)), *map(in_words, fields)]
    num = fmt.number_of(len(found.fields), "difference")
    lines += ["", f"the state after seq {found.state_seq}, {num}",
              *map(in_words, found.fields[:FIELDS_NUM_MAX])]
    if left := found.fields[FIELDS_NUM_MAX:]:
        lines.append(f"  and {len(left)} more: -o json has all")
    console.show({"equal": False, "a": records[0], "b": records[1], "state_seq": found.state_seq,
                  "fields": msgspec.to_builtins(found.fields)},
                 lines if found.fields else [*lines[:-2], "the states are equal"], as_json=as_json)
    raise DifferError(f"{a} and {b} differ", "unicron explain SEQ [FILE] shows what a record "
                      "rests on")


def _between(read: Callable[[], Iterable[Record]], a: str, b: str) -> LogDifference | None:
    one, other = _at(read(), a), _at(read(), b)
    if one.seq == other.seq:
        return None
    first = next(record for record in read() if record.seq > min(one.seq, other.seq))
    return LogDifference(first if one.seq > other.seq else None,
                         first if other.seq > one.seq else None,
                         state_differences(one, other), max(one.seq, other.seq))


def _at(records: Iterable[Record], moment: str) -> ClusterState:
    """The state after the last record until that moment."""
    if moment.isdecimal():
        state = replay(takewhile(lambda record: record.seq <= int(moment), records))
        if state.seq < int(moment):
            raise UsageError(f"the log ends at seq {state.seq}", f"{state.seq} or lower")
        return state
    try:
        at = datetime.fromisoformat(moment)
    except ValueError:
        raise UsageError(f"{moment!r} is no moment of a log",
                         "a seq, or a time as 2026-11-20T03:20:07.402Z") from None
    # Commands print a record's time in whole milliseconds.
    until_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp() + 0.001
    return replay(takewhile(lambda record: record.at_s < until_s, records))


def in_words(one: Difference) -> str:
    """`  tasks.4.phase: "training", "idle"`."""
    return fmt.clipped(f"  {one.field}: {json.dumps(one.a)}, {json.dumps(one.b)}", FIELD_LENGTH_MAX)
