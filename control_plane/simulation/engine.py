"""Virtual time: an event queue that runs the decider; the next event is the earliest one due."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from ...events.records.envelope import Record, Report
from ...events.records.reports import DeadlineReached
from ...events.records.types import Body
from ..decide.advance import advance
from ..decide.decide import Decide
from ..fold.edits import running_deadlines
from ..state.cluster import ClusterState

LEADER = "leader/simulated"


class Engine:
    """One leader, its state, and the queue of future events. `decide` comes from the policy.
    `on_records` is called with the records of each report, after all of them are folded."""

    def __init__(self, decide: Decide) -> None:
        self.state = ClusterState()
        self.now_s = 0.0
        self.num_records = 0
        self.on_records: Callable[[Sequence[Record]], None] = lambda _: None
        self._decide = decide
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0
        self._last_seq: dict[str, int] = {}

    def call_later(self, in_s: float, call: Callable[[], None]) -> None:
        """Run `call` after `in_s` seconds. Calls due at the same time keep their order."""
        self._num_due += 1
        heappush(self._due, (self.now_s + in_s, self._num_due, call))

    def report(self, source: str, body: Body, occurred_s: float | None = None) -> None:
        """Fold a report of what occurred at `occurred_s`, by default now, and decide on it."""
        report = Report(
            source=source,
            source_seq=self._next(source),
            body=body,
            occurred_s=self.now_s if occurred_s is None else occurred_s,
        )
        records = advance(self.state, report, epoch=1, at_s=self.now_s, decide=self._decide)
        self.num_records += len(records)
        self.on_records(records)

    def _next(self, source: str) -> int:
        seq = self._last_seq[source] = self._last_seq.get(source, 0) + 1
        return seq

    def run(self, until_s: float) -> None:
        """Process all events due by `until_s`. A deadline precedes a call due at the same time."""
        while True:
            due_s = self._due[0][0] if self._due else inf
            deadline_s, name = min(
                ((one.due_s, name) for name, one in running_deadlines(self.state).items()),
                default=(inf, ""),
            )
            if min(due_s, deadline_s) > until_s:
                self.now_s = until_s
                return
            if deadline_s <= due_s:
                self.now_s = max(self.now_s, deadline_s)
                self.report(LEADER, DeadlineReached(deadline=name))
            else:
                self.now_s, _, call = heappop(self._due)
                call()
