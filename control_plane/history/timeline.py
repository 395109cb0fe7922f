"""The whole log as lists that answer at once: what slots did over time, incidents, curves of tasks.

One pass of the fold makes them, and each new record extends them. With them are kept copies of the
state, from which a past moment is folded in a few records.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct

from ...events.records.envelope import Record
from ...events.records.orders import Reconfigure
from ...events.records.reports import IterationsLogged, TaskProgressed
from ..state.cluster import ClusterState, decode_state, encode_state
from .history import IncidentHistory, TaskHistory, history, layout
from .usage import USES, Figures, UsageMeter

COPY_RECORDS = 4_000
"""Records between two copies of the state."""


class Span(Struct, frozen=True, array_like=True):
    """What slots did from one time to another, as averages: use -> slots."""

    from_s: float
    to_s: float
    slots: dict[str, float]


class Spans(UsageMeter):
    """Keeps when the slots of each task began to do what; task 0: the slots of no task."""

    def __init__(self, state: ClusterState) -> None:
        self._changes = defaultdict[int, list[tuple[int, Figures]]](list)
        super().__init__(state)

    def _set(self, key: int, at_us: int, by_use: Figures) -> None:
        super()._set(key, at_us, by_use)
        changes = self._changes[key]
        if (changes[-1][1] if changes else {}) != by_use:
            changes.append((at_us, dict(by_use)))

    def _detect(self, key: int, what: str, num: float, since_us: int, at_us: int) -> None:
        super()._detect(key, what, num, since_us, at_us)
        changes = self._changes[key]
        begin = bisect_left(changes, since_us, key=lambda one: one[0])
        end = bisect_left(changes, at_us, key=lambda one: one[0])
        changes[begin:end] = [(since_us, {"detection": num})]

    def tasks(self) -> list[int]:
        """The tasks that had slots."""
        return [key for key in self._changes if key]

    def of(self, task: int, from_s: float, to_s: float, num_max: int) -> list[Span]:
        """The spans of a task in a window: those shorter than a `num_max`-th of it are averaged."""
        found: list[Span] = []
        width_s, began_s, sums = (to_s - from_s) / num_max, from_s, defaultdict[str, float](float)

        def average(until_s: float) -> None:
            if until_s > began_s and any(sums.values()):
                _add(found, Span(began_s, until_s, {
                    use: round(sum_slot_s / (until_s - began_s), 3)
                    for use, sum_slot_s in sums.items() if sum_slot_s}))
            sums.clear()

        for since_s, until_s, slots in self._within(task, from_s, to_s):
            if until_s - since_s >= width_s:
                average(since_s)
                if slots:
                    _add(found, Span(since_s, until_s, slots))
                began_s = until_s
                continue
            for use, num in slots.items():
                sums[use] += num * (until_s - since_s)
            if until_s - began_s >= width_s:
                average(until_s)
                began_s = until_s
        average(to_s)
        return found

    def _within(self, task: int, from_s: float, to_s: float
                ) -> Iterator[tuple[float, float, Figures]]:
        changes = self._changes[task]
        first = bisect_right(changes, from_s * 1e6, key=lambda one: one[0]) - 1
        for number in range(max(first, 0), len(changes)):
            at_us, slots = changes[number]
            next_us = changes[number + 1][0] if number + 1 < len(changes) else to_s * 1e6
            if at_us / 1e6 >= to_s:
                return
            yield max(at_us / 1e6, from_s), min(next_us / 1e6, to_s), {
                use: num for use, num in slots.items() if num and use in USES}


def _add(spans: list[Span], one: Span) -> None:
    """Add a span, or lengthen the last one."""
    if spans and spans[-1].to_s == one.from_s and spans[-1].slots == one.slots:
        one = Span(spans.pop().from_s, one.to_s, one.slots)
    spans.append(one)


class Generation(Struct, frozen=True):
    """A layout of a task, from an order on."""

    at_s: float
    iteration: int
    num_ranks: int
    layout: str


class Timeline:
    """The log up to the last record that was added."""

    def __init__(self, state: ClusterState) -> None:
        """`state`: that before the first record; it is changed."""
        self.first_seq, self.first_s = state.seq + 1, state.at_s
        self._copies = [(state.seq, _copy(state))]
        self._history = history((), state)
        self.spans = self._history.meter = Spans(state)
        self.step_s = defaultdict[int, dict[int, float]](dict)
        """By task: the time of each iteration."""
        self.layouts = defaultdict[int, list[Generation]](list)

    @property
    def seq(self) -> int:
        return self._history.seq

    @property
    def at_s(self) -> float:
        return self._history.at_s

    @property
    def tasks(self) -> dict[int, TaskHistory]:
        """Also those that have left the state."""
        return self._history.tasks

    @property
    def incidents(self) -> dict[int, IncidentHistory]:
        """Also those that have left the state, by id, in the order of their times."""
        return self._history.incidents

    def add(self, records: Iterable[Record]) -> None:
        """Fold the next records."""
        for record in records:
            self.first_s = self.first_s or record.at_s
            self._history.add(record)
            body, past = record.body, self.tasks.get(getattr(record.body, "task", 0))
            if isinstance(body, TaskProgressed):
                self.step_s[body.task].update(enumerate(body.step_s, body.first_iteration))
            elif isinstance(body, IterationsLogged):
                self.step_s[body.task][body.iteration] = body.step_s
            elif isinstance(body, Reconfigure) and past is not None:
                self.layouts[body.task].append(Generation(
                    record.at_s, past.task.iteration, len(body.members), layout(body)))
            if record.seq - self._copies[-1][0] >= COPY_RECORDS:
                self._copies.append((record.seq, _copy(self._history.state)))

    def state_before(self, seq: int) -> ClusterState | None:
        """A copy of the state at most COPY_RECORDS before record `seq`; None if it has none."""
        at = bisect_right(self._copies, seq, key=lambda one: one[0]) - 1
        return decode_state(zlib.decompress(self._copies[at][1])) if at >= 0 else None


def _copy(state: ClusterState) -> bytes:
    return zlib.compress(encode_state(state), 1)
