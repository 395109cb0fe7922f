"""The progress page: shared memory in which a rank writes progress marks, and its agent reads them.

A mark costs a microsecond and never blocks. At the start and the end of a wait for other ranks, the
rank also reads from the kernel how long it has waited for a core. The agent can read while the rank
holds the interpreter's lock, loops or is stopped. The page is a memfd, passed at the start like the
pipe.

The rank can write anything. The page is sealed, so that it keeps its length. The agent copies it
and does not map it: a page of an agent of 0.3.0 has no seals, and one that its rank has cut would
end a process that has it mapped.

Layout: two places for the newest mark, written in turn, so that one is always complete; then a ring
of the last finished iterations. A complete record begins and ends with the same counter. After
these PAGE_BYTES come the rows of the rank's groups (group_rows.py), then its work row
(work_row.py); a page of version 1 ends before them. Times are of CLOCK_MONOTONIC, which is the same
for all processes of a host.
"""

import fcntl
import math
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ..diagnosis.step_time import Kind
from ..host.cpu_wait import CpuWait
from . import group_rows, work_row
from .group_rows import Progress, RowsWriter
from .violation import Violation
from .work_row import RowWriter, WorkRow

PAGE_BYTES = 4096
"""Of version 1: what a page of every version begins with."""
_WORK_AT = PAGE_BYTES + group_rows.BYTES
FILE_BYTES = _WORK_AT + work_row.BYTES
_SIZES = (FILE_BYTES, _WORK_AT, PAGE_BYTES)
"""Of this version's pages, and of earlier ones: a rank may be older than its agent, and the other
way round."""
RING_NUM = 60
_MARK = struct.Struct("<QqqI4xBB16sdddQ")
_DONE = struct.Struct("<QqqddBQ")
_MARK_BYTES, _RING_BYTES = 128, 256
_DONE_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ITERATIONS_NUM_MAX = 1 << 53
"""Bound of generations and iterations, as of a rank's reports."""
TIME_S_MAX = 1e10
"""No host runs for as long."""
assert _MARK.size <= _MARK_BYTES
assert _DONE.size <= _DONE_BYTES
assert _RING_BYTES + RING_NUM * _DONE_BYTES <= PAGE_BYTES

Phase = Literal[0, 1, 2]
KINDS: tuple[Kind, ...] = ("first", "usual", "boundary")
OUTSIDE_CODE: Phase = 0
"""Not training, so not counted: the rank joins, settles, recovers, saves or waits for orders."""
OWN_CODE: Phase = 1
"""The rank's own work."""
COLLECTIVE_CODE: Phase = 2
"""Waiting for other ranks."""
EVALUATE = "evaluate"
BETWEEN = ("end", "boundary", EVALUATE)
"""The marks of OUTSIDE_CODE between two iterations of a task that trains: the loop's own code, a
checkpoint, an evaluation."""
PHASES = ("outside training", "its own work", "a collective")
"""Their words, by code."""


class Mark(NamedTuple):
    """The newest mark. `num` counts from 1. `began_s` is of the iteration. Times are monotonic.
    `waited_s` is the time in collectives in this iteration, without the current one."""

    num: int
    generation: int
    iteration: int
    collective: int
    phase: int
    kind: Kind
    what: str
    at_s: float
    began_s: float
    waited_s: float

    def in_words(self, now_s: float) -> str:
        """For example `iteration 36: forward, its own work, for 4.1 s; 2 collectives entered`."""
        phase = PHASES[self.phase]
        since = f"for {max(now_s - self.at_s, 0.0):.3g} s"
        return (
            f"iteration {self.iteration}: {self.what}, {phase}, {since}; "
            f"{self.collective} collectives entered"
        )


class FinishedIteration(NamedTuple):
    """`num` counts from 1. `own_s` excludes waits for other ranks, and waits for a core: on a
    shared machine these say nothing about the rank."""

    num: int
    generation: int
    iteration: int
    iteration_s: float
    own_s: float
    kind: Kind


class ProgressWriter:
    """The rank's side, for one thread at a time. Without a page (`fd` is -1) it writes nothing."""

    def __init__(self, fd: int = -1) -> None:
        self._page: mmap.mmap | None = None
        self.rows: RowsWriter | None = None
        """What the rank has entered in each group; None: the page has no room for it."""
        if fd >= 0:
            size = os.fstat(fd).st_size
            self._page = mmap.mmap(fd, next((most for most in _SIZES if size >= most), PAGE_BYTES))
            os.close(fd)
            if len(self._page) >= _WORK_AT:
                self.rows = RowsWriter(self._page, PAGE_BYTES)
        self._num = self._num_done = 0
        self._generation = self._iteration = 0
        self._collective = 0
        self._phase: int = OUTSIDE_CODE
        self._kind = 0
        self._began_s = self._waited_s = self._waits_from_s = 0.0
        self._cpu_wait = CpuWait()
        self._starved_s = self._starved_from_s = 0.0
        """CPU wait in the rank's own work of this iteration; the counter when the phase began."""

    @property
    def work(self) -> RowWriter | None:
        """What the rank does for which its task waits; None: the page has no room for it."""
        has_room = self._page is not None and len(self._page) >= FILE_BYTES
        return RowWriter(self._page, _WORK_AT) if self._page is not None and has_room else None

    def begin(self, generation: int, iteration: int, kind: Kind) -> None:
        """An iteration begins, or continues in another generation."""
        self._generation, self._iteration, self._kind = (generation, iteration, KINDS.index(kind))
        self._collective = 0
        self._waited_s = self._starved_s = 0.0
        if self._page is not None:
            self._starved_from_s = self._cpu_wait.in_s()
        if self.rows is not None:
            self.rows.begin_iteration()
        self._phase = OWN_CODE
        self._began_s = time.monotonic()
        self.mark("begin", OWN_CODE)

    def mark(self, what: str, phase: Phase) -> None:
        """Mark what begins now; never blocks."""
        if self._page is None:
            return
        now_s = time.monotonic()
        if phase != self._phase:
            if self._phase == COLLECTIVE_CODE:
                self._waited_s += now_s - self._waits_from_s
            if phase == COLLECTIVE_CODE:
                self._waits_from_s = now_s
            starved_s = self._cpu_wait.in_s()
            if self._phase == OWN_CODE:
                self._starved_s += starved_s - self._starved_from_s
            self._starved_from_s = starved_s
            self._phase = phase
        self._num = num = self._num + 1
        _MARK.pack_into(
            self._page,
            (num & 1) * _MARK_BYTES,
            num,
            self._generation,
            self._iteration,
            self._collective,
            phase,
            self._kind,
            what.encode(),
            now_s,
            self._began_s,
            self._waited_s,
            num,
        )

    def enter(self, what: str, phase: Phase = COLLECTIVE_CODE) -> None:
        """Enter the iteration's next collective; with OWN_CODE: start it and continue to work."""
        self._collective += 1
        self.mark(what, phase)

    def finish(self) -> None:
        """The current iteration is complete."""
        if self._page is None:
            return
        self.mark("end", OUTSIDE_CODE)
        iteration_s = time.monotonic() - self._began_s
        self._num_done = num = self._num_done + 1
        _DONE.pack_into(
            self._page,
            _RING_BYTES + num % RING_NUM * _DONE_BYTES,
            num,
            self._generation,
            self._iteration,
            iteration_s,
            max(0.0, iteration_s - self._waited_s - self._starved_s),
            self._kind,
            num,
        )


class ProgressPage:
    """The agent's side: creates the page, passes `fd` to the rank, and reads. With `fd`, it reads a
    page that the rank has already. Each read raises Violation."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        if fd < 0:
            self.fd = os.memfd_create("unicron-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, FILE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        size = os.fstat(self.fd).st_size
        self._has_rows, self._has_work = size >= _WORK_AT, size >= FILE_BYTES

    def mark(self) -> Mark | None:
        """The newest complete mark; None if there is none yet."""
        newest: tuple[Any, ...] = (0,)
        first, again = (self._copy(0, 2 * _MARK_BYTES) for _ in range(2))
        for at in (0, _MARK_BYTES):
            data = first[at : at + _MARK.size]
            if data != again[at : at + _MARK.size]:
                continue  # being written: the other place holds the previous mark
            fields = _MARK.unpack(data)
            if fields[0] == fields[-1] and fields[0] > newest[0]:
                newest = fields
        if not newest[0]:
            return None
        num, generation, iteration, collective, phase, kind, what, *times, _ = newest
        if phase not in (OUTSIDE_CODE, OWN_CODE, COLLECTIVE_CODE):
            raise Violation(f"phase {phase}")
        at_s, began_s, waited_s = _checked(kind, (generation, iteration), times)
        return Mark(
            num,
            generation,
            iteration,
            collective,
            phase,
            KINDS[kind],
            what.rstrip(b"\0").decode("ascii", "replace"),
            at_s,
            began_s,
            waited_s,
        )

    def done(self, after: int) -> list[FinishedIteration]:
        """The finished iterations after number `after` that the ring still has, oldest first."""
        ring = [self._copy(_RING_BYTES, RING_NUM * _DONE_BYTES) for _ in range(2)]
        found: list[FinishedIteration] = []
        while (done := _done(ring, after + 1)) is not None and done.num == after + 1:
            found.append(done)
            after += 1
        if done is None or found or done.num <= after:
            return found
        kept = (_done(ring, num) for num in range(RING_NUM))  # it was overwritten since
        return sorted(done for done in kept if done is not None and done.num > after)

    def groups(self) -> Progress | None:
        """What the rank has entered in its groups; None: a page of version 1, or its rank, does not
        say it."""
        if not self._has_rows:
            return None
        first, again = (self._copy(PAGE_BYTES, group_rows.BYTES) for _ in range(2))
        return group_rows.read(first, again, time.monotonic())

    def num_entered(self) -> int:
        """A number that changes with each operation that the rank enters."""
        if not self._has_rows:
            return 0
        return group_rows.num_entered(self._copy(PAGE_BYTES, group_rows.BYTES))

    def work(self) -> WorkRow | None:
        """What the rank does for which its task waits; None: it does not say it."""
        if not self._has_work:
            return None
        first, again = (self._copy(_WORK_AT, work_row.BYTES) for _ in range(2))
        return work_row.read(first, again)

    def close(self) -> None:
        """A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _copy(self, at: int, num_bytes: int) -> bytes:
        """A part of the page: 1.4 us (measured), of a mapping 0.2 us."""
        data = os.pread(self.fd, num_bytes, at)
        if len(data) < num_bytes:
            raise Violation(f"it ends after {at + len(data)} bytes")
        return data


def _done(ring: list[bytes], num: int) -> FinishedIteration | None:
    """The record in the slot of this number, of two copies of the ring; None: being written."""
    at = num % RING_NUM * _DONE_BYTES
    data, again = (copy[at : at + _DONE.size] for copy in ring)
    number, generation, iteration, iteration_s, own_s, kind, last = _DONE.unpack(data)
    if number != last or data != again:
        return None
    _checked(kind, (generation, iteration), (iteration_s, own_s))
    return FinishedIteration(number, generation, iteration, iteration_s, own_s, KINDS[kind])


def _checked(kind: int, numbers: Sequence[int], times: Sequence[float]) -> Sequence[float]:
    """The times. Raises Violation if one of the values cannot be."""
    if kind >= len(KINDS):
        raise Violation(f"kind {kind}")
    for number in numbers:
        if not 0 <= number < ITERATIONS_NUM_MAX:
            raise Violation(f"number {number}")
    for time_s in times:
        if not (math.isfinite(time_s) and 0 <= time_s <= TIME_S_MAX):
            raise Violation(f"time {time_s}")
    return times
