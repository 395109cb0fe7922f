"""WAF accounting: what a cluster earned, where the rest went, and which fault cost how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records.decisions import NodeQuarantined
from ...events.records.envelope import Record
from ...events.records.reports import QuarantineLifted
from ..state.cluster import ClusterState, may_hold
from ..state.task import Task
from ..throughput import table
from .task_progress import Job

# --- What a cluster earned, and where the rest went. ---

Lost = Literal["detection", "transition", "waiting", "sub-healthy", "recomputed"]
LOST: tuple[Lost, ...] = ("detection", "transition", "waiting", "sub-healthy", "recomputed")


class Earnings:
    """Of tasks whose WAF changes by steps: weighted FLOP, whole and by what was lost to.

    detection: a fault has stopped a task and nobody was told. transition: it is on the way to train
    again. waiting: it has no slots, or those that it has are away. sub-healthy: it earns less than
    at full strength, or, below 0, more. recomputed: it was earned, and is done again. Together with
    what was earned they are what the cluster at full strength would have earned, always; and so
    for slots: seconds that they trained, and those that they did not.
    """

    def __init__(self) -> None:
        self.flop = self.slot_s = 0.0
        self.lost_flop: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        self.lost_slot_s: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        self.flop_of: dict[int, float] = {}
        """Of `flop`, by task."""
        self.full: dict[int, float] = {}
        self.full_slots: dict[int, int] = {}
        self.waf: dict[int, float] = {}
        self.slots: dict[int, int] = {}
        """That train, by task."""
        self.down_s: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        """Task-seconds without training, by why."""
        self.curve: list[tuple[float, float]] = []
        """When the WAF of all changed, and to what."""
        self._why: dict[int, Lost] = {}
        self._since_s: dict[int, float] = {}

    def begin(self, at_s: float) -> None:
        """From here on it counts: what each task earns now is its full strength."""
        self.full, self.full_slots = dict(self.waf), dict(self.slots)
        self.flop, self.lost_flop = 0.0, dict.fromkeys(LOST, 0.0)
        self.flop_of = dict.fromkeys(self.waf, 0.0)
        self.slot_s, self.lost_slot_s = 0.0, dict.fromkeys(LOST, 0.0)
        self.down_s, self.curve = dict.fromkeys(LOST, 0.0), [(at_s, self.total)]
        self._since_s = dict.fromkeys(self.waf, at_s)

    def befalls(self, at_s: float) -> None:
        """Something befalls the cluster, or is asked of it: of no interest to the sum."""

    @property
    def whole_flop(self) -> float:
        """What would have been earned without a fault."""
        return math.fsum((self.flop, *self.lost_flop.values()))

    @property
    def share(self) -> float:
        """Of that, what was."""
        return self.flop / self.whole_flop if self.whole_flop else 0.0

    @property
    def total(self) -> float:
        """WAF of all tasks now."""
        total = 0.0
        for waf in self.waf.values():
            total += waf
        return total

    def earns(self, at_s: float, task: int, waf: float, slots: int, why: Lost) -> None:
        """From now on the task earns so much, on so many slots; `why` it does not earn more."""
        if self.waf.get(task) == waf and self._why.get(task) == why:
            return
        self.settle(at_s, task)
        changed = self.waf.get(task) != waf
        self.waf[task], self.slots[task], self._why[task] = waf, slots, why
        if changed:
            self._changed(at_s)

    def fills(self, at_s: float, task: int, waf: float, slots: int) -> None:
        """From now on the task is at full strength when it earns so much, on so many slots."""
        self.settle(at_s, task)
        self.full[task], self.full_slots[task] = waf, slots

    def leaves(self, at_s: float, task: int) -> None:
        """The task is over: from now on nothing is earned by it, nor lost."""
        if task in self.waf:
            self.settle(at_s, task)
            del self.waf[task], self.slots[task]
            self.full.pop(task, None)
            self._changed(at_s)

    def settle(self, at_s: float, task: int) -> None:
        """Add up what the task earned until now."""
        past_s = at_s - self._since_s.get(task, at_s)
        self._since_s[task] = at_s
        if not past_s:
            return
        waf, why = self.waf.get(task, 0.0), self._why.get(task, "waiting")
        slots = self.slots.get(task, 0)
        self.flop += waf * past_s
        self.flop_of[task] = self.flop_of.get(task, 0.0) + waf * past_s
        self.slot_s += slots * past_s
        self.lost_flop[why] += (self.full.get(task, 0.0) - waf) * past_s
        self.lost_slot_s[why] += (self.full_slots.get(task, 0) - slots) * past_s
        if not waf:
            self.down_s[why] += past_s

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        """What the task earned, and is to earn again in so many slot-seconds."""
        self.flop -= flop
        self.flop_of[task] = self.flop_of.get(task, 0.0) - flop
        self.lost_flop["recomputed"] += flop
        self.slot_s -= slot_s
        self.lost_slot_s["recomputed"] += slot_s

    def end(self, at_s: float) -> None:
        """Add up all."""
        for task in self.waf:
            self.settle(at_s, task)

    def stand_for(self, num: int) -> None:
        """Each slot was so many GPUs: their time."""
        self.slot_s *= num
        self.full_slots = {task: num * slots for task, slots in self.full_slots.items()}
        self.lost_slot_s = {why: num * one_s for why, one_s in self.lost_slot_s.items()}

    def _changed(self, at_s: float) -> None:
        if self.curve and self.curve[-1][0] == at_s:
            self.curve.pop()
        self.curve.append((at_s, self.total))

Key = tuple[int, int, int]
"""A process: task, rank, attempt."""
ASKED = (r.TaskSubmitted, r.TaskWeightSet, r.TaskCancelRequested, d.TaskEnded)
"""After one of these another plan is the cluster's full strength."""
_ANSWERS = (r.Quiesced, r.Reconfigured, r.RankReady)
"""Of these alone nothing follows: of the last of them an order does."""
OF_NODES = (r.NodeReachable, r.NodeDrained, r.NodeUndrained, NodeQuarantined, QuarantineLifted,
            d.IncidentEscalated)
"""After one of these tasks may wait for a node, or no longer."""


class Account:
    """`opens` makes the job of a task that was just submitted. Times are those of the log."""

    def __init__(self, state: ClusterState, earnings: Earnings,
                 opens: Callable[[Task], Job]) -> None:
        self.state, self.earnings = state, earnings
        self.jobs: dict[int, Job] = {}
        self.transitions = 0
        self.does: Callable[[float, int, int, str], None] = _nobody
        """Is told what each task does: on how many slots it trains, or why it does not."""
        self._opens = opens
        self._untold: dict[str, list[int]] = {}
        """By node: tasks that a fault of it has stopped, of which nobody was told."""
        self._left: set[int] = set()
        self._has_begun = self._asked = False

    def begin(self, at_s: float) -> None:
        """The horizon begins: what each task earns is its full strength; its state is saved."""
        self._has_begun, self._asked, self.transitions = True, False, 0
        self.earnings.begin(at_s)
        for job in self.jobs.values():
            job.keep(at_s)

    def end(self, at_s: float) -> None:
        for number in self.jobs:
            self.look(at_s, number)
        self.earnings.end(at_s)

    # --- what befalls tasks ---------------------------------------------------------------------
    def strikes(self, at_s: float, keys: Iterable[Key], node: str = "") -> list[int]:
        """These processes are gone, or stand: tasks that do not train without them, by number.

        `node`: told by what is told of that node.
        """
        hurt = sorted({key[0] for key in keys if self._needs(key)})
        for number in hurt:
            job = self.jobs[number]
            if not job.stuck:
                job.stuck, job.told = True, False
            self.look(at_s, number)
        if node and hurt:
            self._untold[node] = hurt
        return hurt

    def _needs(self, key: Key) -> bool:
        """A task goes on without whoever has yet to join it."""
        task = self.state.tasks[key[0]]
        return not task.heals_in_memory or not task.members or any(
            (member.rank, member.attempt) == key[1:] for member in task.members)

    def goes_on(self, number: int) -> None:
        """Whatever had stopped it, it trains."""
        job = self.jobs[number]
        job.stuck, job.told, job.halted = False, True, False

    def stands(self, at_s: float, number: int) -> None:
        """It has come to where its members leave their generation."""
        self.jobs[number].halted = True
        self.look(at_s, number)

    def undo(self, number: int, flop: float) -> None:
        """So many of the task's FLOP are to be done again."""
        if self._has_begun and number in self.earnings.waf:
            slots = self.earnings.full_slots.get(number, 0)
            rate = table.rate_at(self.jobs[number].table, slots)
            self.earnings.undo(number, flop * self.state.tasks[number].weight,
                               flop / rate * slots if rate else 0.0)

    # --- what the log says ------------------------------------------------------------------------
    def read(self, at_s: float, record: Record) -> list[int]:
        """A record, which is folded: the tasks to look at, when what follows at once is done."""
        body, touched = record.body, list[int]()
        if isinstance(body, _ANSWERS):
            return touched
        number = getattr(body, "task", 0)
        if isinstance(body, r.TaskSubmitted):
            number = record.seq
            self.jobs[number] = self._opens(self.state.tasks[number])
        elif isinstance(body, r.RankExited | r.CollectiveFailed):
            if number in self.jobs and getattr(body, "generation", -1) in (
                    -1, self.state.tasks[number].generation):
                self.jobs[number].told = True
        elif isinstance(body, r.NodeUnreachable | r.NodeLeft | r.NodeJoined):
            touched = self._untold.pop(body.node, [])
            for task in touched:
                self.jobs[task].told = True
            touched = [*touched, *self._standing()]
        elif isinstance(body, OF_NODES):
            touched = self._standing()
        elif isinstance(body, o.StartRank):
            self._starts(at_s, number)
        elif isinstance(body, o.Reconfigure):
            self.transitions += 1
        elif isinstance(body, d.PlanChosen):
            self._planned(at_s, body)
        elif isinstance(body, r.TaskCancelRequested) or (
                isinstance(body, d.TaskEnded) and body.outcome != "failed"):
            self.leaves(at_s, number)
        self._asked = self._has_begun and (self._asked or isinstance(body, ASKED))
        if number in self.jobs:
            touched.append(number)
        return touched

    def _standing(self) -> list[int]:
        """Tasks that do not train: a node may be what they wait for."""
        return [number for number, job in self.jobs.items() if not job.rate_flops]

    def leaves(self, at_s: float, number: int) -> None:
        """The task is finished, or somebody wants it to end. Who has failed is still missed."""
        if number in self.jobs:
            self._left.add(number)
            self.jobs[number].goes_at(at_s, 0.0)
            self.earnings.leaves(at_s, number)

    def _starts(self, at_s: float, number: int) -> None:
        """All processes of a command start: after the first time, from what is kept."""
        task, job = self.state.tasks[number], self.jobs[number]
        if not task.heals_in_memory and job.round != task.rounds:
            job.round = task.rounds
            self.goes_on(number)
            if task.rounds > 1:
                self.transitions += 1
                self.undo(number, job.fall_back(at_s))

    def _planned(self, at_s: float, plan: d.PlanChosen) -> None:
        """The first plan after a request says what each task is to earn from now on."""
        if not self._asked:
            return
        self._asked = False
        for one in (*plan.allocations, *plan.kept):
            task, job = self.state.tasks[one.task], self.jobs[one.task]
            if one.task not in self._left:
                self.earnings.fills(at_s, one.task, task.weight * table.rate_at(
                    job.table, one.slots), one.slots)

    # --- what a task earns ------------------------------------------------------------------------
    def look(self, at_s: float, number: int) -> None:
        """At what rate the task goes on from now, and why at no higher one."""
        if number in self._left:
            return
        task, job = self.state.tasks[number], self.jobs[number]
        rate_flops, slots = 0.0, 0
        if not job.stuck and (task.phase == "training" or (
                task.phase == "quiescing" and task.mode == "boundary" and not job.halted)):
            slots = len(task.members) if task.heals_in_memory else len(task.target)
            rate_flops = table.rate_at(job.table, slots)
        job.goes_at(at_s, rate_flops)
        why = self._why(task, job) if not rate_flops else "sub-healthy"
        self.earnings.earns(at_s, number, task.weight * rate_flops, slots, why)
        self.does(at_s, number, slots if rate_flops else 0, why)

    def _why(self, task: Task, job: Job) -> Lost:
        if job.stuck and not job.told:
            return "detection"
        if not task.target:
            return "waiting"
        return "transition" if may_hold(self.state, task.target) else "waiting"


def _nobody(at_s: float, task: int, trains: int, why: str) -> None:
    pass


# --- Earnings traced to what befell the cluster: each loss belongs to the last thing that deepened
# it. ---
#
# What befalls while something else is still felt is charged with what is lost beyond that. It is
# over when no more is lost than before it struck. What did not hurt has no part in the end of what
# did.

MARGIN_SHARE = 1e-9
"""Of full strength: sums of floats are not exact."""
Level = tuple[float, float, float]
"""What is lost each second: weighted FLOP, slot-seconds, task-seconds."""


class Felt(Struct, kw_only=True):
    """What one thing cost until all was as before it; below 0 it brought something."""

    at_s: float
    before: Level
    lost_flop: float = 0.0
    lost_slot_s: float = 0.0
    down_s: float = 0.0
    over_s: float | None = None
    """None: never until the end, or nothing was felt of it."""
    has_hurt: bool = False
    again_flop: float = 0.0
    """Of what was lost: what was done again."""


class Traced(Earnings):
    """`felt` has one for each call of `befalls`, in order; `loose` what nothing is charged with."""

    def __init__(self) -> None:
        super().__init__()
        self.felt: list[Felt] = []
        self.loose = Felt(at_s=0.0, before=(0.0, 0.0, 0.0))
        self.by_task: dict[int, float] = {}
        """FLOP, weighted."""
        self._open: list[Felt] = []
        self._level: Level = (0.0, 0.0, 0.0)
        self._at_s = 0.0

    def begin(self, at_s: float) -> None:
        super().begin(at_s)
        self.felt, self._open, self._level, self._at_s = [], [], (0.0, 0.0, 0.0), at_s
        self.by_task = dict.fromkeys(self.waf, 0.0)

    def befalls(self, at_s: float) -> None:
        self._charge(at_s)
        self.felt.append(Felt(at_s=at_s, before=self._level))
        self._open.append(self.felt[-1])

    def earns(self, at_s: float, task: int, waf: float, slots: int, why: Lost) -> None:
        super().earns(at_s, task, waf, slots, why)
        self._look(at_s)

    def fills(self, at_s: float, task: int, waf: float, slots: int) -> None:
        super().fills(at_s, task, waf, slots)
        self._look(at_s)

    def leaves(self, at_s: float, task: int) -> None:
        super().leaves(at_s, task)
        self._look(at_s)

    def settle(self, at_s: float, task: int) -> None:
        past_s = at_s - self._since_s.get(task, at_s)
        self.by_task[task] = self.by_task.get(task, 0.0) + self.waf.get(task, 0.0) * past_s
        super().settle(at_s, task)

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        super().undo(task, flop, slot_s)
        self.by_task[task] -= flop
        felt = self._open[-1] if self._open else self.loose
        felt.lost_flop += flop
        felt.again_flop += flop
        felt.lost_slot_s += slot_s

    def end(self, at_s: float) -> None:
        super().end(at_s)
        self._charge(at_s)

    def _look(self, at_s: float) -> None:
        """What is lost from now on."""
        self._charge(at_s)
        flop = slots = down = 0.0
        for task, full in self.full.items():
            waf = self.waf.get(task, 0.0)
            flop += full - waf
            slots += self.full_slots[task] - self.slots.get(task, 0)
            down += bool(full) and not waf
        self._level = (flop, slots, down)
        margin = MARGIN_SHARE * sum(self.full.values())
        for older, felt in zip([None, *self._open], self._open, strict=False):
            if older is not None and not felt.has_hurt and flop < felt.before[0]:
                felt.before = self._level  # what is over is an older one's
            felt.has_hurt = felt.has_hurt or flop > felt.before[0] + margin
            if felt.has_hurt and flop <= felt.before[0] + margin:
                felt.over_s = at_s
        self._open = [felt for felt in self._open if felt.over_s is None]

    def _charge(self, at_s: float) -> None:
        """What was lost since the last look: from the newest downwards, each beyond its own."""
        past_s, self._at_s = at_s - self._at_s, at_s
        if not past_s:
            return
        rest = self._level
        for felt in reversed(self._open):
            _add(felt, (rest[0] - felt.before[0], rest[1] - felt.before[1],
                        rest[2] - felt.before[2]), past_s)
            rest = felt.before
        _add(self.loose, rest, past_s)


def _add(felt: Felt, level: Level, past_s: float) -> None:
    felt.lost_flop += level[0] * past_s
    felt.lost_slot_s += level[1] * past_s
    felt.down_s += level[2] * past_s
