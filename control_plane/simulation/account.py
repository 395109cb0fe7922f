"""The account of a cluster's tasks: what each earns in a state, and why no more.

A run on paper keeps it, and a recorded log is read by it: the same rules, whoever folds the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...events import orders as o
from ...events import reports as r
from ...events.decided import NodeQuarantined
from ...events.detected import QuarantineLifted
from ...events.records import Record
from .. import throughput
from ..state import ClusterState, Task
from .earnings import Earnings, Lost
from .job import Job

Key = tuple[int, int, int]
"""A process: task, rank, attempt."""
ASKED = (r.TaskSubmitted, r.TaskWeightSet, r.TaskCancelRequested, o.TaskEnded)
"""After one of these another plan is the cluster's full strength."""
_ANSWERS = (r.Quiesced, r.Reconfigured, r.RankReady)
"""Of these alone nothing follows: of the last of them an order does."""
OF_NODES = (r.NodeHeard, r.NodeDrained, r.NodeUndrained, NodeQuarantined, QuarantineLifted,
            o.IncidentEscalated)
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
            rate = throughput.rate_at(self.jobs[number].table, slots)
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
        elif isinstance(body, r.NodeSilenced | r.NodeLeft | r.NodeJoined):
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
        elif isinstance(body, o.PlanChosen):
            self._planned(at_s, body)
        elif isinstance(body, r.TaskCancelRequested) or (
                isinstance(body, o.TaskEnded) and body.outcome != "failed"):
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

    def _planned(self, at_s: float, plan: o.PlanChosen) -> None:
        """The first plan after a request says what each task is to earn from now on."""
        if not self._asked:
            return
        self._asked = False
        for one in (*plan.allocations, *plan.kept):
            task, job = self.state.tasks[one.task], self.jobs[one.task]
            if one.task not in self._left:
                self.earnings.fills(at_s, one.task, task.weight * throughput.rate_at(
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
            rate_flops = throughput.rate_at(job.table, slots)
        job.goes_at(at_s, rate_flops)
        why = self._why(task, job) if not rate_flops else "sub-healthy"
        self.earnings.earns(at_s, number, task.weight * rate_flops, slots, why)
        self.does(at_s, number, slots if rate_flops else 0, why)

    def _why(self, task: Task, job: Job) -> Lost:
        if job.stuck and not job.told:
            return "detection"
        if not task.target:
            return "waiting"
        return "transition" if self.state.roll.has(task.target) else "waiting"


def _nobody(at_s: float, task: int, trains: int, why: str) -> None:
    pass
