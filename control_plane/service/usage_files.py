"""The figures of the sealed log in a file: those of a year are not counted from its records.

A file has the figures from the log's beginning until the end of a segment. The newest two stay,
also when segments are pruned: a reader may have listed the older one. Without a file, or with one
that is damaged or of another schema, the log is counted again.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from math import inf

import msgspec

from ...events.decoding import from_msgpack
from ...events.errors import CorruptLog, Unavailable
from ...events.log.segments import SealedLog
from ...events.records.envelope import Record
from ..fold.fold import fold
from ..history.history import usage as usage_of
from ..history.usage import SCHEMA, Usage
from . import snapshots

BATCH_SEGMENTS_NUM = 10
"""Segments that are counted at once."""
FILES_NUM = 2


def of_sealed(log: SealedLog, length_s_max: float = inf) -> Usage:
    """The figures of the log, and of what was pruned before. What no file has is counted now, and
    written if that is possible. Raises OSError, CorruptLog, and Unavailable after `length_s_max`:
    the next call goes on from there."""
    began_s = time.monotonic()
    usage, after = _kept(log)
    while missing := [one for one in log.chain if one.first > after]:
        last = missing[:BATCH_SEGMENTS_NUM][-1]
        state, _ = snapshots.newest(log.folder, after)
        for record in _between(log, state.seq, after):
            fold(state, record)
        usage.add(usage_of(_between(log, after, last.last), state))
        with suppress(OSError):  # a reader that may not write counts again each time
            log.folder.write_snapshot(
                last.last, last.epoch, SCHEMA, msgspec.msgpack.encode((last.digest, usage)), "usage"
            )
            log.folder.remove(log.folder.snapshots("usage")[:-FILES_NUM])
        after = last.last
        if after < log.last and time.monotonic() - began_s > length_s_max:
            raise Unavailable(
                f"the log is not counted yet: records {after + 1} to {log.last} are left",
                "ask again: the count goes on",
            )
    return usage


def _kept(log: SealedLog) -> tuple[Usage, int]:
    """The figures of the newest file that is of this log, and until which record they are."""
    ends = {one.digest: one.last for one in log.chain}
    if log.chain:
        ends[log.chain[0].prev] = log.first - 1  # pruned, and counted before
    for file in reversed(log.folder.snapshots("usage")):
        with suppress(CorruptLog, msgspec.MsgspecError):
            schema, figures = log.folder.read_snapshot(file)
            if schema == SCHEMA:
                digest, usage = from_msgpack(figures, tuple[str, Usage])
                if digest in ends:
                    return usage, ends[digest]
    return Usage(), log.first - 1


def _between(log: SealedLog, after: int, last: int) -> Iterator[Record]:
    return takewhile(lambda one: one.seq <= last, log.records(after=after))
