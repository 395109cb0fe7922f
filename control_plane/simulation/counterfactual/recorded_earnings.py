"""WAF accounting of a recorded log, with the same classes as for a simulated run."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ....events.records import decisions as d
from ....events.records import orders as o
from ....events.records import reports
from ....events.records.envelope import Record
from ....events.spec import policy as r
from ...history.history import History
from ...state.cluster import live_tasks
from ...state.incident import FARTHER
from ...state.task import Task
from ...throughput.table import rate_at
from ..accounting import Accounting, Key, WafAccount
from ..run import Outcome
from ..task_progress import SavedState, TaskProgress
from ..trace.external_event import causes_loss
from .recorded_costs import RecordedCosts
from .recorded_faults import ProcessLoss, RecordedFaults


@dataclass
class RecordedProgress(TaskProgress):
    """Progress of a task of a log, corrected by the iterations that the task reports."""

    anchors: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    """Completed iterations, FLOP credited for them, and FLOP of one iteration; ascending."""
    before: tuple[int, float] | None = None
    """Of a command that started again: its round, and the work done before that start."""

    def restore(self, at_s: float) -> float:
        """Keep the work for now; `_logged` corrects it when the command reports an iteration."""
        self.settle(at_s)
        self.before = (self.round, self.done_flop)
        return 0.0

    def on_iterations(
        self, at_s: float, since_s: float, iterations: int, iteration_flop: float
    ) -> None:
        """The task had just completed `iterations` iterations `since_s` ago."""
        self.settle(at_s)
        done_flop = max(self.done_flop - self.rate_flops * since_s, 0.0)
        self.anchors.append((iterations, done_flop, iteration_flop))

    def rewind(self, at_s: float, iterations: int) -> float:
        """The task resumes from this iteration. Returns the lost FLOP within the horizon."""
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


class StartState(NamedTuple):
    """The cluster at the start of the horizon: the weight of each task, the slots of each node."""

    tasks: dict[int, float]
    slots: dict[str, int]
    drained: tuple[str, ...]
    policy: r.Policy


class LogAccounting:
    """Folds a log record by record and accounts for its tasks. `tables`: the throughput by task for
    the whole log. The horizon starts when all tasks with slots train."""

    def __init__(
        self, faults: RecordedFaults, tables: Mapping[int, d.ThroughputSet], earnings: WafAccount
    ) -> None:
        self._history = History()
        self.state = self._history.state
        self.measured = RecordedCosts(self._history, tables)
        self.account = Accounting(self.state, earnings, self._new_progress)
        self.began_s = -1.0
        self.start_state: StartState | None = None
        self.counts: Counter[str] = Counter()
        self._tables = tables
        self._losses, self._behind_s = faults.losses[::-1], faults.behind_s
        self._marks_s = [one.at_s for one in faults.events if causes_loss(one)][::-1]
        self._unreported: dict[int, list[Key]] = {}
        """Processes that have ended, by the seq of the record that reports their end."""
        self._jobs: dict[int, RecordedProgress] = {}

    def _new_progress(self, task: Task) -> TaskProgress:
        job = self._jobs[task.id] = RecordedProgress(
            self._tables[task.id], 0.0, SavedState(0.0), SavedState(0.0)
        )
        return job

    def measure(self, records: Iterable[Record]) -> Outcome:
        """Account for the log until its last record."""
        for record in records:
            self.add(record)
        return self.end(self.state.at_s)

    def end(self, last_s: float) -> Outcome:
        """The account until this time."""
        self._advance(last_s)
        self.account.end(last_s)
        return Outcome(
            self.account.earnings, self.began_s, self.account.transitions, self.counts, 0
        )

    def add(self, record: Record) -> None:
        at_s, body = record.at_s, record.body
        self._advance(at_s)
        if isinstance(body, reports.NodeLeft | reports.NodeJoined):
            self.account.stop_processes(at_s, self._processes_on(body.node), body.node)
        elif isinstance(body, reports.Quiesced):
            task = self.state.tasks.get(body.task)
            if (
                task is not None
                and body.generation == task.generation
                and (task.phase == "quiescing" and task.mode == "boundary")
            ):
                self.account.reach_boundary(at_s, body.task)
        self._history.add(record)
        self.measured.see(record)
        if self.began_s >= 0:
            self.counts[record.kind] += 1
        changed = self.account.read(at_s, record)
        for key in self._unreported.pop(record.seq, ()):
            if key[0] in self._jobs:
                self._jobs[key[0]].is_reported = True
                changed.append(key[0])
        self._update_progress(at_s, record)
        for number in changed:
            self.account.update(at_s, number)
        if self.began_s < 0:
            assigned = [task for task in self.state.tasks.values() if task.target]
            if assigned and all(task.phase == "training" for task in assigned):
                self._begin(at_s)

    def _begin(self, at_s: float) -> None:
        state, self.began_s = self.state, at_s
        healthy = {name: node for name, node in state.nodes.items() if node.health == "healthy"}
        self.start_state = StartState(
            tasks={task.id: task.weight for task in live_tasks(state) if not task.ending},
            slots={name: node.num_slots for name, node in healthy.items() if not node.drained},
            drained=tuple(name for name, node in healthy.items() if node.drained),
            policy=state.policy,
        )
        self._marks_s = [one for one in self._marks_s if one > at_s]
        self.account.begin(at_s)

    def _advance(self, until_s: float) -> None:
        """Apply the losses and events until `until_s`."""
        while True:
            next_s = self._losses[-1].at_s if self._losses else until_s + 1
            while self._marks_s and self._marks_s[-1] <= min(next_s, until_s):
                mark_s = self._marks_s.pop()
                if self.began_s >= 0:
                    self.account.earnings.record_event(mark_s)
            if next_s > until_s:
                return
            self._apply(self._losses.pop())

    def _apply(self, loss: ProcessLoss) -> None:
        keys = self._processes_on(loss.node) if loss.node else [loss.key]
        keys = [
            key
            for key in keys
            if key[0] in self.state.tasks
            and loss.generation in (0, self.state.tasks[key[0]].generation)
        ]
        if not loss.generation:
            self._unreported[loss.seq] = keys
        self.account.stop_processes(loss.at_s, keys, loss.node)

    def _processes_on(self, node: str) -> list[Key]:
        return [
            (task.id, rank.rank, rank.attempt)
            for task in self.state.tasks.values()
            for rank in task.ranks.values()
            if rank.slot.node == node
        ]

    def _update_progress(self, at_s: float, record: Record) -> None:
        """Update the task's progress: its iterations, its resumption, its lost work, its end."""
        body = record.body
        task = self.state.tasks.get(getattr(body, "task", 0))
        if task is None or task.id not in self._jobs:
            return
        job = self._jobs[task.id]
        if isinstance(body, o.Resume):
            gone = [key for keys in self._unreported.values() for key in keys]
            if not any((task.id, one.rank, one.attempt) in gone for one in task.members):
                self.account.resume_task(task.id)
        elif isinstance(body, reports.Reconfigured):
            if body.origin in FARTHER and body.generation == task.generation:
                self.account.undo(task.id, job.rewind(at_s, body.step_version))
        elif isinstance(body, reports.TaskProgressed):
            if body.generation == task.generation and body.step_s:
                job.on_iterations(
                    at_s,
                    self._since_s(record),
                    body.first_iteration + len(body.step_s),
                    rate_at(job.table, len(task.members)) * body.step_s[-1],
                )
        elif isinstance(body, reports.IterationsLogged):
            self._logged(record, task, job, body)
        elif isinstance(body, d.TaskEnded):
            self.account.end_task(at_s, task.id)

    def _since_s(self, record: Record) -> float:
        """How long before the record the reported event occurred."""
        node = record.source.rpartition("/")[0]
        return max(record.at_s - record.occurred_s - self._behind_s.get(node, 0.0), 0.0)

    def _logged(
        self, record: Record, task: Task, job: RecordedProgress, body: reports.IterationsLogged
    ) -> None:
        """A command reports its iteration. The first report after a restart shows the lost work."""
        at_s = record.at_s
        if job.before is not None and job.before[0] == task.rounds:
            job.settle(at_s)
            new_flop = job.done_flop - job.before[1]
            job.done_flop -= new_flop
            self.account.undo(task.id, job.rewind(at_s, body.iteration - body.num_iterations))
            job.done_flop += new_flop
            job.before = None
        job.on_iterations(
            at_s,
            self._since_s(record),
            body.iteration,
            rate_at(job.table, len(task.target)) * body.step_s,
        )
