"""`replay --diff`: the first record and the fields of the state in which logs or moments differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any, cast

import msgspec

from ...control_plane.api.moments import time_s
from ...control_plane.decide.replay import Different, replay
from ...control_plane.fold.fold import fold
from ...control_plane.state.cluster import ClusterState
from ...events.errors import UnicronError, UsageError
from ...events.records.codec import decode_record, to_plain
from ...events.records.envelope import Record
from ...events.records.in_words import line
from ..terminal import console
from ..terminal import format as fmt
from .offline import Log

FIELDS_NUM_MAX = 10
FIELD_LENGTH_MAX = 98
DECISIONS_NUM_MAX = 20
Difference = tuple[str, Any, Any]
"""A field by its path, as `tasks.4.phase`, and both values; None: it is absent."""
LogDifference = tuple[Record | None, Record | None, int, list[Difference]]
"""The first records that differ (None: a log has none), and after which seq the states do."""


class DifferError(UnicronError):
    """Two logs differ, or what two decider versions make of one; exit code 1."""


def diff(logs: Sequence[Log], a: str, b: str, *, as_json: bool) -> None:
    """Compare two logs or moments named `a` and `b`. Raises DifferError, UsageError, NewerLog."""
    found = _of_logs(*logs) if len(logs) > 1 else _of_moments(logs[0], a, b)
    if found is None:
        console.show({"equal": True}, [f"{a} and {b} are equal"], as_json=as_json)
        return
    *records, seq, fields = found
    one, other = (to_plain(record) if record is not None else None for record in records)
    lines = ["the first record that differs", *(
        f"  {name:<{max(len(a), len(b))}}  {line(record) if record else 'has no record there'}"
        for name, record in ((a, one), (b, other)))]
    lines += [in_words(next(differences(one, other)))] if one and other else []
    lines += ["", f"the state after seq {seq}, {fmt.number_of(len(fields), 'difference')}",
              *map(in_words, fields[:FIELDS_NUM_MAX])]
    if (left := len(fields) - FIELDS_NUM_MAX) > 0:
        lines.append(f"  and {left} more: -o json has all")
    console.show({"equal": False, "a": one, "b": other, "state_seq": seq, "fields": fields}, lines,
                 as_json=as_json)
    raise DifferError(f"{a} and {b} differ", "unicron explain SEQ [FILE] shows what a record "
                      "rests on")


def _of_logs(a: Log, b: Log) -> LogDifference | None:
    """Fold both up to the first difference of their states. None: the logs are equal."""
    one, other, found = a.state(), b.state(), None
    for x, y in zip_longest(a.read(), b.read()):
        for state, record in ((one, x), (other, y)):
            if record is not None:
                fold(state, record)
        if found is None and x != y:
            found = x, y
        if found is not None and (fields := _of_states(one, other)):
            return *found, max(one.seq, other.seq), fields
    return None if found is None else (*found, max(one.seq, other.seq), [])


def _of_moments(log: Log, a: str, b: str) -> LogDifference | None:
    one, other = _at(log, a), _at(log, b)
    if one.seq == other.seq:
        return None
    first = next(record for record in log.read() if record.seq > min(one.seq, other.seq))
    return (first if one.seq > other.seq else None, first if other.seq > one.seq else None,
            max(one.seq, other.seq), _of_states(one, other))


def _at(log: Log, moment: str) -> ClusterState:
    """The state after the last record until that moment."""
    if moment.isdecimal():
        return log.up_to(int(moment)).fold()
    at_s = time_s(moment)
    if at_s is None:
        raise UsageError(f"{moment!r} is no moment of a log",
                         "a seq, or a time as 2026-11-20T03:20:07.402Z")
    until_s = at_s + 0.001  # commands print a record's time in whole milliseconds
    return replay(takewhile(lambda record: record.at_s < until_s, log.read()), log.state())


def _of_states(a: ClusterState, b: ClusterState) -> list[Difference]:
    """The fields that differ, in the order of ClusterState, but seq and time."""
    plain = [{**msgspec.to_builtins(state, str_keys=True), "seq": 0, "at_s": 0.0,
              "orders": {seq: to_plain(decode_record(wire)) for seq, wire in state.orders.items()}}
             for state in (a, b)]
    return list(differences(plain[0], plain[1]))


def differences(a: Any, b: Any, field: str = "") -> Iterator[Difference]:
    """The values that differ in two pieces of plain data."""
    one, other = _items(a), _items(b)
    if one is not None and other is not None:
        for name in dict.fromkeys((*one, *other)):
            yield from differences(one.get(name), other.get(name), f"{field}.{name}".lstrip("."))
    elif a != b:
        yield field, a, b


def _items(value: Any) -> Mapping[Any, Any] | None:
    """The items of a mapping or list by key or index; None for a single value."""
    if isinstance(value, list | tuple):
        return dict(enumerate(cast(list[Any], value)))
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def in_words(one: Difference) -> str:
    """`  tasks.4.phase: "training", "idle"`."""
    field, a, b = one
    return fmt.clipped(f"  {field}: {json.dumps(a)}, {json.dumps(b)}", FIELD_LENGTH_MAX)


def decisions(found: Sequence[Different]) -> list[str]:
    """The first decisions that this version makes otherwise, each with the first other field."""
    rows: list[list[str]] = []
    for one in found[:DECISIONS_NUM_MAX]:
        kinds = [record["kind"] if record else "-" for record in (one.recorded, one.now)]
        what = next(differences(one.recorded["body"], one.now["body"]), None) if (
            one.recorded and one.now and kinds[0] == kinds[1]) else None
        rows.append([str(one.seq), *kinds, in_words(what).strip() if what is not None else ""])
    return ["", *fmt.table(("SEQ", "RECORDED", "NOW", "FIRST FIELD"), rows, right=(0,)),
            *["... (-o json has more)"] * (len(found) > len(rows))]
