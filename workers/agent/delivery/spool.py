"""The spool: the agent's unacknowledged reports, numbered, bounded, stored in a file.

A full spool drops first each MemoryCheckpointStored that a newer one follows; then the oldest
TaskProgressed and IterationsLogged (the loss curve gets a gap); then the oldest of the rest, faults
last; never NodeJoined, without which the log would not know the node. It drops in this order from
the slots whose ranks hold more than their quota, and only then from all, so that one rank that
reports too much does not cost the others their reports. Adjacent dropped reports become one
ReportsLost with the number of the last. If one of them was already sent, it may still reach the
log; its ReportsLost then counts as a duplicate.

The file is also the agent's journal: it stores notes by key, of which the newest counts. If the
agent restarts, its successor continues the file; the next incarnation only delivers it. The file
survives SIGKILL, but not a power cut. If the disk is full, reports are held in memory until the
file can be written again.
"""

import contextlib
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable
from io import BufferedWriter
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from ....events.decoding import from_msgpack
from ....events.log.intake import report_fault
from ....events.records import reports
from ....events.records.bounds import cut, excess
from ....events.records.codec import decode_report, encode_report, not_finite
from ....events.records.envelope import Report
from ....events.records.types import Body

SPOOL_BYTES_MAX = 16 << 20
"""Some 50,000 reports."""
NUM_KEPT = 1024
"""Acknowledged reports kept in memory: the log's server may lose the last ones at a failover."""
NO_SLOT = -1
"""The slot of the agent's own reports, which have no quota."""
RANKS_RATIO = 0.5
"""The share of the spool that is the quota of all ranks together."""
_SHRINK_RATIO = 0.9
"""A full spool drops reports down to this share, so that the next report does not fill it again."""
_FILE_SLACK_BYTES = 64 << 10
_HEAD = struct.Struct(">I")
_NOTED_CODE = 1 << 31
"""In the length of an entry: it is a _Noted."""
_LAST = "last"
"""The note of the last number, which the file needs when it has no report."""
_FAULTS = (
    reports.CollectiveFailed,
    reports.DeviceErred,
    reports.RankErrored,
    reports.RankExited,
    reports.RankStalled,
)
_log = structlog.get_logger("agent")


class _Entry:
    """A report and its encoding."""

    __slots__ = ("num_lost", "report", "slot", "wire")

    def __init__(self, report: Report, wire: bytes, slot: int = NO_SLOT) -> None:
        self.slot = slot
        self.report = report
        self.wire = wire
        body = report.body
        self.num_lost = body.num_lost if isinstance(body, reports.ReportsLost) else 0


class _Noted(Struct, frozen=True, array_like=True):
    """A note, None if it is removed, and the report that was put with it, if any."""

    wire: bytes
    key: str
    note: bytes | None


class Spool:
    """The reports of one source. `clock` gives seconds since 1970; `file` may be None. The file
    never gets much longer than twice `bytes_max`."""

    def __init__(
        self,
        source: str,
        node: str,
        clock: Callable[[], float],
        *,
        file: Path | None = None,
        bytes_max: int = SPOOL_BYTES_MAX,
        left: Iterable[_Entry] = (),
        notes: dict[str, bytes] | None = None,
    ) -> None:
        self.source = source
        self.notes = notes or {}
        """What a former agent of this incarnation knew, and this one has noted."""
        self._node = node
        self._clock = clock
        self._bytes_max = bytes_max
        self._entries: deque[_Entry] = deque(left)
        self._delivered: deque[_Entry] = deque(maxlen=NUM_KEPT)
        last = int(self.notes.pop(_LAST, b"0"))
        self.last = self._entries[-1].report.source_seq if self._entries else last
        self.acked = 0
        self._num_bytes = sum(len(entry.wire) for entry in self._entries)
        self._path = file
        self._file: BufferedWriter | None = None
        self._file_bytes = 0
        self._is_written = True
        if file is not None:
            self._rewrite()

    @property
    def num_unacked(self) -> int:
        """Number of unacknowledged reports; a ReportsLost counts as one."""
        return len(self._entries)

    def put(
        self,
        body: Body,
        occurred_s: float | None = None,
        slot: int = NO_SLOT,
        note: tuple[str, bytes] | None = None,
    ) -> Report:
        """Number and store a report, from the rank in `slot`, and a note (key, value) in the same
        write. A report that the control plane would refuse is lost: it would refuse all later ones
        too. Raises ValueError for a float that is not finite."""
        report = Report(
            source=self.source,
            source_seq=self.last + 1,
            occurred_s=self._clock() if occurred_s is None else occurred_s,
            body=cut(body),
        )
        if (why := report_fault(report) or excess(report.body)) and not not_finite(body):
            _log.error("a report is lost", kind=type(body).__name__, why=why)
            entry = self._lost(report.source_seq, 1, report.occurred_s)
            report = entry.report
        else:
            entry = _Entry(report, encode_report(report), slot)
        self.last += 1
        self._entries.append(entry)
        self._num_bytes += len(entry.wire)
        if note is None:
            self._write(entry.wire)
        else:
            self._write_note(entry.wire, *note)
        if self._num_bytes > self._bytes_max:
            self._shrink()
        return report

    def note(self, key: str, note: bytes | None) -> None:
        """Store a note; None removes it."""
        self._write_note(b"", key, note)

    def resume(self) -> None:
        """Continue a former agent's file: what it no longer has was acknowledged."""
        self.acked = self._entries[0].report.source_seq - 1 if self._entries else self.last

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
        """Drop the reports up to and including `acked`: the log has them."""
        self.acked = max(self.acked, acked)
        while self._entries and self._entries[0].report.source_seq <= acked:
            entry = self._entries.popleft()
            self._num_bytes -= len(entry.wire)
            self._delivered.append(entry)
        missing = self._path is not None and self._file is None
        if missing or self._file_bytes > 2 * self._num_bytes + _FILE_SLACK_BYTES:
            self._rewrite()

    def take_back(self, acked: int) -> int:
        """Hold again what the log has lost of the reports that it had acknowledged, those after
        `acked`. What is not kept becomes a ReportsLost. Returns how many are lost for good."""
        assert acked < self.acked
        back = [one for one in self._delivered if one.report.source_seq > acked]
        kept_from = back[0].report.source_seq - (back[0].num_lost or 1) if back else self.acked
        if num_lost := max(0, kept_from - acked):
            back.insert(0, self._lost(kept_from, num_lost, self._clock()))
        self._entries.extendleft(reversed(back))
        self._num_bytes += sum(len(one.wire) for one in back)
        self._delivered.clear()
        self.acked = acked
        self._rewrite()
        return num_lost

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

    # --- dropping reports -----------------------------------------------------------------------
    def _shrink(self) -> None:
        target_bytes = int(self._bytes_max * _SHRINK_RATIO)
        entries = list(self._entries)
        held = Counter[int]()  # bytes by slot
        for entry in entries:
            if entry.slot != NO_SLOT:
                held[entry.slot] += len(entry.wire)
        quota_bytes = self._bytes_max * RANKS_RATIO / max(len(held), 1)

        def is_above_quota(entry: _Entry) -> bool:
            return held[entry.slot] > quota_bytes

        order = (_is_superseded(entries), _is_progress, _is_no_fault, _is_not_joined)
        for may_drop in order:
            entries = self._drop(entries, may_drop, target_bytes, held, is_above_quota)
        for may_drop in order:
            entries = self._drop(entries, may_drop, target_bytes, held)
        self._entries = deque(entries)
        self._rewrite()

    def _drop(
        self,
        entries: list[_Entry],
        may_drop: Callable[[_Entry], bool],
        target_bytes: int,
        held: Counter[int],
        among: Callable[[_Entry], bool] = lambda entry: True,
    ) -> list[_Entry]:
        """Drop the oldest first; adjacent dropped reports become one ReportsLost."""
        kept: list[_Entry] = []
        for entry in entries:
            full = self._num_bytes > target_bytes
            last = kept[-1] if kept else None
            goes = entry is not entries[-1] and (
                among(entry) and may_drop(entry)
                if not entry.num_lost
                else last is not None and last.num_lost > 0
            )
            if full and goes:
                held[entry.slot] -= len(entry.wire)
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
        report = Report(
            source=self.source,
            source_seq=source_seq,
            occurred_s=occurred_s,
            body=reports.ReportsLost(node=self._node, num_lost=num_lost),
        )
        return _Entry(report, encode_report(report))

    # --- the file -------------------------------------------------------------------------------
    def _write_note(self, wire: bytes, key: str, note: bytes | None) -> None:
        if note is None:
            self.notes.pop(key, None)
        else:
            self.notes[key] = note
        self._write(msgspec.msgpack.encode(_Noted(wire, key, note)), _NOTED_CODE)

    def _write(self, data: bytes, code: int = 0) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_HEAD.pack(len(data) | code) + data)
            self._file.flush()
            self._file_bytes += _HEAD.size + len(data)
        except OSError as error:
            self._log_change(error)

    def _rewrite(self) -> None:
        if self._path is None:
            return
        self.close(forget=False)
        new = self._path.with_name(self._path.name + ".new")
        try:
            with new.open("wb") as file:
                for key, note in [*self.notes.items(), (_LAST, b"%d" % self.last)]:
                    data = msgspec.msgpack.encode(_Noted(b"", key, note))
                    file.write(_HEAD.pack(len(data) | _NOTED_CODE) + data)
                for entry in self._entries:
                    file.write(_HEAD.pack(len(entry.wire)) + entry.wire)
            new.replace(self._path)
            self._file = self._path.open("ab")
            self._file_bytes = self._file.tell()
        except OSError as error:
            self._log_change(error)
        else:
            self._log_change(None)

    def _log_change(self, error: OSError | None) -> None:
        """Log a change. A failed file is rewritten after the next acknowledgement."""
        if error is not None:
            self.close(forget=False)
        if self._is_written != (error is None):
            self._is_written = error is None
            if error is None:
                _log.info("the spool file can be written again")
            else:
                _log.warning(
                    "the spool file cannot be written; reports are held in memory", why=str(error)
                )


def load_spool(path: Path, source: str, node: str, clock: Callable[[], float]) -> Spool | None:
    """Load a spool, to continue it or to deliver it under its own source; None if it never had a
    report. The first invalid entry is dropped, and everything behind it."""
    data = path.read_bytes()
    entries: list[_Entry] = []
    notes: dict[str, bytes] = {}
    at = 0
    while at + _HEAD.size <= len(data):
        (num_bytes,) = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        wire = data[at : at + (num_bytes & ~_NOTED_CODE)]
        at += num_bytes & ~_NOTED_CODE
        try:
            if num_bytes & _NOTED_CODE:
                noted = from_msgpack(wire, _Noted)
                wire = noted.wire
                if noted.note is None:
                    notes.pop(noted.key, None)
                else:
                    notes[noted.key] = noted.note
            if wire:
                entries.append(_Entry(decode_report(wire), wire))
        except msgspec.MsgspecError:
            break
    if not entries and notes.get(_LAST, b"0") == b"0":
        return None
    return Spool(source, node, clock, file=path, left=entries, notes=notes)


def _is_superseded(entries: list[_Entry]) -> Callable[[_Entry], bool]:
    """A predicate: a later entry reports a newer in-memory checkpoint of that rank and node."""
    newest: dict[tuple[int, int, str], _Entry] = {}
    for entry in entries:
        if isinstance(body := entry.report.body, reports.MemoryCheckpointStored):
            newest[body.task, body.rank, body.node] = entry
    last = {id(entry) for entry in newest.values()}

    def is_superseded(entry: _Entry) -> bool:
        is_stored = isinstance(entry.report.body, reports.MemoryCheckpointStored)
        return is_stored and id(entry) not in last

    return is_superseded


def _is_progress(entry: _Entry) -> bool:
    return isinstance(entry.report.body, reports.TaskProgressed | reports.IterationsLogged)


def _is_no_fault(entry: _Entry) -> bool:
    return _is_not_joined(entry) and not isinstance(entry.report.body, _FAULTS)


def _is_not_joined(entry: _Entry) -> bool:
    return not isinstance(entry.report.body, reports.NodeJoined)
