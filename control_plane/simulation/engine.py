"""Virtual time: what is due next happens next, through the heart's one door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from ...events.records.envelope import Record, Report
from ...events.records.reports import DeadlineReached
from ...events.records.types import Body
from ..decide.advance import advance
from ..decide.decide import Decide
from ..state.cluster import ClusterState, Deadline

LEADER = "leader/simulated"


class Deadlines(dict[str, Deadline]):
    """A state's, which knows the next one without a look at all; none is due anew in place."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[float, str]] = []

    def __setitem__(self, name: str, deadline: Deadline) -> None:
        super().__setitem__(name, deadline)
        heappush(self._due, (deadline.due_s, name))

    def next(self) -> tuple[float, str]:
        """When the first is due, and its name; of one time the first by name."""
        while self._due:
            due_s, name = self._due[0]
            held = self.get(name)
            if held is not None and held.due_s == due_s:
                return due_s, name
            heappop(self._due)
        return inf, ""


class Engine:
    """One leader, its state, and all that is still to happen. `decide` is the policy.

    `answer` is told of the records that a report makes, when all of them are folded.
    """

    def __init__(self, decide: Decide) -> None:
        self._deadlines = Deadlines()
        self.state = ClusterState(deadlines=self._deadlines)
        self.now_s = 0.0
        self.num_records = 0
        self.answer: Callable[[Sequence[Record]], None] = _nobody
        self._decide = decide
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0
        self._told: dict[str, int] = {}

    def later(self, in_s: float, call: Callable[[], None]) -> None:
        """`call` in so many seconds; what is due at the same time keeps its order."""
        self._num_due += 1
        heappush(self._due, (self.now_s + in_s, self._num_due, call))

    def tell(self, source: str, body: Body, occurred_s: float | None = None) -> None:
        """A report comes in, of what occurred now or then: it is folded and decided upon."""
        report = Report(source=source, source_seq=self._next(source), body=body,
                        occurred_s=self.now_s if occurred_s is None else occurred_s)
        records = advance(self.state, report, epoch=1, at_s=self.now_s, decide=self._decide)
        self.num_records += len(records)
        self.answer(records)

    def _next(self, source: str) -> int:
        told = self._told[source] = self._told.get(source, 0) + 1
        return told

    def run(self, until_s: float) -> None:
        """All that is due by then. Of one time, a deadline comes before what else is due."""
        while True:
            due_s = self._due[0][0] if self._due else inf
            deadline_s, name = self._deadlines.next()
            if min(due_s, deadline_s) > until_s:
                self.now_s = until_s
                return
            if deadline_s <= due_s:
                self.now_s = max(self.now_s, deadline_s)
                self.tell(LEADER, DeadlineReached(deadline=name))
            else:
                self.now_s, _, call = heappop(self._due)
                call()


def _nobody(records: Sequence[Record]) -> None:
    pass
