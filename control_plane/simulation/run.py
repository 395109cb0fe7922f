"""One policy's life of a scenario, from the first node to the horizon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ...events import orders as o
from ...events import reports as r
from ...events.records import Record
from ...events.spec import JobSpec
from ...events.statuses import CONNECTION_RESET, LOST_CONNECTION
from .. import throughput
from ..heart import HEART
from ..severity import TABLE
from ..state import Task
from .earnings import Earnings, Lost
from .engine import LEADER, Engine
from .happening import Happening
from .job import Job, Kept
from .paper import Key, Paper, PaperNode
from .policy import Policy, Told

SITE = "operator/site"
"""Whoever repairs nodes."""
WARM_TRIES_NUM = 12


class Ground(NamedTuple):
    """What all policies of a scenario have in common. `slots` by node, `params` by task's name."""

    slots: dict[str, int]
    tasks: tuple[JobSpec, ...]
    iteration_s: float
    happenings: Sequence[Happening]
    horizon_s: float
    limits: r.Policy
    params: dict[str, float]


class Outcome(NamedTuple):
    """What came of it."""

    earnings: Earnings
    began_s: float
    """When the horizon began on the log's clock: all that could train did."""
    transitions: int
    counts: Counter[str]
    """Records by kind."""
    ignored: int
    """Happenings to nodes that were not there, or are not to be repaired."""


class Run:
    """`keep` takes each record of the log."""

    def __init__(self, ground: Ground, policy: Policy,
                 keep: Callable[[Record], None] | None = None) -> None:
        self.ground, self.costs = ground, policy.costs
        self.engine = Engine(policy.decides(Told(costs=policy.costs, params=ground.params)))
        self.jobs: dict[int, Job] = {}
        self.earnings = Earnings()
        self.paper = Paper(self.engine, policy.costs, self.jobs)
        self.counts: Counter[str] = Counter()
        self.transitions = self.ignored = 0
        self._keep = keep
        self._drained: set[str] = set()
        self._untold: dict[str, set[int]] = {}
        """By node: tasks that a fault of it has stopped, of which nobody was told."""
        self._began_s = -1.0
        self._num_asked = 0
        self.engine.answer = self._answer
        self.paper.changed = self._look
        self.paper.lost = self._lost

    def play(self) -> Outcome:
        """The whole of it."""
        engine, ground = self.engine, self.ground
        engine.tell(LEADER, r.EpochStarted(nonce="simulated", code="simulation", heart=HEART))
        engine.tell(LEADER, r.PolicySet(policy=ground.limits))
        for name, num_slots in ground.slots.items():
            self.paper.join(name, num_slots)
        for spec in ground.tasks:
            self._ask(r.TaskSubmitted(spec=spec))
        self._warm()
        began_s = self._began_s = engine.now_s
        self.earnings.begin(began_s)
        for job in self.jobs.values():
            job.keep(began_s)
        self.transitions = 0
        for one in ground.happenings:
            engine.later(one.at_s, partial(self._happens, one))
        engine.run(began_s + ground.horizon_s)
        for task in self.jobs:
            self._look(task)
        self.earnings.end(engine.now_s)
        return Outcome(self.earnings, began_s, self.transitions, self.counts,
                       self.ignored)

    def _warm(self) -> None:
        """Until all that was given slots trains, and has shown so."""
        costs = self.costs
        step_s = costs.start_s + costs.quiesce_s + costs.regroup_s + 12 * self.ground.iteration_s
        for _ in range(WARM_TRIES_NUM):
            self.engine.run(self.engine.now_s + step_s)
            if all(task.phase == "training" for task in self.engine.state.tasks.values()
                   if task.target):
                return

    def _ask(self, body: r.Body) -> None:
        self._num_asked += 1
        self.engine.tell(f"{SITE}-{self._num_asked}", body)

    # --- from outside ---------------------------------------------------------------------------
    def _happens(self, one: Happening) -> None:
        node = self.paper.nodes.get(one.node)
        up = node is not None and node.up
        if one.event == "fault" and up:
            assert node is not None
            self._fault(node, one.cause)
        elif one.event == "left" and up:
            assert node is not None
            self._hurt(node.processes)
            self.paper.leave(one.node)
        elif one.event == "repaired" and node is not None and (not up or one.node in self._drained):
            self._hurt(node.processes)
            self.paper.join(one.node, node.num_slots)
            if one.node in self._drained:
                self._drained.discard(one.node)
                self._ask(r.NodeUndrained(node=one.node, reason="repaired"))
        elif one.event == "joined" and not up:
            most = max(self.ground.slots.values(), default=1)
            self.paper.join(one.node, self.ground.slots.get(one.node, most))
        else:
            self.ignored += 1

    def _fault(self, node: PaperNode, cause: str) -> None:
        until_told_s = self.costs.until_told_s(cause, self.ground.iteration_s)
        if cause == LOST_CONNECTION:
            hurt = self._hurt(node.processes)
            self._untold[node.name] = hurt
            self.paper.fall(node.name)
            for number in sorted(hurt):
                self._peer_tells(self.engine.state.tasks[number], until_told_s)
            return
        victim = min(node.processes, default=None)
        if victim is not None:
            self._hurt([victim])
            in_memory = self.engine.state.tasks[victim[0]].heals_in_memory
            if TABLE[cause] == "SEV3" and in_memory:
                self.paper.fails(node, victim, until_told_s, cause)
            else:
                self.paper.end(node, victim, until_told_s, status=cause)
        if TABLE[cause] == "SEV1":
            self._drained.add(node.name)
            self.engine.later(until_told_s, lambda: self._drain(node.name, cause))

    def _drain(self, name: str, cause: str) -> None:
        """The site takes the node out, to have it repaired."""
        if name in self._drained:
            self._ask(r.NodeDrained(node=name, reason=cause))

    def _peer_tells(self, task: Task, in_s: float) -> None:
        """One that lives sees its connections close: a member holds, a command's process ends."""
        for rank in (task.ranks[key] for key in sorted(task.ranks)):
            node, key = self.paper.nodes[rank.slot.node], (task.id, rank.rank, rank.attempt)
            if key in node.processes and task.heals_in_memory:
                self.paper.fails(node, key, in_s, "")
                return
            if key in node.processes:
                self.paper.end(node, key, in_s, status=CONNECTION_RESET)
                return

    def _hurt(self, processes: Sequence[Key] | dict[Key, bool]) -> set[int]:
        """Their tasks do not train any more; which."""
        hurt = {key[0] for key in processes}
        for number in sorted(hurt):
            job = self.jobs[number]
            self.paper.catch_up(number)
            if not job.stuck:
                job.stuck, job.told = True, False
            self._look(number)
        return hurt

    # --- what the heart makes of it -------------------------------------------------------------
    def _answer(self, records: Sequence[Record]) -> None:
        touched: set[int] = set()
        for record in records:
            body = record.body
            if self._keep is not None:
                self._keep(record)
            self.counts[record.kind] += 1
            number = getattr(body, "task", 0)
            match body:
                case r.TaskSubmitted():
                    number = record.seq
                    self._submitted(number)
                case r.RankExited() | r.CollectiveFailed() if number in self.jobs:
                    self.jobs[number].told = True
                case r.NodeSilenced():
                    for task in self._untold.pop(body.node, set()):
                        self.jobs[task].told = True
                        touched.add(task)
                case o.StartRank() if body.spec.training is None:
                    self._round(number)
                case o.Reconfigure():
                    self.transitions += 1
                case _:
                    pass
            if number in self.jobs:
                touched.add(number)
        self.paper.carry_out(records)
        for number in sorted(touched):
            self._look(number)

    def _submitted(self, number: int) -> None:
        task = self.engine.state.tasks[number]
        assert task.throughput is not None
        self.jobs[number] = Job(
            number, task.throughput,
            max(task.throughput.rates_flops) * self.ground.iteration_s,
            Kept(self.costs.checkpoint_s), Kept(self.costs.copy_s))

    def _round(self, number: int) -> None:
        """All processes of a command start: after the first time, from what is kept."""
        task, job = self.engine.state.tasks[number], self.jobs[number]
        if job.round != task.rounds:
            job.round = task.rounds
            job.stuck, job.told = False, True
            if task.rounds > 1:
                self.transitions += 1
                self._lost(number, job.fall_back(self.engine.now_s))

    def _lost(self, number: int, flop: float) -> None:
        if self._began_s >= 0:
            self.earnings.undo(flop * self.engine.state.tasks[number].weight)

    def _look(self, number: int) -> None:
        """At what rate the task goes on from now, and why at no higher one."""
        state, job = self.engine.state, self.jobs[number]
        task = state.tasks[number]
        now_s, rate_flops = self.engine.now_s, 0.0
        if not job.stuck and task.phase == "training":
            size = len(task.members) if task.heals_in_memory else len(task.target)
            rate_flops = throughput.rate_at(job.table, size)
        elif not job.stuck and task.phase == "quiescing" and task.mode == "boundary":
            rate_flops = job.rate_flops
        job.goes_at(now_s, rate_flops)
        self.earnings.earns(now_s, number, task.weight * rate_flops,
                            "sub-healthy" if rate_flops else self._why(task, job))

    def _why(self, task: Task, job: Job) -> Lost:
        if job.stuck and not job.told:
            return "detection"
        if not task.target:
            return "waiting"
        nodes = self.engine.state.nodes
        away = any((node := nodes.get(seat.slot.node)) is None or not node.takes_tasks
                   for seat in task.target)
        return "waiting" if away else "transition"
