"""Where two logs differ: the first record, and the fields of the states after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, cast

import msgspec
from msgspec import Struct

from ...events.records.codec import decode_record, to_plain
from ...events.records.envelope import Record
from ..fold.fold import fold
from ..state.cluster import ClusterState

NOT_COMPARED = ("seq", "at_s")
"""Fields of the state that say only which moment it is of."""


class Difference(Struct, frozen=True):
    """A field by its path, such as `tasks.4.phase`, with both values; None: it is absent."""

    field: str
    a: Any
    b: Any


class LogDifference(Struct):
    """The first records that differ; None: that log has ended. Without `fields` the states never
    differ; else they differ from `state_seq` on."""

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
        if found is not None and (fields := list(state_differences(one, other))):
            found.fields, found.state_seq = fields, max(one.seq, other.seq)
            break
    return found


def state_differences(a: ClusterState, b: ClusterState) -> Iterator[Difference]:
    """The fields of two states that differ, in the order of ClusterState."""
    return differences(_plain(a), _plain(b))


def _plain(state: ClusterState) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(state, str_keys=True)
    data["orders"] = {str(seq): to_plain(decode_record(wire)) for seq, wire in state.orders.items()}
    return {name: value for name, value in data.items() if name not in NOT_COMPARED}


def differences(a: Any, b: Any, field: str = "") -> Iterator[Difference]:
    """The values that differ in two pieces of plain data."""
    if a == b:
        return
    one, other = _items(a), _items(b)
    if one is None or other is None:
        yield Difference(field, a, b)
        return
    for name in dict.fromkeys((*one, *other)):
        yield from differences(one.get(name), other.get(name), f"{field}.{name}" if field else name)


def _items(value: Any) -> dict[str, Any] | None:
    """The items of a mapping or list by name or index; None for a single value."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(cast(list[Any], value)))
    if not isinstance(value, dict):
        return None
    return {str(key): item for key, item in cast(dict[Any, Any], value).items()}
