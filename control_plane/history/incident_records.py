"""The records of a log that belong to an incident, also of unaffected tasks that it moved.

A record names the incident of the affected task only. A plan with the same cause, and the moves of
other tasks until they step again, are found by cause and by placement.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Literal

from msgspec import Struct, field

from ...events.records.decisions import (
    OrderSuppressed,
    PlanChosen,
    TaskEnded,
    TaskPlaced,
    TaskWaiting,
)
from ...events.records.envelope import Record
from ...events.records.reports import (
    MemoryCheckpointsLost,
    MemoryCheckpointStored,
    NodeJoined,
    NodeLeft,
)
from ..fold.fold import fold
from ..state.cluster import ClusterState
from .history import PROGRESS, IncidentHistory

Other = Literal["moves", "leaves", "done"]
"""An unaffected task on its way to other seats, or to none; done: it steps again or has ended."""
AFTER_RECORDS_MAX = 10_000
"""Records after the incident's end in which other tasks are followed."""


class IncidentRecords(Struct, kw_only=True):
    """Records by seq, as they are added; `others` are the unaffected tasks that it moved."""

    incident: IncidentHistory
    later: frozenset[int]
    """Seqs of evidence that came after the decision, or even after the end."""
    state: ClusterState = field(default_factory=ClusterState)
    records: list[Record] = field(default_factory=list[Record])
    others: dict[int, Other] = field(default_factory=dict[int, Other])
    causes: set[int] = field(default_factory=set[int])
    kept: dict[tuple[str, int], Record] = field(default_factory=dict[tuple[str, int], Record])
    """In-memory checkpoints by node and step: the last MemoryCheckpointStored of each."""
    lost: dict[str, Record] = field(default_factory=dict[str, Record])
    """By node: the record that ended its in-memory checkpoints, if none was stored after it."""
    plan: Record | None = None
    """The last plan, until a placement makes it part of the incident."""

    def add(self, record: Record) -> None:
        task = getattr(record.body, "task", 0)
        rounds = self._rounds(task)
        fold(self.state, record)
        begins = self._rounds(task) != rounds
        if not self._is_of_checkpoints(record):
            self._take(record, task, begins=begins)
        if (begins or isinstance(record.body, TaskEnded)) and task in self.others:
            self.others[task] = "done"

    def _take(self, record: Record, task: int, *, begins: bool) -> None:
        body = record.body
        if isinstance(body, PlanChosen):
            self.plan = record
        own = self._is_own(record, task)
        if own:
            self.causes |= {record.seq, record.cause} - {0}
        if not own and not self._follows(record, task, begins=begins):
            return
        if isinstance(body, TaskPlaced) and task != self.incident.task:
            self.others[task] = "moves" if body.seats else "leaves"
        self._keep_plan(record)
        if not isinstance(body, PlanChosen) and (begins or not isinstance(body, PROGRESS)):
            self.records.append(record)

    def _rounds(self, number: int) -> tuple[int, int]:
        """A value that changes with the task's first progress after a start or a new generation."""
        task = self.state.tasks.get(number)
        if task is None:
            return 0, 0
        return task.stepped, task.logged.round if task.logged is not None else 0

    def _is_of_checkpoints(self, record: Record) -> bool:
        """Follow the task's in-memory checkpoints; True: the record is of no other interest."""
        body, own = record.body, self.incident.task
        before_end = not self.incident.closed_seq or record.seq <= self.incident.closed_seq
        if isinstance(body, MemoryCheckpointStored):
            if body.task == own and before_end:
                self.kept[body.node, body.step_version] = record
                self.lost.pop(body.node, None)
            return True
        if (
            before_end
            and isinstance(body, NodeJoined | NodeLeft | MemoryCheckpointsLost)
            and (
                getattr(body, "task", 0) in (0, own)
                and any(node == body.node for node, _ in self.kept)
            )
        ):
            self.lost[body.node] = record
        return False

    @property
    def gone(self) -> list[Record]:
        """Records that ended the in-memory checkpoints, if a farther source was used."""
        origin = self.incident.incident.source.origin
        return (
            sorted(self.lost.values(), key=attrgetter("seq"))
            if origin in ("checkpoint", "seed")
            else []
        )

    @property
    def no_copies(self) -> str:
        """Why there was no in-memory checkpoint, if a farther source was used."""
        if self.incident.incident.source.origin not in ("checkpoint", "seed") or self.kept:
            return ""
        task = self.state.tasks.get(self.incident.task)  # it may have left the state
        training = task.spec.training if task is not None else None
        if training is None:
            return ""
        return (
            "none had been reported"
            if training.copy_every
            else "none are kept: train.copy_every is 0"
        )

    def settle(self) -> None:
        """Add the records of the in-memory checkpoint that was used, or of the loss of all."""
        source = self.incident.incident.source
        used = self.kept.get((source.node, source.step_version))
        decisive = [*self.gone, *([used] if used is not None and source.origin == "copy" else [])]
        there = {record.seq for record in self.records}
        self.records += [record for record in decisive if record.seq not in there]
        self.records.sort(key=attrgetter("seq"))

    def _is_own(self, record: Record, task: int) -> bool:
        number = self.incident.id
        early = self.incident.first_seq <= record.seq < number  # a peer's collective failed
        return (
            number in (record.incident, record.seq)
            or record.seq in self.incident.evidence
            or record.seq in self.later
            or (early and task == self.incident.task)
        )

    def _follows(self, record: Record, task: int, *, begins: bool) -> bool:
        if isinstance(record.body, PlanChosen | TaskPlaced | TaskWaiting | OrderSuppressed):
            return record.cause in self.causes
        other, end = self.others.get(task), self.incident.closed_seq
        return other == "moves" or (other == "leaves" and (not end or record.seq <= end))

    def _keep_plan(self, record: Record) -> None:
        """Add the plan that precedes a placement of the incident."""
        plan = self.plan
        if plan is not None and (
            record is plan or (isinstance(record.body, TaskPlaced) and plan.cause == record.cause)
        ):
            self.records.append(plan)
            self.plan = None

    def is_over(self, seq: int) -> bool:
        """Whether no record after `seq` can belong to it."""
        end = self.incident.ended_seq or self.incident.closed_seq
        return (
            bool(end)
            and seq >= max(end, *self.later, 0)
            and ("moves" not in self.others.values() or seq > end + AFTER_RECORDS_MAX)
        )


def incident_records(
    one: IncidentHistory, records: Iterable[Record], state: ClusterState | None = None
) -> IncidentRecords:
    """Read the log from `state`, which is changed, until the incident is complete."""
    later = frozenset(one.incident.evidence) - frozenset(one.evidence)
    found = IncidentRecords(incident=one, later=later, state=state or ClusterState())
    for record in records:
        found.add(record)
        if found.is_over(record.seq):
            break
    found.settle()
    return found
