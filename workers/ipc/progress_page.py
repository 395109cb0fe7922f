"""A rank's pulse: one page of memory that the rank writes as it works, and its agent reads.

The rank writes a mark as it passes one: a microsecond, nobody to wait for. Only where it begins or
ends to wait for others it asks the kernel something: how long it has waited for a core. The agent
reads whenever it likes, also while the rank holds the interpreter's lock, loops or is stopped. The
page is a memfd, handed over at the start as the pipe is.

Layout: two places for the newest mark, written in turn, so that one is always whole; then a ring of
the last finished iterations. Each is between two equal counters. Times are of CLOCK_MONOTONIC,
which is one for all processes of a host.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Any, Literal, NamedTuple

from ..diagnosis.step_time import Kind
from ..host.cpu_wait import Starved

PAGE_BYTES = 4096
RING_NUM = 60
_MARK = struct.Struct("<QqqIIBB16sdddQ")
_DONE = struct.Struct("<QqqddBQ")
_MARK_BYTES, _RING_BYTES = 128, 256
_DONE_BYTES = 64
assert _MARK.size <= _MARK_BYTES
assert _DONE.size <= _DONE_BYTES
assert _RING_BYTES + RING_NUM * _DONE_BYTES <= PAGE_BYTES

Phase = Literal[0, 1, 2]
KINDS: tuple[Kind, ...] = ("first", "usual", "boundary")
OUTSIDE_CODE: Phase = 0
"""Of training: it joins, settles, restores, saves, copies, holds or leaves. Nothing here counts."""
OWN_CODE: Phase = 1
"""Work of its own."""
COLLECTIVE_CODE: Phase = 2
"""It waits for others."""


class Mark(NamedTuple):
    """The mark passed last. `num` counts them, 0: none yet. `at_s`, `began_s`: monotonic.

    `waited_s` is what this iteration has spent in collectives, without the one that it is in.
    """

    num: int
    generation: int
    iteration: int
    collective: int
    micro_batches: int
    phase: int
    kind: Kind
    what: str
    at_s: float
    began_s: float
    waited_s: float


class Done(NamedTuple):
    """A finished iteration. `num` counts them from 1.

    `own_s` is without waits for others, and without those for a core: on a machine that is shared
    those say nothing of the rank.
    """

    num: int
    generation: int
    iteration: int
    iteration_s: float
    own_s: float
    kind: Kind


class Pulse:
    """The rank's end. Takes marks from one thread at a time.

    Without a page (`fd` is -1) it writes nothing.
    """

    def __init__(self, fd: int = -1) -> None:
        self._page: mmap.mmap | None = None
        if fd >= 0:
            self._page = mmap.mmap(fd, PAGE_BYTES)
            os.close(fd)
        self._num = self._num_done = 0
        self._generation = self._iteration = 0
        self._collective = self._micro_batches = 0
        self._phase: int = OUTSIDE_CODE
        self._kind = 0
        self._began_s = self._waited_s = self._waits_from_s = 0.0
        self._starved = Starved()
        self._starved_s = self._starved_from_s = 0.0
        """In work of its own of this iteration; until that began."""

    def begin(self, generation: int, iteration: int, kind: Kind) -> None:
        """An iteration begins, or goes on in another generation."""
        self._generation, self._iteration, self._kind = (
            generation, iteration, KINDS.index(kind))
        self._collective = self._micro_batches = 0
        self._waited_s = self._starved_s = 0.0
        if self._page is not None:
            self._starved_from_s = self._starved.in_s()
        self._phase = OWN_CODE
        self._began_s = time.monotonic()
        self.mark("begin", OWN_CODE)

    def mark(self, what: str, phase: Phase) -> None:
        """What begins now; never waits."""
        if self._page is None:
            return
        now_s = time.monotonic()
        if phase != self._phase:
            if self._phase == COLLECTIVE_CODE:
                self._waited_s += now_s - self._waits_from_s
            if phase == COLLECTIVE_CODE:
                self._waits_from_s = now_s
            starved_s = self._starved.in_s()
            if self._phase == OWN_CODE:
                self._starved_s += starved_s - self._starved_from_s
            self._starved_from_s = starved_s
            self._phase = phase
        self._num = num = self._num + 1
        _MARK.pack_into(self._page, (num & 1) * _MARK_BYTES, num, self._generation,
                        self._iteration, self._collective, self._micro_batches, phase,
                        self._kind, what.encode(), now_s, self._began_s, self._waited_s, num)

    def enter(self, what: str, phase: Phase = COLLECTIVE_CODE) -> None:
        """It enters the iteration's next collective; with OWN_CODE it starts it, and works on."""
        self._collective += 1
        self.mark(what, phase)

    def worked(self) -> None:
        """A micro-batch is done: the next mark tells."""
        self._micro_batches += 1

    def finish(self) -> None:
        """The iteration that was begun is whole."""
        if self._page is None:
            return
        self.mark("end", OUTSIDE_CODE)
        iteration_s = time.monotonic() - self._began_s
        self._num_done = num = self._num_done + 1
        _DONE.pack_into(self._page, _RING_BYTES + num % RING_NUM * _DONE_BYTES, num,
                        self._generation, self._iteration, iteration_s,
                        max(0.0, iteration_s - self._waited_s - self._starved_s),
                        self._kind, num)


class Page:
    """The agent's end: it makes the page, hands over `fd`, and reads."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("unicron-pulse", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE_BYTES)
        self._page = mmap.mmap(self.fd, PAGE_BYTES, prot=mmap.PROT_READ)

    def handed_over(self) -> None:
        """The rank has it; twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def mark(self) -> Mark | None:
        """The newest whole mark; None where there is none yet."""
        best: tuple[Any, ...] = (0,)
        for place in (0, 1):
            at = place * _MARK_BYTES
            data = self._page[at: at + _MARK.size]
            if data != self._page[at: at + _MARK.size]:
                continue  # it is being written: the other place holds the one before
            told = _MARK.unpack(data)
            if told[0] == told[-1] and told[0] > best[0]:
                best = told
        if not best[0]:
            return None
        num, generation, iteration, collective, micro_batches, phase, kind, what, *times, _ = best
        at_s, began_s, waited_s = times
        return Mark(num, generation, iteration, collective, micro_batches, phase, KINDS[kind],
                    what.rstrip(b"\0").decode("ascii", "replace"), at_s, began_s, waited_s)

    def done(self, after: int) -> list[Done]:
        """Finished iterations behind `after`, oldest first, as far back as they are kept."""
        found: list[Done] = []
        while (done := self._done(after + 1)) is not None and done.num == after + 1:
            found.append(done)
            after += 1
        if done is None or found or done.num <= after:
            return found
        kept = (self._done(num) for num in range(RING_NUM))  # it went round since
        return sorted(done for done in kept if done is not None and done.num > after)

    def _done(self, num: int) -> Done | None:
        """What stands at the place of the iteration of this number; None while it is written."""
        at = _RING_BYTES + num % RING_NUM * _DONE_BYTES
        data = self._page[at: at + _DONE.size]
        number, generation, iteration, iteration_s, own_s, kind, again = _DONE.unpack(data)
        if number != again or data != self._page[at: at + _DONE.size]:
            return None
        return Done(number, generation, iteration, iteration_s, own_s, KINDS[kind])

    def close(self) -> None:
        self.handed_over()
        self._page.close()
