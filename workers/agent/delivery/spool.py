"""What an agent has told and nobody has acknowledged: numbered, bounded, kept in a file.

    put ──▶ [ acked ............ sent ............ last ]
             trimmed by the      handed over,      waits for its turn
             log's cursor        may be sent again

A report gets its number when it is put and keeps it. When the spool is full, each
MemoryCheckpointStored goes first that has a newer one behind it, of the same rank and keeper; then
the oldest TaskProgressed or IterationsLogged (a loss curve with a hole), then the oldest of all but
NodeJoined, without which the log would know no node. What went leaves a ReportsLost in its place
with the number of the last one that it stands for; neighbours become one. Reports that were handed
over already may still reach the log from the intake: then their ReportsLost comes too late and is a
duplicate.

The file is for the agent that comes after this one: it outlives SIGKILL, not a power cut. A disk
that is full, or gone, ends no agent: reports are kept in memory alone until it can be written.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterable
from io import BufferedWriter
from pathlib import Path

import msgspec
import structlog

from ....events.records.codec import decode_report, encode_report
from ....events.records.envelope import Report
from ....events.records.reports import (
    IterationsLogged,
    MemoryCheckpointStored,
    NodeJoined,
    ReportsLost,
    TaskProgressed,
)
from ....events.records.types import Body

SPOOL_BYTES_MAX = 16 << 20
"""Some 50,000 reports."""
_ROOM_RATIO = 0.9
"""A full spool is emptied down to this share, so that not every report has to make room."""
_FILE_SLACK_BYTES = 64 << 10
_HEAD = struct.Struct(">I")
_log = structlog.get_logger("agent")


class _Entry:
    """A report and its bytes."""

    __slots__ = ("num_lost", "report", "wire")

    def __init__(self, report: Report, wire: bytes) -> None:
        self.report = report
        self.wire = wire
        body = report.body
        self.num_lost = body.num_lost if isinstance(body, ReportsLost) else 0


class Spool:
    """The reports of one source. `clock` gives seconds since 1970; `file` may be None.

    The file is rewritten when it is twice as long as what it must hold, so that it is never longer
    than twice `bytes_max` and a little.
    """

    def __init__(self, source: str, node: str, clock: Callable[[], float], *,
                 file: Path | None = None, bytes_max: int = SPOOL_BYTES_MAX,
                 left: Iterable[_Entry] = ()) -> None:
        self.source = source
        self.acked = 0
        self._node = node
        self._clock = clock
        self._bytes_max = bytes_max
        self._entries: deque[_Entry] = deque(left)
        self.last = self._entries[-1].report.source_seq if self._entries else 0
        self._num_bytes = sum(len(entry.wire) for entry in self._entries)
        self._path = file
        self._file: BufferedWriter | None = None
        self._file_bytes = 0
        self._is_written = True
        if file is not None:
            self._rewrite()

    @property
    def num_unacked(self) -> int:
        """Reports that the log has not acknowledged, a ReportsLost counted as one."""
        return len(self._entries)

    def put(self, body: Body, occurred_s: float | None = None) -> Report:
        """Number a report and keep it. Raises ValueError for a float that is not finite."""
        report = Report(source=self.source, source_seq=self.last + 1,
                        occurred_s=self._clock() if occurred_s is None else occurred_s, body=body)
        entry = _Entry(report, encode_report(report))
        self.last += 1
        self._entries.append(entry)
        self._num_bytes += len(entry.wire)
        self._write(entry)
        if self._num_bytes > self._bytes_max:
            self._make_room()
        return report

    def behind(self, after: int, num_max: int) -> list[Report]:
        """Reports with a number above `after`, in order, at most `num_max`. Linear."""
        found: list[Report] = []
        for entry in self._entries:
            if len(found) == num_max:
                break
            if entry.report.source_seq > after:
                found.append(entry.report)
        return found

    def trim(self, acked: int) -> None:
        """The log has everything up to and including `acked`."""
        self.acked = max(self.acked, acked)
        while self._entries and self._entries[0].report.source_seq <= acked:
            self._num_bytes -= len(self._entries.popleft().wire)
        missing = self._path is not None and self._file is None
        if missing or self._file_bytes > 2 * self._num_bytes + _FILE_SLACK_BYTES:
            self._rewrite()

    def lose(self, acked: int) -> None:
        """The log has forgotten what it had acknowledged behind `acked`: say so to it."""
        assert acked < self.acked
        self._entries.appendleft(self._lost(self.acked, self.acked - acked, self._clock()))
        self._num_bytes += len(self._entries[0].wire)
        self.acked = acked
        self._rewrite()

    def close(self, *, forget: bool) -> None:
        """Close the file; `forget` deletes it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        if forget and self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None

    # --- making room ----------------------------------------------------------------------------
    def _make_room(self) -> None:
        room = int(self._bytes_max * _ROOM_RATIO)
        entries = list(self._entries)
        for may_go in (_is_outdone(entries), _is_progress, _is_not_joined):
            entries = self._drop(entries, may_go, room)
        self._entries = deque(entries)
        self._rewrite()

    def _drop(self, entries: list[_Entry], may_go: Callable[[_Entry], bool],
              room: int) -> list[_Entry]:
        """Oldest first; neighbours that went become one ReportsLost."""
        kept: list[_Entry] = []
        for entry in entries:
            full = self._num_bytes > room
            last = kept[-1] if kept else None
            goes = entry is not entries[-1] and (may_go(entry) if not entry.num_lost else
                                                 last is not None and last.num_lost > 0)
            if full and goes:
                num_lost = entry.num_lost or 1
                if last is not None and last.num_lost:
                    num_lost += last.num_lost
                    self._num_bytes -= len(kept.pop().wire)
                lost = self._lost(entry.report.source_seq, num_lost, entry.report.occurred_s)
                self._num_bytes += len(lost.wire) - len(entry.wire)
                entry = lost
            kept.append(entry)
        return kept

    def _lost(self, source_seq: int, num_lost: int, occurred_s: float) -> _Entry:
        report = Report(source=self.source, source_seq=source_seq, occurred_s=occurred_s,
                        body=ReportsLost(node=self._node, num_lost=num_lost))
        return _Entry(report, encode_report(report))

    # --- the file -------------------------------------------------------------------------------
    def _write(self, entry: _Entry) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_HEAD.pack(len(entry.wire)) + entry.wire)
            self._file.flush()
            self._file_bytes += _HEAD.size + len(entry.wire)
        except OSError as error:
            self._say(error)

    def _rewrite(self) -> None:
        if self._path is None:
            return
        self.close(forget=False)
        new = self._path.with_name(self._path.name + ".new")
        try:
            with new.open("wb") as file:
                for entry in self._entries:
                    file.write(_HEAD.pack(len(entry.wire)) + entry.wire)
            new.replace(self._path)
            self._file = self._path.open("ab")
            self._file_bytes = self._file.tell()
        except OSError as error:
            self._say(error)
        else:
            self._say(None)

    def _say(self, error: OSError | None) -> None:
        """On change; a file that failed is written anew when the log has acknowledged more."""
        if error is not None:
            self.close(forget=False)
        if self._is_written != (error is None):
            self._is_written = error is None
            if error is None:
                _log.info("the spool's file is written again")
            else:
                _log.warning("the spool's file cannot be written; reports are kept in memory",
                             why=str(error))


def load(path: Path, node: str, clock: Callable[[], float]) -> Spool | None:
    """What a predecessor left, to be delivered under its own source; None if nothing is left.

    A last entry that was cut off by the predecessor's end is dropped, as is all behind nonsense.
    """
    data = path.read_bytes()
    entries: list[_Entry] = []
    at = 0
    while at + _HEAD.size <= len(data):
        (num_bytes,) = _HEAD.unpack_from(data, at)
        wire = data[at + _HEAD.size : at + _HEAD.size + num_bytes]
        at += _HEAD.size + num_bytes
        try:
            entries.append(_Entry(decode_report(wire), wire))
        except msgspec.MsgspecError:
            break
    if not entries:
        return None
    return Spool(entries[0].report.source, node, clock, file=path, left=entries)


def _is_outdone(entries: list[_Entry]) -> Callable[[_Entry], bool]:
    """Whether it tells of a copy, and a later one of them tells of a newer in its place."""
    newest: dict[tuple[int, int, str], _Entry] = {}
    for entry in entries:
        if isinstance(body := entry.report.body, MemoryCheckpointStored):
            newest[body.task, body.rank, body.node] = entry
    last = {id(entry) for entry in newest.values()}
    return lambda entry: (isinstance(entry.report.body, MemoryCheckpointStored)
                          and id(entry) not in last)


def _is_progress(entry: _Entry) -> bool:
    return isinstance(entry.report.body, TaskProgressed | IterationsLogged)


def _is_not_joined(entry: _Entry) -> bool:
    return not isinstance(entry.report.body, NodeJoined)
