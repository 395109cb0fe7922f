"""WAF accounting: what a cluster earned, what it lost and why, and the cost of each fault."""

import math
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records.envelope import Record
from ..state.cluster import ClusterState, can_allocate
from ..state.task import Task
from ..throughput import table
from .task_progress import TaskProgress

# --- what a cluster earned and what it lost ---

Loss = Literal["detection", "transition", "waiting", "sub-healthy", "recomputed"]
LOSSES: tuple[Loss, ...] = ("detection", "transition", "waiting", "sub-healthy", "recomputed")


class WafAccount:
    """Weighted FLOP of tasks: earned, and lost by reason (docs/guides/simulate.md). The WAF of a
    task changes in steps. Earned and lost FLOP always add up to what the cluster would have earned
    at full strength; so do slot-seconds."""

    def __init__(self) -> None:
        self.flop = self.slot_s = 0.0
        self.lost_flop: dict[Loss, float] = dict.fromkeys(LOSSES, 0.0)
        self.lost_slot_s: dict[Loss, float] = dict.fromkeys(LOSSES, 0.0)
        self.flop_of: dict[int, float] = {}
        self.full: dict[int, float] = {}
        self.full_slots: dict[int, int] = {}
        self.waf: dict[int, float] = {}
        self.slots: dict[int, int] = {}
        """Slots that train, by task."""
        self.down_s: dict[Loss, float] = dict.fromkeys(LOSSES, 0.0)
        """Task-seconds without training, by reason."""
        self.curve: list[tuple[float, float]] = []
        """Changes of the total WAF: time and new value."""
        self._why: dict[int, Loss] = {}
        self._since_s: dict[int, float] = {}

    def begin(self, at_s: float) -> None:
        """Start to count. The current WAF of each task is its full strength."""
        self.full, self.full_slots = dict(self.waf), dict(self.slots)
        self.flop, self.lost_flop = 0.0, dict.fromkeys(LOSSES, 0.0)
        self.flop_of = dict.fromkeys(self.waf, 0.0)
        self.slot_s, self.lost_slot_s = 0.0, dict.fromkeys(LOSSES, 0.0)
        self.down_s, self.curve = dict.fromkeys(LOSSES, 0.0), [(at_s, self.total)]
        self._since_s = dict.fromkeys(self.waf, at_s)

    def record_event(self, at_s: float) -> None:
        """An external event or a request occurs. The plain account ignores it."""

    @property
    def full_flop(self) -> float:
        """What would have been earned without any loss."""
        return math.fsum((self.flop, *self.lost_flop.values()))

    @property
    def share(self) -> float:
        """The part of `full_flop` that was earned."""
        return self.flop / self.full_flop if self.full_flop else 0.0

    @property
    def total(self) -> float:
        total = 0.0
        for waf in self.waf.values():
            total += waf
        return total

    def set_waf(self, at_s: float, task: int, waf: float, slots: int, why: Loss) -> None:
        """Set the task's WAF and slots from now on. `why`: the reason that they are not higher."""
        if self.waf.get(task) == waf and self._why.get(task) == why:
            return
        self.settle(at_s, task)
        changed = self.waf.get(task) != waf
        self.waf[task], self.slots[task], self._why[task] = waf, slots, why
        if changed:
            self._changed(at_s)

    def set_full_strength(self, at_s: float, task: int, waf: float, slots: int) -> None:
        self.settle(at_s, task)
        self.full[task], self.full_slots[task] = waf, slots

    def end_task(self, at_s: float, task: int) -> None:
        """The task has ended: it earns and loses nothing from now on."""
        if task in self.waf:
            self.settle(at_s, task)
            del self.waf[task], self.slots[task]
            self.full.pop(task, None)
            self._changed(at_s)

    def settle(self, at_s: float, task: int) -> None:
        """Add what the task earned and lost until `at_s`."""
        past_s = at_s - self._since_s.get(task, at_s)
        self._since_s[task] = at_s
        self.flop_of.setdefault(task, 0.0)
        if not past_s:
            return
        waf, why = self.waf.get(task, 0.0), self._why.get(task, "waiting")
        slots = self.slots.get(task, 0)
        self.flop += waf * past_s
        self.flop_of[task] += waf * past_s
        self.slot_s += slots * past_s
        self.lost_flop[why] += (self.full.get(task, 0.0) - waf) * past_s
        self.lost_slot_s[why] += (self.full_slots.get(task, 0) - slots) * past_s
        if not waf:
            self.down_s[why] += past_s

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        """Move `flop` from earned to recomputed. Repeating them takes `slot_s` slot-seconds."""
        self.flop -= flop
        self.flop_of[task] = self.flop_of.get(task, 0.0) - flop
        self.lost_flop["recomputed"] += flop
        self.slot_s -= slot_s
        self.lost_slot_s["recomputed"] += slot_s

    def end(self, at_s: float) -> None:
        """Add what all tasks earned and lost until `at_s`."""
        for task in self.waf:
            self.settle(at_s, task)

    def _changed(self, at_s: float) -> None:
        if self.curve and self.curve[-1][0] == at_s:
            self.curve.pop()
        self.curve.append((at_s, self.total))


Key = tuple[int, int, int]
"""A process: task, rank, attempt."""
REQUESTS = (r.TaskSubmitted, r.TaskWeightSet, r.TaskCancelRequested, d.TaskEnded)
"""After one of these the next plan defines the full strength of the cluster."""
_REPLIES = (r.Quiesced, r.Reconfigured, r.RankReady)
"""These replies change no task's progress. The order that follows the last reply does."""
NODE_EVENTS = (
    r.NodeReachable,
    r.NodeDrained,
    r.NodeUndrained,
    d.NodeQuarantined,
    r.QuarantineLifted,
    d.IncidentEscalated,
)
"""After one of these a task may start or stop waiting for a node."""


class Accounting:
    """`opens` creates the TaskProgress of a newly submitted task. Times are those of the log."""

    def __init__(
        self, state: ClusterState, earnings: WafAccount, opens: Callable[[Task], TaskProgress]
    ) -> None:
        self.state, self.earnings = state, earnings
        self.jobs: dict[int, TaskProgress] = {}
        self.transitions = 0
        self._opens = opens
        self._unreported: dict[str, list[int]] = {}
        """By node: the tasks that a fault of the node stopped, until that fault is reported."""
        self._left: set[int] = set()
        self._has_begun = self._is_requested = False

    def begin(self, at_s: float) -> None:
        """Start the horizon: current earnings are full strength, and all work done is saved."""
        self._has_begun, self._is_requested, self.transitions = True, False, 0
        self.earnings.begin(at_s)
        for job in self.jobs.values():
            job.save_all(at_s)

    def end(self, at_s: float) -> None:
        for number in self.jobs:
            self.update(at_s, number)
        self.earnings.end(at_s)

    # --- faults ---------------------------------------------------------------------------------
    def stop_processes(self, at_s: float, keys: Iterable[Key], node: str = "") -> list[int]:
        """Return the tasks that stop because these processes end or stall. If `node` is given, a
        report about that node also reports their fault."""
        stopped = sorted({key[0] for key in keys if self._stops_with(key)})
        for number in stopped:
            job = self.jobs[number]
            if not job.is_stalled:
                job.is_stalled, job.is_reported = True, False
            self.update(at_s, number)
        if node and stopped:
            self._unreported[node] = stopped
        return stopped

    def _stops_with(self, key: Key) -> bool:
        """Whether the task stops with this process. A process that joins later is not needed."""
        task = self.state.tasks[key[0]]
        return (
            not task.heals_in_memory
            or not task.members
            or any((member.rank, member.attempt) == key[1:] for member in task.members)
        )

    def resume_task(self, number: int) -> None:
        job = self.jobs[number]
        job.is_stalled, job.is_reported, job.at_boundary = False, True, False

    def reach_boundary(self, at_s: float, number: int) -> None:
        """The members have reached the point at which they leave their generation."""
        self.jobs[number].at_boundary = True
        self.update(at_s, number)

    def undo(self, number: int, flop: float) -> None:
        """Count `flop` as recomputed: the task has to repeat them."""
        job = self.jobs[number]
        worth = job.take_back(flop, self.state.tasks[number].weight)
        if self._has_begun and number in self.earnings.waf:
            slots = self.earnings.full_slots.get(number, 0)
            rate = table.rate_at(job.table, slots)
            self.earnings.undo(number, worth, flop / rate * slots if rate else 0.0)

    # --- records of the log -----------------------------------------------------------------------
    def read(self, at_s: float, record: Record) -> list[int]:
        """Apply a folded record. Returns the tasks to update when its orders are carried out."""
        body, touched = record.body, list[int]()
        if isinstance(body, _REPLIES):
            return touched
        number = getattr(body, "task", 0)
        if isinstance(body, r.TaskSubmitted):
            number = record.seq
            self.jobs[number] = self._opens(self.state.tasks[number])
        elif isinstance(body, r.RankExited | r.CollectiveFailed):
            if number in self.jobs and getattr(body, "generation", -1) in (
                -1,
                self.state.tasks[number].generation,
            ):
                self.jobs[number].is_reported = True
        elif isinstance(body, r.NodeUnreachable | r.NodeLeft | r.NodeJoined):
            touched = self._unreported.pop(body.node, [])
            for task in touched:
                self.jobs[task].is_reported = True
            touched = [*touched, *self._not_training()]
        elif isinstance(body, NODE_EVENTS):
            touched = self._not_training()
        elif isinstance(body, o.StartRank):
            self._starts(at_s, number)
        elif isinstance(body, o.Reconfigure):
            self.transitions += 1
        elif isinstance(body, d.PlanChosen):
            self._planned(at_s, body)
        elif isinstance(body, r.TaskCancelRequested) or (
            isinstance(body, d.TaskEnded) and body.outcome != "failed"
        ):
            self.end_task(at_s, number)
        self._is_requested = self._has_begun and (self._is_requested or isinstance(body, REQUESTS))
        if number in self.jobs:
            touched.append(number)
        return touched

    def _not_training(self) -> list[int]:
        """Tasks that do not train: they may wait for a node."""
        return [number for number, job in self.jobs.items() if not job.rate_flops]

    def end_task(self, at_s: float, number: int) -> None:
        """The task has finished, or is to be cancelled. A failed task still counts as a loss."""
        if number in self.jobs:
            self._left.add(number)
            self.jobs[number].set_rate(at_s, 0.0)
            self.earnings.end_task(at_s, number)

    def _starts(self, at_s: float, number: int) -> None:
        """All processes of a command start together. A restart continues from the saved state."""
        task, job = self.state.tasks[number], self.jobs[number]
        if not task.heals_in_memory and job.round != task.rounds:
            job.round = task.rounds
            self.resume_task(number)
            if task.rounds > 1:
                self.transitions += 1
                self.undo(number, job.restore(at_s))

    def _planned(self, at_s: float, plan: d.PlanChosen) -> None:
        """The first plan after a request defines the full strength of each task."""
        if not self._is_requested:
            return
        self._is_requested = False
        for one in (*plan.allocations, *plan.kept):
            task, job = self.state.tasks[one.task], self.jobs[one.task]
            if one.task not in self._left:
                self.earnings.set_full_strength(
                    at_s, one.task, task.weight * table.rate_at(job.table, one.slots), one.slots
                )

    # --- rates of tasks ---------------------------------------------------------------------------
    def update(self, at_s: float, number: int) -> None:
        """Update the task's rate, and the reason why the rate is not higher."""
        if number in self._left or number not in self.state.tasks:
            return
        task, job = self.state.tasks[number], self.jobs[number]
        rate_flops, slots = 0.0, 0
        if not job.is_stalled and (
            task.phase == "training"
            or (task.phase == "quiescing" and task.mode == "boundary" and not job.at_boundary)
        ):
            slots = len(task.members) if task.heals_in_memory else len(task.target)
            rate_flops = table.rate_at(job.table, slots)
        job.set_rate(at_s, rate_flops)
        job.weigh(task.weight)
        why = self._why(task, job) if not rate_flops else "sub-healthy"
        self.earnings.set_waf(at_s, number, task.weight * rate_flops, slots, why)

    def _why(self, task: Task, job: TaskProgress) -> Loss:
        if job.is_stalled and not job.is_reported:
            return "detection"
        if not task.target:
            return "waiting"
        return "transition" if can_allocate(self.state, task.target) else "waiting"


# --- attribution of losses to external events ---
#
# A loss is attributed to the latest event that increased the loss rate. While an earlier event
# still causes a loss, a later one is charged only with the additional loss. An event is over when
# the loss rate is back at its value before the event. An event without a loss ends no other.

MARGIN_SHARE = 1e-9
"""Relative to full strength: float sums are inexact."""


class EventLoss(Struct, kw_only=True):
    """The loss due to one event, until the loss rate is as before. A negative loss is a gain."""

    at_s: float
    before: float = 0.0
    """The loss rate at that time, in weighted FLOP/s."""
    lost_flop: float = 0.0
    recovered_s: float | None = None
    """None: the event was not over at the end, or it caused no loss."""
    has_lost: bool = False


class AttributedWaf(WafAccount):
    """`losses` has one entry per `record_event` call, in order; `unattributed` is the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[EventLoss] = []
        self.unattributed = EventLoss(at_s=0.0)
        self._active: list[EventLoss] = []
        self._level = self._at_s = 0.0

    def begin(self, at_s: float) -> None:
        super().begin(at_s)
        self.losses, self._active, self._level, self._at_s = [], [], 0.0, at_s

    def record_event(self, at_s: float) -> None:
        self._charge(at_s)
        self.losses.append(EventLoss(at_s=at_s, before=self._level))
        self._active.append(self.losses[-1])

    def set_waf(self, at_s: float, task: int, waf: float, slots: int, why: Loss) -> None:
        super().set_waf(at_s, task, waf, slots, why)
        self._update_level(at_s)

    def set_full_strength(self, at_s: float, task: int, waf: float, slots: int) -> None:
        super().set_full_strength(at_s, task, waf, slots)
        self._update_level(at_s)

    def end_task(self, at_s: float, task: int) -> None:
        super().end_task(at_s, task)
        self._update_level(at_s)

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        super().undo(task, flop, slot_s)
        (self._active[-1] if self._active else self.unattributed).lost_flop += flop

    def end(self, at_s: float) -> None:
        super().end(at_s)
        self._charge(at_s)

    def _update_level(self, at_s: float) -> None:
        self._charge(at_s)
        level = 0.0
        for task, full in self.full.items():
            level += full - self.waf.get(task, 0.0)
        self._level = level
        margin = MARGIN_SHARE * sum(self.full.values())
        for older, loss in zip([None, *self._active], self._active, strict=False):
            if older is not None and not loss.has_lost and level < loss.before:
                loss.before = level  # the improvement belongs to an earlier event
            loss.has_lost = loss.has_lost or level > loss.before + margin
            if loss.has_lost and level <= loss.before + margin:
                loss.recovered_s = at_s
        self._active = [loss for loss in self._active if loss.recovered_s is None]

    def _charge(self, at_s: float) -> None:
        """Charge the loss since the last update: to each event, newest first, what it has added."""
        past_s, self._at_s = at_s - self._at_s, at_s
        rest = self._level
        for loss in reversed(self._active):
            loss.lost_flop += (rest - loss.before) * past_s
            rest = loss.before
        self.unattributed.lost_flop += rest * past_s
