"""Collects the tasks and incidents of a log, with times and curves, in one pass of the fold.

Times are from the leader's clock (`at_s`). The time of a fault is from the reporter's clock:
`occurred_s` of its first evidence. The time of a hang is when the hang began.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from ...events.records.decisions import (
    IncidentClosed,
    IncidentEscalated,
    IncidentOpened,
    IncidentRecovering,
    LossSpiked,
    PlanChosen,
    TaskEnded,
    TaskPlaced,
)
from ...events.records.envelope import Record
from ...events.records.orders import InjectFault, Quiesce, Reconfigure, Resume, StartRank
from ...events.records.reports import (
    CollectiveFailed,
    FaultRequested,
    IterationsLogged,
    LossNotFinite,
    MemoryCheckpointStored,
    NodeJoined,
    OutageEnded,
    Quiesced,
    RankExited,
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
from .node_losses import NodeLoss, NodeLosses
from .usage import Usage, UsageMeter, num_stepping


# --- Injected faults: requested, ordered, and the incidents that they explain ---
class Injected(Struct, kw_only=True):
    """One InjectFault. It affects one attempt of a rank, or one incarnation of an agent."""

    request: Record
    """The FaultRequested, or the order itself."""
    order: InjectFault
    at_s: float
    over_seq: int = 0
    """Reports from here on are unrelated; 0: it may still have effects."""

    def is_over(self, record: Record) -> bool:
        """Whether its effects are over: the rank ended or trains, or the node has joined again."""
        order, body = self.order, record.body
        if order.what == "node":
            return (
                isinstance(body, NodeJoined)
                and body.node in order.nodes
                and body.incarnation > order.incarnation
            )
        if getattr(body, "task", 0) != order.task:
            return False
        if isinstance(body, RankExited):
            return body.rank == order.rank and body.attempt >= order.attempt
        if isinstance(body, TaskProgressed | IterationsLogged):  # it continues on its own
            return (
                order.what == "stop" and order.stop_s > 0 and record.at_s > self.at_s + order.stop_s
            )
        return isinstance(body, TaskEnded)


class InjectedFaults(Struct):
    """All injected faults of a log."""

    faults: list[Injected] = field(default_factory=list[Injected])
    request: Record | None = None
    """The last request."""

    def add(self, record: Record) -> None:
        if isinstance(record.body, FaultRequested):
            self.request = record
        elif isinstance(record.body, InjectFault):
            asked = self.request is not None and self.request.seq == record.cause
            self.faults.append(
                Injected(
                    request=self.request if asked and self.request is not None else record,
                    order=record.body,
                    at_s=record.at_s,
                )
            )
        for one in self.faults:
            if not one.over_seq and one.is_over(record):
                one.over_seq = record.seq

    def behind(
        self, *, task: int, ranks: Sequence[int], node: str, first_seq: int, last_seq: int
    ) -> list[Injected]:
        """Injected faults that explain an incident with signs from `first_seq` to `last_seq`."""
        return [
            one
            for one in self.faults
            if one.request.seq < last_seq
            and (not one.over_seq or one.over_seq >= first_seq)
            and (
                node in one.order.nodes
                if one.order.what == "node"
                else one.order.task == task and one.order.rank in ranks
            )
        ]


# --- Transitions of a task: stopped from its last member's leave of a generation to Resume ---
class Transition(NamedTuple):
    """How long the task was stopped, and the finished iterations that are repeated."""

    seq: int
    """Of the Reconfigure."""
    still_s: float
    lost: int


class TaskTransitions(Struct):
    """Follows the generations of one task."""

    order: Record | None = None
    """The newest Reconfigure."""
    generation: int = 0
    """The last one that was resumed."""
    left: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> step version of the members that have left it."""
    left_s: float = -1.0
    up: list[int] = field(default_factory=list[int])
    """Step versions of the members that came up in the newest generation."""

    def add(self, record: Record) -> Transition | None:
        """Read the task's next record. A Resume completes a transition."""
        body = record.body
        newest = getattr(self.order.body, "generation", 0) if self.order is not None else 0
        if isinstance(body, Reconfigure):
            self.order, self.up = record, []
        elif isinstance(body, Reconfigured) and body.generation == newest:
            self.up.append(body.step_version)
        elif isinstance(body, Quiesced) and body.generation == self.generation:
            if body.rank not in self.left:  # a member that already left repeats it when ordered
                self.left_s = max(self.left_s, record.occurred_s)
            self.left[body.rank] = body.step_version
        elif (
            isinstance(body, Resume)
            and self.order is not None
            and self.up
            and body.generation == newest
        ):
            stopped_s = self.left_s if self.left else record.at_s
            lost = max([version - min(self.up) for version in self.left.values()] + [0])
            self.generation, self.left, self.left_s = newest, {}, -1.0
            return Transition(self.order.seq, max(record.at_s - stopped_s, 0.0), lost)
        return None


# --- Tasks and incidents ---
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
    whole_s: float | None = None
    """When the task first stepped with its whole target, or the incident was closed."""
    closed_s: float | None = None
    """When the task last stepped with its whole target, or the incident was closed."""
    closed_seq: int = 0
    """The record at which it was closed or recovering; 0: it is open."""
    ended_seq: int = 0
    """Its IncidentClosed, which comes later if it was recovering first; 0: none so far."""
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
        """`open` until it is closed; `recovering` while the task trains again."""
        return self.incident.outcome or ("recovering" if self.is_over else "open")

    @property
    def is_over(self) -> bool:
        """Whether it costs nothing now: it is closed, or it is recovering."""
        return bool(self.incident.outcome or self.incident.recovering_s)

    @property
    def pause_s(self) -> float | None:
        """None until it is closed or recovering."""
        return self.incident.pause_s if self.is_over else None


class Output(Struct):
    """The file with the output of one attempt of a rank."""

    rank: int
    attempt: int
    node: str
    log_path: str
    ended_s: float | None = None
    """When its process exited, in s since 1970; None: it has not."""


class TaskHistory(Struct, kw_only=True):
    """One task: its state, losses and iteration times."""

    task: Task
    order: Reconfigure | None = None
    """The newest Reconfigure."""
    failed: Record | None = None
    """The first CollectiveFailed since the last Resume."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """Current losses; those of lost iterations are removed."""
    loss_marks: dict[int, str] = field(default_factory=dict[int, str])
    """By iteration: what begins there, a series of losses that are not finite or a spike."""
    paces_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Iteration times by number of members; for a command, by number of slots."""
    skipped: int = 0
    """Iterations that took no step, as last reported."""
    copied_s: float = 0.0
    """When an in-memory checkpoint was last reported; 0: never."""
    logs: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Rank -> node and log of its last process, also after its exit."""
    outputs: dict[tuple[int, int], Output] = field(default_factory=dict[tuple[int, int], Output])
    """By rank and attempt."""
    transitions: TaskTransitions = field(default_factory=TaskTransitions)

    @property
    def name(self) -> str:
        return self.task.spec.name

    def mark_loss(self) -> None:
        """Mark the beginning of the series or the spike that the task is in."""
        if (series := self.task.not_finite) is not None:
            self.loss_marks[series.first] = f"loss {series.text}"
        if (spike := self.task.spike) is not None and spike.seq:
            self.loss_marks[spike.first] = f"spike {spike.loss:.3g}"


class History(Struct):
    """All tasks and incidents of a log, by id."""

    state: ClusterState = field(default_factory=ClusterState)
    tasks: dict[int, TaskHistory] = field(default_factory=dict[int, TaskHistory])
    incidents: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    open: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    """Incidents that are neither closed nor recovering."""
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
        if isinstance(body, IncidentClosed) and body.of in self.incidents:
            self.incidents[body.of].ended_seq = record.seq
        if isinstance(body, IncidentOpened):
            self._opened(record, body)
        elif isinstance(body, IncidentEscalated) and (one := self._escalated(record, body)):
            one.evidence += [seq for seq in body.evidence if seq not in one.evidence]
        elif isinstance(body, IncidentRecovering | IncidentClosed) and (
            one := self.open.pop(body.of, None)
        ):
            one.closed_s, one.closed_seq = record.at_s, record.seq
            one.whole_s = record.at_s if one.whole_s is None else one.whole_s
            one.slot_s = max(one.slot_s, body.pause_s * one.num_slots)
        elif isinstance(body, PlanChosen):
            tasks = [
                task
                for x in (*body.allocations, *body.kept)
                if x.slots and (task := self.state.tasks.get(x.task)) is not None
            ]
            self.origins[record.seq] = tuple(
                sorted({origin(x.spec, x.throughput, x.modelled) for x in tasks} - {""})
            )
        elif isinstance(body, OutageEnded):
            self.outages[record.seq] = body
        self.injected.add(record)
        self.absences.add(record, before_s, self.state.policy.silence_s_max)
        if self.meter is not None:
            self.meter.add(record)

    @property
    def node_losses(self) -> list[NodeLoss]:
        return self.absences.of_consequence(
            {key: one.incident.evidence for key, one in self.incidents.items()}
        )

    def name_of(self, task: int) -> str:
        """The task's name; with its id if the name is not unique."""
        if task not in self.tasks:
            return f"task {task}"
        name = self.tasks[task].name
        alone = sum(1 for one in self.tasks.values() if one.name == name) == 1
        return name if alone else f"{name} ({task})"

    def slot_s(self, one: IncidentHistory, at_s: float) -> float:
        """Slot seconds without progress; for an open incident, until `at_s`."""
        if one.is_over:
            return one.slot_s
        return one.slot_s + max(one.num_slots - one.num_stepping, 0) * max(at_s - self.at_s, 0.0)

    # --- incidents ------------------------------------------------------------------------------
    def _opened(self, record: Record, body: IncidentOpened) -> None:
        known, past = self.state.incidents[record.seq], self.tasks.get(body.task)
        stamps = [self.stamps[seq] for seq in body.evidence if seq in self.stamps]
        stamps = stamps or [(record.at_s, record.occurred_s)]
        fault_s, first_seq = [one[1] for one in stamps], [record.seq, *body.evidence]
        self.incidents[record.seq] = self.open[record.seq] = one = IncidentHistory(
            incident=known,
            evidence=list(body.evidence),
            fault_s=0.0,
            detected_s=stamps[0][0],
            decided_s=record.at_s,
            first_seq=0,
        )
        if past is not None:
            task = past.task
            fault_s += [
                stall.since_s
                for rank, stall in task.stalls.items()
                if rank in body.ranks and stall.seq in body.evidence
            ]
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

    def _escalated(self, record: Record, body: IncidentEscalated) -> IncidentHistory | None:
        """The open incident; one whose fault has come back is open again."""
        past = self.incidents.get(body.of)
        if past is None or not body.num_times:
            return self.open.get(body.of)
        self.open[past.id] = past
        past.closed_s, past.closed_seq = None, 0
        if (since_s := past.incident.down_since_s) >= 0:
            past.slot_s += past.num_slots * max(record.at_s - since_s, 0.0)
        task = self.state.tasks.get(past.task)
        past.num_stepping = num_stepping(self.state, task) if task is not None else 0
        return past

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
    def _task(
        self, past: TaskHistory, record: Record, furthest: int, logged: CommandProgress | None
    ) -> None:
        """Update the task; `furthest`, `logged`: values before the record."""
        task, body = past.task, record.body
        made = past.transitions.add(record)
        if made is not None:
            self.transitions.append(made)
        if isinstance(body, RankStarted):
            past.logs[body.rank] = body.node, body.log_path
            past.outputs.setdefault(
                (body.rank, body.attempt), Output(body.rank, body.attempt, body.node, body.log_path)
            )
        elif isinstance(body, RankExited):
            if (output := past.outputs.get((body.rank, body.attempt))) is not None:
                output.ended_s = record.at_s
        elif isinstance(body, TaskPlaced):
            past.logs = {
                seat.rank: past.logs[seat.rank] for seat in body.seats if seat.rank in past.logs
            }
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
            for at in range(body.first_iteration, body.end):
                past.losses.pop(at, None)
            past.losses.update(enumerate(body.losses, body.first_iteration))
            past.mark_loss()
            if body.generation == task.generation:
                past.paces_s.setdefault(len(task.members), []).extend(body.step_s)
            past.skipped = body.skipped
        elif isinstance(body, LossNotFinite | LossSpiked):
            past.mark_loss()
        elif (
            isinstance(body, IterationsLogged)
            and task.logged is not None
            and (  # it counts
                task.logged.rank == body.rank and task.attempts.get(body.rank) == body.attempt
            )
        ):
            if body.num_iterations:
                past.paces_s.setdefault(len(task.target), []).append(body.step_s)
            if task.max_iteration > furthest:  # else the iterations are repeated
                past.skipped += body.skipped
            if logged is not None and task.logged is not logged:  # the command read its checkpoint
                last = body.iteration - body.num_iterations
                past.losses = {key: loss for key, loss in past.losses.items() if key <= last}
            if body.loss is not None:
                past.losses[body.iteration] = body.loss
            past.mark_loss()


def history(records: Iterable[Record], state: ClusterState | None = None) -> History:
    """`state`: that before the records, which is changed; None: the empty one."""
    state = state or ClusterState()
    it = History(
        state=state,
        tasks={
            key: TaskHistory(
                task=task,
                logs={one.rank: (one.node, one.log_path) for one in outputs},
                outputs={(one.rank, one.attempt): one for one in outputs},
            )
            for key, task in state.tasks.items()
            for outputs in [
                [
                    Output(rank.rank, rank.attempt, rank.slot.node, rank.log_path)
                    for rank in task.ranks.values()
                    if rank.log_path
                ]
            ]
        },
    )
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
