"""Where two logs differ: the first record, and the fields of the state after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, cast

import msgspec
from msgspec import Struct

from ...events.records.codec import decode_record, to_plain
from ...events.records.envelope import Record
from ..fold.fold import fold
from ..state.cluster import ClusterState


class Difference(Struct, frozen=True):
    """A field by its path, such as `tasks.4.phase`, with both values; None: it is absent."""

    field: str
    a: Any
    b: Any


class LogDifference(Struct):
    """The first records that differ; None: the log has none there. The states differ in `fields`
    after `state_seq`; no fields: they never do."""

    a: Record | None
    b: Record | None
    fields: list[Difference] = []
    state_seq: int = 0


def log_difference(a: Iterable[Record], b: Iterable[Record]) -> LogDifference | None:
    """Fold both logs up to the first difference of their states. None: they are equal. Raises
    CorruptLog, NewerLog."""
    one, other, found = ClusterState(), ClusterState(), None
    for x, y in zip_longest(a, b):
        for state, record in ((one, x), (other, y)):
            if record is not None:
                fold(state, record)
        if x != y and found is None:
            found = LogDifference(x, y)
        if found is not None and (fields := state_differences(one, other)):
            return LogDifference(found.a, found.b, fields, max(one.seq, other.seq))
    return found


def state_differences(a: ClusterState, b: ClusterState) -> list[Difference]:
    """The fields of two states that differ, in the order of ClusterState, but seq and time."""
    return list(differences(_plain(a), _plain(b)))


def _plain(state: ClusterState) -> dict[str, Any]:
    orders = {seq: to_plain(decode_record(wire)) for seq, wire in state.orders.items()}
    return {**msgspec.to_builtins(state, str_keys=True), "seq": 0, "at_s": 0.0, "orders": orders}


def differences(a: Any, b: Any, field: str = "") -> Iterator[Difference]:
    """The values that differ in two pieces of plain data."""
    one, other = _items(a), _items(b)
    if one is not None and other is not None:
        for name in dict.fromkeys((*one, *other)):
            yield from differences(one.get(name), other.get(name), f"{field}.{name}".lstrip("."))
    elif a != b:
        yield Difference(field, a, b)


def _items(value: Any) -> Mapping[Any, Any] | None:
    """The items of a mapping or list by key or index; None for a single value."""
    if isinstance(value, list | tuple):
        return dict(enumerate(cast(list[Any], value)))
    return cast(dict[str, Any], value) if isinstance(value, dict) else None
