"""A recorded log, measured: what its tasks earned, by the same account as on paper."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ....events.records import decisions as d
from ....events.records import orders as o
from ....events.records import reports
from ....events.records.envelope import Record
from ....events.records.reports import IterationsLogged
from ....events.spec import policy as r
from ...history.history import History
from ...state.cluster import ClusterState, live_tasks
from ...state.incident import FARTHER
from ...state.task import Task
from ...throughput.table import rate_at
from ..accounting import Account, Earnings, Key
from ..run import Outcome
from ..task_progress import Job, Kept
from ..trace.external_event import is_felt
from .recorded_costs import Measured
from .recorded_faults import Befallen, Stroke


@dataclass
class Followed(Job):
    """A task whose log says how far it was: what was credited to it by then."""

    anchors: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    """Iterations done, FLOP credited by then, and those of one iteration; ascending."""
    before: tuple[int, float] | None = None
    """Of a command that starts again: its round, and what was done before."""

    def fall_back(self, at_s: float) -> float:
        """What a command has to do again only its own log tells, later."""
        self.settle(at_s)
        self.before = (self.round, self.done_flop)
        return 0.0

    def tells(self, at_s: float, since_s: float, iterations: int, iteration_flop: float) -> None:
        """So many iterations are done, since so long."""
        self.settle(at_s)
        done_flop = max(self.done_flop - self.rate_flops * since_s, 0.0)
        self.anchors.append((iterations, done_flop, iteration_flop))

    def back_to(self, at_s: float, iterations: int) -> float:
        """It goes on from so many iterations: the FLOP lost, none from before the horizon."""
        self.settle(at_s)
        to = max(self._done_at(iterations), self.began_flop)
        lost, self.done_flop = max(self.done_flop - to, 0.0), min(self.done_flop, to)
        self.anchors = [one for one in self.anchors if one[0] <= iterations]
        return lost

    def _done_at(self, iterations: int) -> float:
        at = bisect_right(self.anchors, iterations, key=lambda one: one[0])
        if not self.anchors:
            return 0.0
        num, done_flop, flop = self.anchors[max(at - 1, 0)]
        if 0 < at < len(self.anchors):
            later, later_flop, _ = self.anchors[at]
            flop = (later_flop - done_flop) / (later - num)
        return done_flop + (iterations - num) * flop


class Begun(NamedTuple):
    """How the cluster was when the horizon began: tasks with their weights, nodes with slots."""

    tasks: dict[int, float]
    slots: dict[str, int]
    drained: tuple[str, ...]
    policy: r.Policy


class Meter:
    """Folds a log, record by record, and keeps the account of its tasks.

    `tables` by task: what it achieves, in the whole log. The horizon begins at `begin_s`, or when
    all train that were given slots.
    """

    def __init__(self, befallen: Befallen, tables: Mapping[int, d.ThroughputSet],
                 earnings: Earnings, begin_s: float | None = None) -> None:
        self._history = History()
        self.state = self._history.state
        self.measured = Measured(self._history, tables)
        self.account = Account(self.state, earnings, self._opens)
        self.began_s = -1.0
        self.begun: Begun | None = None
        self.counts: Counter[str] = Counter()
        self._tables, self._begin_s = tables, begin_s
        self._strokes, self._behind_s = befallen.strokes[::-1], befallen.behind_s
        self._marks_s = [one.at_s for one in befallen.happenings if is_felt(one)][::-1]
        self._pending: dict[int, list[Key]] = {}
        """By the seq that will tell of it: processes that are gone."""
        self._jobs: dict[int, Followed] = {}

    def _opens(self, task: Task) -> Job:
        job = self._jobs[task.id] = Followed(task.id, self._tables[task.id], 0.0, Kept(0.0),
                                             Kept(0.0))
        return job

    def measure(self, records: Iterable[Record], end_s: float | None = None) -> Outcome:
        """All of it, until `end_s` or its last record."""
        for record in records:
            if end_s is not None and record.at_s > end_s:
                break
            self.add(record)
        last_s = self.state.at_s if end_s is None else end_s
        self._until(last_s)
        self.account.end(last_s)
        return Outcome(self.account.earnings, self.began_s, self.account.transitions, self.counts,
                       0)

    def add(self, record: Record) -> None:
        """The next record."""
        at_s, body = record.at_s, record.body
        self._until(at_s)
        if isinstance(body, reports.NodeLeft | reports.NodeJoined):
            self.account.strikes(at_s, self._on(body.node), body.node)
        elif isinstance(body, reports.Quiesced):
            self._quiesced(at_s, body)
        self._history.add(record)
        self.measured.see(record)
        if self.began_s >= 0:
            self.counts[record.kind] += 1
        touched = self.account.read(at_s, record)
        for key in self._pending.pop(record.seq, ()):
            if key[0] in self._jobs:
                self._jobs[key[0]].told = True
                touched.append(key[0])
        self._goes_on(at_s, record)
        for number in touched:
            self.account.look(at_s, number)
        if self.began_s < 0 and self._begin_s is None and _all_train(self.state):
            self._begin(at_s)

    def _begin(self, at_s: float) -> None:
        state, self.began_s = self.state, at_s
        there = {name: node for name, node in state.nodes.items() if node.health == "healthy"}
        self.begun = Begun(
            tasks={task.id: task.weight for task in live_tasks(state) if not task.ending},
            slots={name: node.num_slots for name, node in there.items() if not node.drained},
            drained=tuple(name for name, node in there.items() if node.drained),
            policy=state.policy)
        self._marks_s = [one for one in self._marks_s if one > at_s]
        self.account.begin(at_s)

    def _until(self, at_s: float) -> None:
        """What befell the cluster by then."""
        if self.began_s < 0 and self._begin_s is not None and at_s > self._begin_s:
            self._strike(self._begin_s)
            self._begin(self._begin_s)
        self._strike(at_s)

    def _strike(self, until_s: float) -> None:
        while True:
            next_s = self._strokes[-1].at_s if self._strokes else until_s + 1
            while self._marks_s and self._marks_s[-1] <= min(next_s, until_s):
                mark_s = self._marks_s.pop()
                if self.began_s >= 0:
                    self.account.earnings.befalls(mark_s)
            if next_s > until_s:
                return
            self._struck(self._strokes.pop())

    def _struck(self, stroke: Stroke) -> None:
        keys = self._on(stroke.node) if stroke.node else [stroke.key]
        keys = [key for key in keys if key[0] in self.state.tasks and stroke.generation in (
            0, self.state.tasks[key[0]].generation)]
        if not stroke.generation:
            self._pending[stroke.seq] = keys
        self.account.strikes(stroke.at_s, keys, stroke.node)

    def _on(self, node: str) -> list[Key]:
        return [(task.id, rank.rank, rank.attempt) for task in self.state.tasks.values()
                for rank in task.ranks.values() if rank.slot.node == node]

    def _quiesced(self, at_s: float, body: reports.Quiesced) -> None:
        task = self.state.tasks.get(body.task)
        if task is not None and body.generation == task.generation and (
                task.phase == "quiescing" and task.mode == "boundary"):
            self.account.stands(at_s, body.task)

    def _goes_on(self, at_s: float, record: Record) -> None:
        """How far a task is, and what it goes on from."""
        body = record.body
        task = self.state.tasks.get(getattr(body, "task", 0))
        if task is None or task.id not in self._jobs:
            return
        job = self._jobs[task.id]
        if isinstance(body, o.Resume):
            gone = [key for keys in self._pending.values() for key in keys]
            if not any((task.id, one.rank, one.attempt) in gone for one in task.members):
                self.account.goes_on(task.id)
        elif isinstance(body, reports.Reconfigured):
            if body.origin in FARTHER and body.generation == task.generation:
                self.account.undo(task.id, job.back_to(at_s, body.step_version))
        elif isinstance(body, reports.TaskProgressed):
            if body.generation == task.generation and body.step_s:
                job.tells(at_s, self._since_s(record), body.first_iteration + len(body.step_s),
                          rate_at(job.table, len(task.members)) * body.step_s[-1])
        elif isinstance(body, IterationsLogged):
            self._logged(record, task, job, body)
        elif isinstance(body, d.TaskEnded):
            self.account.leaves(at_s, task.id)

    def _since_s(self, record: Record) -> float:
        """How long ago that occurred."""
        node = record.source.rpartition("/")[0]
        return max(record.at_s - record.occurred_s - self._behind_s.get(node, 0.0), 0.0)

    def _logged(self, record: Record, task: Task, job: Followed, body: IterationsLogged) -> None:
        """A command tells how far it is; the first time after a restart, what it does again."""
        at_s = record.at_s
        if job.before is not None and job.before[0] == task.rounds:
            job.settle(at_s)
            new_flop = job.done_flop - job.before[1]
            job.done_flop -= new_flop
            self.account.undo(task.id, job.back_to(at_s, body.iteration - body.num_iterations))
            job.done_flop += new_flop
            job.before = None
        job.tells(at_s, self._since_s(record), body.iteration,
                  rate_at(job.table, len(task.target)) * body.step_s)


def _all_train(state: ClusterState) -> bool:
    seated = [task for task in state.tasks.values() if task.target]
    return bool(seated) and all(task.phase == "training" for task in seated)
