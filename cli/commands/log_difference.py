"""`replay --diff`: the first record, and the fields of the state, in which two logs differ, or one
log at two moments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

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
from ...events.log import archive
from ...events.records.codec import to_plain
from ...events.records.envelope import Record
from ..terminal import console
from ..terminal import format as fmt
from ..terminal.record_line import line

FIELDS_NUM_MAX = 10
FIELD_LENGTH_MAX = 98


class DifferError(UnicronError):
    """Two logs differ, or what two decider versions make of one; exit code 1."""


def of_files(a: Path, b: Path, *, as_json: bool) -> None:
    """Compare two exported logs. Raises DifferError if they differ."""
    _show(log_difference(archive.read(a), archive.read(b)), str(a), str(b), as_json=as_json)


def of_moments(read: Callable[[], Iterable[Record]], a: str, b: str, *, as_json: bool) -> None:
    """Compare a log at two moments, each a seq or a time. Raises DifferError, UsageError."""
    one, other = sorted((_at(read(), a), _at(read(), b)), key=lambda state: state.seq)
    found = None
    if one.seq != other.seq:
        first = next(record for record in read() if record.seq > one.seq)
        found = LogDifference(None, first, list(state_differences(one, other)), other.seq)
    _show(found, f"seq {one.seq}", f"seq {other.seq}", as_json=as_json)


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


def _show(found: LogDifference | None, a: str, b: str, *, as_json: bool) -> None:
    if found is None:
        console.show({"equal": True}, [f"{a} and {b} are equal"], as_json=as_json)
        return
    records = [to_plain(record) if record is not None else None for record in (found.a, found.b)]
    field = next(differences(*records), None) if all(records) else None
    data = {"equal": False, "a": records[0], "b": records[1], "field": field,
            "state_seq": found.state_seq, "fields": found.fields}
    console.show(msgspec.to_builtins(data), _page(found, field, records, a, b), as_json=as_json)
    raise DifferError(f"{a} and {b} differ", "the state's fields are named in "
                      "docs/ARCHITECTURE.md, control_plane/state")


def _page(found: LogDifference, field: Difference | None, records: list[dict[str, Any] | None],
          a: str, b: str) -> list[str]:
    width = max(len(a), len(b))
    lines = ["the first record that differs"]
    lines += [f"  {name:<{width}}  {line(record) if record else 'has ended'}"
              for name, record in zip((a, b), records, strict=True)]
    if field is not None:
        lines.append(f"  {in_words(field)}")
    if not found.fields:
        return [*lines, "the states are equal"]
    num = fmt.number_of(len(found.fields), "field")
    lines += ["", f"the state after seq {found.state_seq}: {num} differ{'s' * (num == '1 field')}"]
    lines += [f"  {in_words(one)}" for one in found.fields[:FIELDS_NUM_MAX]]
    left = len(found.fields) - FIELDS_NUM_MAX
    return [*lines, f"  and {left} more (-o json has all)"] if left > 0 else lines


def in_words(one: Difference) -> str:
    """`tasks.4.phase: "training", "idle"`."""
    return fmt.clipped(f"{one.field}: {json.dumps(one.a)}, {json.dumps(one.b)}", FIELD_LENGTH_MAX)
