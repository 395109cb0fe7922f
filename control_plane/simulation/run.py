"""One policy's life of a scenario, from the first node to the horizon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ...events.records import reports
from ...events.records import types as t
from ...events.records.envelope import Record
from ...events.records.statuses import LOST_CONNECTION
from ...events.spec import policy as r
from ...events.spec.job import JobSpec
from ..decide.advance import HEART
from ..incidents.severity import TABLE
from ..state.task import Task
from .accounting import Account, Earnings, Key
from .cluster import Paper, PaperNode
from .engine import LEADER, Engine
from .policies.policy import Policy, Told
from .task_progress import Job, Kept
from .trace.external_event import Anything, Asked, Happening, Said, Takes, is_felt

SITE = "operator/site"
"""Whoever repairs nodes."""
WARM_TRIES_NUM = 12


class Ground(NamedTuple):
    """What all policies of a scenario have in common. `slots` by node, the rest by task's name:
    `params` of its model, `iterations_s` at its largest size, where that is not `iteration_s`."""

    slots: dict[str, int]
    tasks: tuple[JobSpec, ...]
    iteration_s: float
    happenings: Sequence[Anything]
    horizon_s: float
    limits: r.Policy
    params: dict[str, float]
    iterations_s: Mapping[str, float] = {}
    grain: int = 1
    """So many GPUs does a slot stand for."""


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
    late: int = 0
    """Happenings that would have been felt, had they not come after the horizon."""
    slot_s: Mapping[str, float] = {}
    """Of all slots, by what became of them (slot_time.py)."""


class Run:
    """`keep` takes each record of the log. `earnings`: one that notes more than others do."""

    def __init__(self, ground: Ground, policy: Policy,
                 keep: Callable[[Record], None] | None = None,
                 earnings: Earnings | None = None) -> None:
        self.ground, self.costs = ground, policy.costs
        told = Told(costs=policy.costs, params=ground.params)
        self.engine = Engine(policy.decides(told))
        self.account = Account(self.engine.state, earnings or Earnings(), self._opens)
        self.paper = Paper(self.engine, policy.costs, self.account)
        self.account.does = self.paper.slot_time.does
        self.counts: Counter[str] = Counter()
        self.ignored = 0
        self._keep = keep
        self._drained: set[str] = set()
        self.engine.answer = self._answer

    def play(self) -> Outcome:
        """The whole of it."""
        engine, ground = self.engine, self.ground
        engine.tell(LEADER, reports.EpochStarted(nonce="simulated", code="simulation", heart=HEART))
        engine.tell(LEADER, reports.PolicySet(policy=ground.limits))
        for name, num_slots in ground.slots.items():
            self.paper.join(name, num_slots)
        for spec in ground.tasks:
            self._ask(reports.TaskSubmitted(spec=spec))
        self._warm()
        began_s = engine.now_s
        self.account.begin(began_s)
        self.paper.slot_time.begin(began_s)
        late = 0
        for one in ground.happenings:
            late += one.at_s > ground.horizon_s and is_felt(one)
            engine.later(one.at_s, partial(self._happens, one))
        engine.run(began_s + ground.horizon_s)
        self.account.end(engine.now_s)
        self.account.earnings.stand_for(ground.grain)
        self.paper.slot_time.end(engine.now_s)
        return Outcome(self.account.earnings, began_s, self.account.transitions,
                       self.counts, self.ignored, late, {kind: ground.grain * one_s for kind, one_s
                                      in self.paper.slot_time.slot_s.items()})

    def _warm(self) -> None:
        """Until all that was given slots trains, and has shown so."""
        costs = self.costs
        step_s = costs.start_s + costs.quiesce_s + costs.regroup_s + 12 * self.ground.iteration_s
        for _ in range(WARM_TRIES_NUM):
            self.engine.run(self.engine.now_s + step_s)
            if all(task.phase == "training" for task in self.engine.state.tasks.values()
                   if task.target):
                return

    def _ask(self, body: t.Body) -> None:
        self.engine.tell(SITE, body)

    # --- from outside ---------------------------------------------------------------------------
    def _happens(self, one: Anything) -> None:
        if is_felt(one):
            self.account.earnings.befalls(self.engine.now_s)
        match one:
            case Takes():
                self.costs = self.paper.costs = one.costs
            case Asked():
                self._asked(one)
            case Said():
                self._told(one)
            case Happening() if one.task or one.slot >= 0:
                self._strikes(one)
            case Happening():
                self._befalls(one)

    def _asked(self, one: Asked) -> None:
        body = one.body
        if isinstance(body, reports.PolicySet):
            self.engine.tell(LEADER, body)
        elif one.task and not isinstance(body, reports.TaskSubmitted):
            number = self._number(one.task)
            self._ask(replace(body, **{"task": number})) if number else self._ignore()
        else:
            self._ask(body)

    def _told(self, one: Said) -> None:
        node = self.paper.nodes.get(one.node)
        if node is None or not node.up:
            self._ignore()
            return
        of_leader = isinstance(one.body, reports.NodeUnreachable | reports.NodeReachable)
        self.engine.tell(LEADER if of_leader else node.source,
                         replace(one.body, **{"incarnation": node.incarnation}))

    def _befalls(self, one: Happening) -> None:
        node = self.paper.nodes.get(one.node)
        up = node is not None and node.up
        if one.event == "fault" and up:
            assert node is not None
            self._fault(node, one)
        elif one.event == "left" and up:
            assert node is not None
            self._hurt(node)
            self.paper.leave(one.node)
        elif one.event == "repaired" and node is not None and (not up or one.node in self._drained):
            self._hurt(node)
            self.paper.join(one.node, node.num_slots)
            if one.node in self._drained:
                self._drained.discard(one.node)
                self._ask(reports.NodeUndrained(node=one.node, reason="repaired"))
        elif one.event == "joined" and not up:
            most = max(self.ground.slots.values(), default=1)
            self.paper.join(one.node, one.num_slots or self.ground.slots.get(one.node, most))
        else:
            self._ignore()

    def _fault(self, node: PaperNode, one: Happening) -> None:
        cause, until_told_s = one.cause, self._until_told_s(one)
        if cause == LOST_CONNECTION:
            hurt = self._hurt(node)
            self.paper.fall(node.name, until_told_s, hurt)
            for number in hurt:
                self.paper.peer_tells(
                    number, one.seen_in_s if one.seen_in_s >= 0 else until_told_s)
            return
        victim = min(node.processes, default=None)
        if victim is not None:
            self._fails(node, victim, cause, until_told_s)
        if TABLE[cause] == "SEV1":
            self._drained.add(node.name)
            self.engine.later(until_told_s, lambda: self._drain(node.name, cause))

    def _strikes(self, one: Happening) -> None:
        """A process that lives, if there is one."""
        state, number = self.engine.state, self._number(one.task)
        if one.slot >= 0:
            node = state.nodes.get(one.node)
            found = node.occupants.get(one.slot) if node is not None else None
            key = (found.task, found.rank, found.attempt) if found is not None else None
        else:
            task = state.tasks.get(number)
            ranks = task.ranks if task is not None else {}
            rank = ranks.get(one.rank) or ranks.get(min(ranks, default=-1))
            key = (number, rank.rank, rank.attempt) if rank is not None else None
        there = next((node for node in self.paper.nodes.values() if key in node.processes), None)
        if key is None or there is None:
            self._ignore()
        else:
            self._fails(there, key, one.cause, self._until_told_s(one))

    def _fails(self, node: PaperNode, key: Key, cause: str, until_told_s: float) -> None:
        """The process ends, or a collective fails under it."""
        self._struck([key])
        task = self.engine.state.tasks[key[0]]
        if TABLE[cause] == "SEV3" and task.heals_in_memory and task.member(key[1]) is not None:
            self.paper.fails(node, key, until_told_s, cause)
        else:
            self.paper.end(node, key, until_told_s, status=cause)

    def _until_told_s(self, one: Happening) -> float:
        if one.told_in_s >= 0:
            return one.told_in_s
        return self.costs.until_told_s(one.cause, self._iteration_s(one.task))

    def _iteration_s(self, task: str) -> float:
        return self.ground.iterations_s.get(task, self.ground.iteration_s)

    def _number(self, name: str) -> int:
        """Of the task of that name; 0: none was submitted."""
        return next((task.id for task in self.engine.state.tasks.values()
                     if task.spec.name == name), 0)

    def _ignore(self) -> None:
        self.ignored += 1

    def _drain(self, name: str, cause: str) -> None:
        """The site takes the node out, to have it repaired."""
        if name in self._drained:
            self._ask(reports.NodeDrained(node=name, reason=cause))

    def _hurt(self, node: PaperNode) -> list[int]:
        """Also who has ended there, and nobody was told: it is told by what is told of the node."""
        return self._struck([*node.processes, *sorted(node.ended)], node.name)

    def _struck(self, keys: Collection[Key], node: str = "") -> list[int]:
        """These processes stop now, and who needs them; what those had done until now is told."""
        for number in sorted({key[0] for key in keys}):
            self.paper.catch_up(number)
        return self.account.strikes(self.engine.now_s, keys, node)

    # --- what the heart makes of it -------------------------------------------------------------
    def _answer(self, records: Sequence[Record]) -> None:
        touched: set[int] = set()
        for record in records:
            if self._keep is not None:
                self._keep(record)
            self.counts[record.kind] += 1
            touched.update(self.account.read(self.engine.now_s, record))
        self.paper.carry_out(records)
        for number in sorted(touched):
            self.account.look(self.engine.now_s, number)

    def _opens(self, task: Task) -> Job:
        assert task.throughput is not None
        return Job(task.id, task.throughput,
                   max(task.throughput.rates_flops) * self._iteration_s(task.spec.name),
                   Kept(self.costs.checkpoint_s), Kept(self.costs.copy_s))
