"""The log as lists that answer at once: what slots did over time, incidents, curves of tasks.

One pass of the fold makes them, each new record extends them. Copies of the state are kept as well:
any past moment is few records behind one.
"""

import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from math import fsum

from ...events.records.envelope import Record
from ...events.records.orders import Reconfigure
from ...events.records.reports import IterationsLogged, TaskProgressed
from ..state.cluster import ClusterState, decode_state, encode_state
from .history import history, layout
from .usage import USES, Figures, UsageMeter

COPY_RECORDS = 4_000
"""Records between two copies of the state."""
Span = tuple[float, float, dict[str, float]]
"""From when until when (s), and how many slots did what: use -> slots, an average."""


class Spans(UsageMeter):
    """Keeps when the slots of each task began to do what; task 0: the slots of no task."""

    def __init__(self, state: ClusterState) -> None:
        self.changes = defaultdict[int, list[tuple[int, Figures]]](list)
        super().__init__(state)

    def _set(self, key: int, at_us: int, by_use: Figures) -> None:
        super()._set(key, at_us, by_use)
        slots = {use: num for use, num in by_use.items() if num and use in USES}
        if (self.changes[key][-1][1] if self.changes[key] else {}) != slots:
            self.changes[key].append((at_us, slots))

    def _detect(self, key: int, what: str, num: float, since_us: int, at_us: int) -> None:
        super()._detect(key, what, num, since_us, at_us)
        begin, end = (
            bisect_left(self.changes[key], us, key=lambda one: one[0]) for us in (since_us, at_us)
        )
        self.changes[key][begin:end] = [(since_us, {"detection": num})]

    def of(self, task: int, from_s: float, to_s: float, num_max: int) -> list[Span]:
        """The spans of a task in a window: those shorter than a `num_max`-th of it are averaged."""
        found: list[Span] = []
        width_s, short_s, slot_s = (to_s - from_s) / num_max, from_s, defaultdict[str, float](float)

        def add(since_s: float, until_s: float, slots: Figures) -> None:
            if found and found[-1][1:] == (since_s, slots):
                since_s = found.pop()[0]
            if slots and until_s > since_s:
                found.append((since_s, until_s, slots))

        def add_average(until_s: float) -> None:
            add(
                short_s,
                until_s,
                {
                    use: round(value / (until_s - short_s), 3)
                    for use, value in slot_s.items()
                    if value
                },
            )
            slot_s.clear()

        changes = self.changes[task]
        first = max(bisect_right(changes, from_s * 1e6, key=lambda one: one[0]) - 1, 0)
        for number, (at_us, slots) in enumerate(changes[first:], first + 1):
            since_s = max(at_us / 1e6, from_s)
            until_s = min(changes[number][0] / 1e6 if number < len(changes) else to_s, to_s)
            if since_s >= to_s:
                break
            if until_s - since_s >= width_s:
                add_average(since_s)
                add(since_s, until_s, slots)
                continue
            short_s = short_s if slot_s else since_s
            for use, num in slots.items():
                slot_s[use] += num * (until_s - since_s)
            if until_s - short_s >= width_s:
                add_average(until_s)
        add_average(to_s)
        return found


class Timeline:
    """The log up to the last record that was added."""

    def __init__(self, state: ClusterState) -> None:
        """`state`: that before the first record; it is changed."""
        self.first_seq, self.first_s = state.seq + 1, state.at_s
        self._copies = [(state.seq, zlib.compress(encode_state(state), 1))]
        self.past = history((), state)
        self.spans = self.past.meter = Spans(state)
        self.step_s = defaultdict[int, dict[int, float]](dict)
        self.layouts = defaultdict[int, list[tuple[float, int, str]]](list)
        """By task: since when, from which iteration on, and what."""

    def add(self, records: Iterable[Record]) -> None:
        """Fold the next records."""
        for record in records:
            self.first_s = self.first_s or record.at_s
            self.past.add(record)
            body = record.body
            if isinstance(body, TaskProgressed):
                self.step_s[body.task].update(enumerate(body.step_s, body.first_iteration))
            elif isinstance(body, IterationsLogged):
                self.step_s[body.task][body.iteration] = body.step_s
            elif isinstance(body, Reconfigure) and body.task in self.past.tasks:
                self.layouts[body.task].append(
                    (record.at_s, self.past.tasks[body.task].task.iteration, layout(body))
                )
            if record.seq - self._copies[-1][0] >= COPY_RECORDS:
                self._copies.append((record.seq, zlib.compress(encode_state(self.past.state), 1)))

    def state_before(self, seq: int) -> ClusterState | None:
        """A copy of the last state kept until record `seq`; None if there is none."""
        at = bisect_right(self._copies, seq, key=lambda one: one[0]) - 1
        return decode_state(zlib.decompress(self._copies[at][1])) if at >= 0 else None

    def most_used(
        self, from_s: float, to_s: float, num_max: int, tasks_num_max: int
    ) -> tuple[list[tuple[int, list[Span]]], int]:
        """The spans of the tasks with most slot time in a window, and how many have any."""
        found = [
            (task, spans)
            for task in list(self.spans.changes)
            if task and (spans := self.spans.of(task, from_s, to_s, num_max))
        ]
        slot_s = {
            task: fsum(
                (until_s - since_s) * fsum(slots.values()) for since_s, until_s, slots in spans
            )
            for task, spans in found
        }
        most = sorted(found, key=lambda one: -slot_s[one[0]])[:tasks_num_max]
        return sorted(most, key=lambda one: one[0]), len(found)
