"""Collects the tasks and incidents of a log, with times and curves, in one pass of the fold.

Times are from the leader's clock (`at_s`). The time of a fault is from the reporter's clock:
`occurred_s` of its first evidence. The time of a hang is when the hang began.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from ...events.records.decisions import (
    IncidentClosed,
    IncidentEscalated,
    IncidentOpened,
    PlanChosen,
    TaskPlaced,
)
from ...events.records.envelope import Record
from ...events.records.orders import Quiesce, Reconfigure, Resume, StartRank
from ...events.records.reports import (
    CollectiveFailed,
    IterationsLogged,
    MemoryCheckpointStored,
    OutageEnded,
    RankStarted,
    Reconfigured,
    TaskProgressed,
)
from ...events.spec.model import Axes
from ...events.spec.parallelism import Sharding, layout_in_words, num_positions
from ..fold.fold import fold
from ..state.cluster import ClusterState
from ..state.incident import Incident
from ..state.task import CommandProgress, Task
from ..throughput.table import origin
from .injected import InjectedFaults
from .node_losses import NodeLoss, NodeLosses
from .transitions import TaskTransitions, Transition
from .usage import Usage, UsageMeter, num_stepping

PROGRESS = (TaskProgressed, IterationsLogged)
"""Reports of finished iterations."""


class IncidentHistory(Struct, kw_only=True):
    """One incident and when it reached each phase; None: phase not reached. Times in s."""

    incident: Incident
    """The incident in the cluster state; kept here after the state drops it."""
    evidence: list[int]
    """Seqs of the evidence at the decision; `incident.evidence` also has later evidence."""
    fault_s: float
    detected_s: float
    """When the first evidence was in the log."""
    decided_s: float
    ordered_s: float | None = None
    """When the first order of the transition was in the log."""
    rebuilt_s: float | None = None
    """When the last member was in the new generation."""
    resumed_s: float | None = None
    stepped_s: float | None = None
    """When the first iteration after the resume was reported."""
    closed_s: float | None = None
    closed_seq: int = 0
    iteration: int | None = None
    """The iteration that was interrupted."""
    first_seq: int
    """Seq of the first sign of the fault: evidence, or an earlier failed collective of a peer."""
    layouts: list[str] = field(default_factory=list[str])
    """The task's layouts, starting with the one at the fault."""
    order: Reconfigure | None = None
    """The Reconfigure of the generation at the fault."""
    alive: set[tuple[int, int]] | None = None
    """Rank and attempt of the survivors."""
    optimizer: Sharding = "whole"
    logs: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Node and log of each rank of the task at the decision."""
    num_slots: int = 0
    """Slots of the task at the fault."""
    num_stepping: int = 0
    """How many of these slots step now."""
    slot_s: float = 0.0
    """Slot seconds without progress, until the last record."""

    @property
    def id(self) -> int:
        return self.incident.id

    @property
    def task(self) -> int:
        return self.incident.task

    @property
    def outcome(self) -> str:
        """`open` until it is closed."""
        return self.incident.outcome or "open"

    @property
    def pause_s(self) -> float | None:
        """None until it is closed."""
        return self.incident.pause_s if self.incident.outcome else None


class TaskHistory(Struct, kw_only=True):
    """One task: its state, losses and iteration times."""

    task: Task
    order: Reconfigure | None = None
    """The newest Reconfigure."""
    failed: Record | None = None
    """The first CollectiveFailed since the last Resume."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """Current losses; those of lost iterations are removed."""
    paces_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Iteration times by number of members; for a command, by number of slots."""
    skipped: int = 0
    """Iterations that took no step, as last reported."""
    copied_s: float = 0.0
    """When an in-memory checkpoint was last reported; 0: never."""
    logs: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Rank -> node and log of its last process, also after its exit."""
    transitions: TaskTransitions = field(default_factory=TaskTransitions)

    @property
    def name(self) -> str:
        return self.task.spec.name


class History(Struct):
    """All tasks and incidents of a log, by id."""

    state: ClusterState = field(default_factory=ClusterState)
    tasks: dict[int, TaskHistory] = field(default_factory=dict[int, TaskHistory])
    incidents: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    open: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    """Incidents that are not closed."""
    stamps: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """(at_s, occurred_s) by seq of records that may be evidence."""
    transitions: list[Transition] = field(default_factory=list[Transition])
    origins: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """By plan, the seq of its PlanChosen: the origins of its tasks' throughput tables, sorted."""
    injected: InjectedFaults = field(default_factory=InjectedFaults)
    absences: NodeLosses = field(default_factory=NodeLosses)
    outages: dict[int, OutageEnded] = field(default_factory=dict[int, OutageEnded])
    """By seq."""
    meter: UsageMeter | None = None
    """Counts slot time and faults, if there is one."""

    @property
    def seq(self) -> int:
        return self.state.seq

    @property
    def at_s(self) -> float:
        return self.state.at_s

    def add(self, record: Record) -> None:
        body, before_s = record.body, self.state.at_s
        task = self.state.tasks.get(getattr(body, "task", 0))
        furthest, logged = (task.max_iteration, task.logged) if task is not None else (0, None)
        fold(self.state, record)
        if record.source_seq and not isinstance(body, PROGRESS):
            self.stamps[record.seq] = (record.at_s, record.occurred_s)
        number = getattr(body, "task", 0) or record.seq
        if number in self.state.tasks:
            past = self.tasks.get(number)
            if past is None:
                past = self.tasks[number] = TaskHistory(task=self.state.tasks[number])
            self._task(past, record, furthest, logged)
        if self.open:
            self._incidents(record, before_s)
        if isinstance(body, IncidentOpened):
            self._opened(record, body)
        elif isinstance(body, IncidentEscalated) and (one := self.open.get(body.of)):
            one.evidence += [seq for seq in body.evidence if seq not in one.evidence]
        elif isinstance(body, IncidentClosed) and (one := self.open.pop(body.of, None)):
            one.closed_s, one.closed_seq = record.at_s, record.seq
            one.slot_s = max(one.slot_s, body.pause_s * one.num_slots)
        elif isinstance(body, PlanChosen):
            tasks = [task for x in (*body.allocations, *body.kept)
                     if x.slots and (task := self.state.tasks.get(x.task)) is not None]
            self.origins[record.seq] = tuple(sorted({
                origin(x.spec, x.throughput, x.modelled) for x in tasks} - {""}))
        elif isinstance(body, OutageEnded):
            self.outages[record.seq] = body
        self.injected.add(record)
        self.absences.add(record, before_s, self.state.policy.silence_s_max)
        if self.meter is not None:
            self.meter.add(record)

    @property
    def node_losses(self) -> list[NodeLoss]:
        return self.absences.of_consequence({
            key: one.incident.evidence for key, one in self.incidents.items()})

    def slot_s(self, one: IncidentHistory, at_s: float) -> float:
        """Slot seconds without progress; for an open incident, until `at_s`."""
        if one.incident.outcome:
            return one.slot_s
        return one.slot_s + max(one.num_slots - one.num_stepping, 0) * max(at_s - self.at_s, 0.0)

    # --- incidents ------------------------------------------------------------------------------
    def _opened(self, record: Record, body: IncidentOpened) -> None:
        known, past = self.state.incidents[record.seq], self.tasks.get(body.task)
        stamps = [self.stamps[seq] for seq in body.evidence if seq in self.stamps]
        stamps = stamps or [(record.at_s, record.occurred_s)]
        fault_s, first_seq = [one[1] for one in stamps], [record.seq, *body.evidence]
        self.incidents[record.seq] = self.open[record.seq] = one = IncidentHistory(
            incident=known, evidence=list(body.evidence), fault_s=0.0, detected_s=stamps[0][0],
            decided_s=record.at_s, first_seq=0)
        if past is not None:
            task = past.task
            fault_s += [stall.since_s for rank, stall in task.stalls.items()
                        if rank in body.ranks and stall.seq in body.evidence]
            if past.failed is not None:
                fault_s.append(past.failed.occurred_s)
                first_seq.append(past.failed.seq)
            one.order, one.num_slots = past.order, len(task.target)
            one.layouts = [layout(past.order)] if past.order is not None else []
            if task.spec.training is not None:
                one.optimizer = task.spec.training.parallel.optimizer
            one.logs = list(past.logs.values())
            one.num_stepping = num_stepping(self.state, task)
            if known.down_since_s >= 0:
                one.slot_s = one.num_slots * max(record.at_s - known.down_since_s, 0.0)
        one.fault_s, one.first_seq = min(fault_s), min(first_seq)

    def _incidents(self, record: Record, before_s: float) -> None:
        """Update phases and slot seconds of the open incidents."""
        number = getattr(record.body, "task", 0)
        for one in self.open.values():
            one.slot_s += max(one.num_slots - one.num_stepping, 0) * (record.at_s - before_s)
            task = self.state.tasks.get(one.task)
            if task is None or number not in (0, task.id):
                continue
            stepping, since_s = num_stepping(self.state, task), one.incident.down_since_s
            if not stepping and 0 <= since_s < record.at_s:  # stepping ended before this record
                one.slot_s += one.num_stepping * (record.at_s - since_s)
            one.num_stepping = stepping
            if number == task.id:
                _phase(one, record, task)

    # --- tasks ----------------------------------------------------------------------------------
    def _task(self, past: TaskHistory, record: Record, furthest: int,
              logged: CommandProgress | None) -> None:
        """Update the task; `furthest`, `logged`: values before the record."""
        task, body = past.task, record.body
        made = past.transitions.add(record)
        if made is not None:
            self.transitions.append(made)
        if isinstance(body, RankStarted):
            past.logs[body.rank] = body.node, body.log_path
        elif isinstance(body, TaskPlaced):
            past.logs = {seat.rank: past.logs[seat.rank] for seat in body.seats
                         if seat.rank in past.logs}
        elif isinstance(body, MemoryCheckpointStored):
            past.copied_s = record.at_s if body.generation == task.generation else past.copied_s
        elif isinstance(body, Reconfigure):
            past.order = body
        elif isinstance(body, Resume):
            past.failed = None
        elif isinstance(body, CollectiveFailed):
            if body.generation == task.generation and task.phase != "reconfiguring":
                past.failed = past.failed or record
        elif isinstance(body, TaskProgressed):
            past.losses.update(enumerate(body.losses, body.first_iteration))
            if body.generation == task.generation:
                past.paces_s.setdefault(len(task.members), []).extend(body.step_s)
            past.skipped = body.skipped
        elif isinstance(body, IterationsLogged) and task.logged is not None and (  # it counts
                task.logged.rank == body.rank and task.attempts.get(body.rank) == body.attempt):
            if body.num_iterations:
                past.paces_s.setdefault(len(task.target), []).append(body.step_s)
            if task.max_iteration > furthest:  # else the iterations are repeated
                past.skipped += body.skipped
            if logged is not None and task.logged is not logged:  # the command read its checkpoint
                last = body.iteration - body.num_iterations
                past.losses = {key: loss for key, loss in past.losses.items() if key <= last}
            if body.loss is not None:
                past.losses[body.iteration] = body.loss


def history(records: Iterable[Record], state: ClusterState | None = None) -> History:
    """`state`: that before the records, which is changed; None: the empty one."""
    state = state or ClusterState()
    it = History(state=state, tasks={
        key: TaskHistory(task=task, logs={rank.rank: (rank.slot.node, rank.log_path)
                                          for rank in task.ranks.values() if rank.log_path})
        for key, task in state.tasks.items()})
    for record in records:
        it.add(record)
    return it


def usage(records: Iterable[Record], state: ClusterState) -> Usage:
    """What slots were used for and lost to; `state`: that before the records, which is changed."""
    it = history((), state)
    it.meter = meter = UsageMeter(state)
    for record in records:
        it.add(record)
    return meter.until_now()


def layout(order: Reconfigure) -> str:
    """A generation's layout, as `TP 2 x DP 1, 1 beside`: one member has no position in it."""
    axes = order.axes or Axes(dp=len(order.members))
    num = len(order.members) - num_positions(axes)
    return layout_in_words(axes) + (f", {num} beside" if num else "")


def _phase(one: IncidentHistory, record: Record, task: Task) -> None:
    """Note when each phase is reached. Another Reconfigure clears `rebuilt_s` and `resumed_s`."""
    body, at_s = record.body, record.at_s
    if isinstance(body, Quiesce | Reconfigure | StartRank) and one.ordered_s is None:
        one.ordered_s = at_s
    if isinstance(body, Reconfigure) and layout(body) not in one.layouts[-1:]:
        one.layouts.append(layout(body))
    if one.stepped_s is not None:
        return
    if isinstance(body, Reconfigure):
        there = {(member.rank, member.attempt) for member in body.members}
        one.alive = there if one.alive is None else one.alive & there
        one.rebuilt_s = one.resumed_s = None
    elif isinstance(body, Reconfigured):
        one.rebuilt_s, one.iteration = at_s, body.step_version
    elif isinstance(body, Resume):
        one.resumed_s = at_s
    elif one.resumed_s is not None and task.stepped == task.generation:
        one.stepped_s = at_s
