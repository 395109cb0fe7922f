"""Moments of the log, as people write them: a seq, or a time."""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from ...events.records.envelope import Record
from ...events.whole_numbers import whole_number
from .requests import Refusal


def time_s(text: str) -> float | None:
    """The time of an RFC 3339 text (without a zone: UTC) in seconds; None for another text."""
    if text[4:5] != "-":  # Python also takes digits alone, however many
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at.replace(tzinfo=at.tzinfo or UTC).timestamp()


async def seq_at(text: str, first: int, last: int, read: Callable[[int], Awaitable[Record]]) -> int:
    """The last record at a moment: `SEQ`, or a time as `time_s` reads it. `first` and `last`: the
    log's seqs; `read` reads a record. Raises Refusal if the log has no such moment."""
    has = f"it has seq {first} to {last}" + "; older ones were pruned" * (first > 1)
    if (seq := whole_number(text)) is not None:
        if not first <= seq <= last:
            raise Refusal(410 if seq < first else 404, f"at: {seq} is not in the log", has)
        return seq
    at_s = time_s(text)
    if at_s is None:
        raise Refusal(
            400,
            f"at: {text[:40]!r} is neither a seq nor a time",
            "for example 41, or 2026-11-27T02:10:00Z",
        )
    if at_s > time.time() + 1.0:
        raise Refusal(404, f"at: {text[:40]} is in the future", "give a seq or a past time")
    low, high = first - 1, last
    while low < high:  # the last record whose time is not later; times in the log never fall
        middle = (low + high + 1) // 2
        if (await read(middle)).at_s <= at_s:
            low = middle
        else:
            high = middle - 1
    if low < first:
        raise Refusal(404, f"at: {text[:40]} is before the log", has)
    return low
