"""A cluster whose links, hosts and switches go bad for minutes, for a week of the log's time.

What is bad loses what the ranks behind it send. A task that has such members fails: its ranks name
the peers that they do not hear, or none, or all wait in a collective that does not end. Bad links
between nodes, bad hosts (their network card) and bad switches end by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from decider import Driver, spec, task_of
from msgspec import Struct
from unicron.control_plane.decide.decide import decide
from unicron.control_plane.state.task import Rank
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.decisions import ExperimentBegun, SlotsJudged
from unicron.events.records.envelope import Record

WEEK_S = 7 * 86_400.0
ITERATION_S = 2.0
STEP_S = 20.0
NUM_UNDER_SWITCH = 4


class Bad(Struct, frozen=True):
    """What is bad, and when. `share`: how often an iteration meets it."""

    kind: str
    nodes: tuple[str, ...]
    since_s: float
    until_s: float
    share: float

    def hits(self, one: str, other: str) -> bool:
        if self.kind == "link":
            return {one, other} == set(self.nodes)
        return one in self.nodes or other in self.nodes


class SickNetwork(Driver):
    """Nodes of one slot under switches, tasks that train, and free slots."""

    decide = staticmethod(decide)

    def __init__(self, seed: int, *, num_nodes: int = 12, sizes: tuple[int, ...] = (4, 3)) -> None:
        super().__init__(nodes=0)
        self.rng = random.Random(seed)
        for number in range(1, num_nodes + 1):
            switch = f"s{(number - 1) // NUM_UNDER_SWITCH}"
            self.join(f"n{number}", slots=1, labels=t.Labels(rack=switch, switch=switch))
        self.bad: list[Bad] = []
        self.jobs = [
            self.running(
                spec(
                    name=f"task{at}",
                    slots={"min": size, "max": size},
                    train={
                        "iterations": 10**7,
                        "output": f"/tmp/{at}",
                        "batch": {"global": 24, "micro": 2},
                    },
                )
            )
            for at, size in enumerate(sizes)
        ]

    # --- what is bad ---
    def draw(self, num: int) -> None:
        """Draw what goes bad within the week."""
        names = sorted(self.state.nodes)
        for _ in range(num):
            kind = self.rng.choice(("link", "host", "switch"))
            first = self.rng.choice(names)
            nodes = [first]
            if kind == "link":
                nodes.append(self.rng.choice([name for name in names if name != first]))
            elif kind == "switch":
                label = self.state.nodes[first].labels.switch
                nodes = [name for name in names if self.state.nodes[name].labels.switch == label]
            since_s = self.now_s + self.rng.uniform(0, WEEK_S)
            length_s = self.rng.uniform(60, 900)
            share = self.rng.choice((0.2, 0.6, 1.0))
            self.bad.append(Bad(kind, tuple(nodes), since_s, since_s + length_s, share))
        self.bad.sort(key=lambda one: one.since_s)

    def lost(self, task: int) -> list[tuple[str, str]]:
        """The pairs of the task's nodes between which nothing comes through now."""
        here = sorted({member.node for member in task_of(self, task).members})
        now = [one for one in self.bad if one.since_s <= self.now_s < one.until_s]
        return [
            (one, other)
            for one in here
            for other in here
            if one < other and any(bad.hits(one, other) for bad in now)
        ]

    def is_met(self, task: int) -> bool:
        """Whether an iteration of the task meets what is bad."""
        now = [one for one in self.bad if one.since_s <= self.now_s < one.until_s]
        return bool(self.lost(task)) and self.rng.random() < max(one.share for one in now)

    # --- the tasks ---
    def do(self, order: t.Body) -> list[Record]:
        """A generation over what is bad does not come up, or fails with its first collective."""
        if isinstance(order, o.Reconfigure) and self.is_met(order.task) and self.rng.random() < 0.5:
            self.now_s += STEP_S
            rank = task_of(self, order.task).ranks[order.members[0].rank]
            return self.tell(
                self.source(rank.slot.node),
                r.ReconfigureFailed(
                    task=order.task,
                    rank=rank.rank,
                    attempt=rank.attempt,
                    generation=order.generation,
                    error="timed out",
                ),
            )
        return super().do(order)

    def week(self) -> None:
        """Play until a week is over."""
        end_s = self.now_s + WEEK_S
        while self.now_s < end_s:
            self._tick()
            is_bad = any(one.since_s <= self.now_s < one.until_s for one in self.bad)
            coming = [one.since_s for one in self.bad if one.since_s > self.now_s]
            for task in self.jobs:
                self._go_on(task, 5 if is_bad else 200)
            self.now_s = self.now_s + STEP_S if is_bad else min([*coming, end_s]) + 0.1

    def _go_on(self, task: int, num: int) -> None:
        it = task_of(self, task)
        if it.outcome or it.phase != "training":
            return
        if self.is_met(task):
            self._fail(task)
        else:
            self.steps[task] = max(self.steps.get(task, 0), it.iteration)
            self.obey(self.progress(task, times_s=(ITERATION_S,) * num))

    def _fail(self, task: int) -> None:
        it, lost = task_of(self, task), self.lost(task)
        names_peers, hangs = self.rng.random() < 0.7, self.rng.random() < 0.5
        peers: dict[str, list[str]] = {}
        for one, other in lost:
            peers.setdefault(one, []).append(other)
            peers.setdefault(other, []).append(one)
        told: list[Record] = []
        for rank in list(it.living_members()):
            mine = peers.get(rank.slot.node, []) if names_peers else []
            told += self.tell(self.source(rank.slot.node), self._sign(task, rank, mine, hangs))
        deadline = f"{'hang' if hangs else 'evidence'}/{task}/{it.generation}"
        if deadline in self.state.deadlines:
            told += self.due(deadline)
        self.obey(told)
        self._tick()

    def _sign(self, task: int, rank: Rank, peers: list[str], hangs: bool) -> t.Body:
        it = task_of(self, task)
        of: dict[str, Any] = {
            "task": task,
            "rank": rank.rank,
            "attempt": rank.attempt,
            "generation": it.generation,
            "iteration": it.iteration,
        }
        if hangs:
            return r.RankStalled(
                **of,
                where="collective",
                what="all-reduce",
                collective=1,
                in_s=3 * ITERATION_S,
                normal_s=ITERATION_S,
                silent_peers=tuple(peers),
            )
        peer = f"{self.rng.choice(peers)}:1" if peers else ""
        return r.CollectiveFailed(**of, error="connection closed by peer", peer=peer)

    def _tick(self) -> None:
        """Report the deadlines that have passed."""
        for _ in range(100):
            due = sorted(
                (one.due_s, name)
                for name, one in self.state.deadlines.items()
                if one.due_s <= self.now_s
            )
            if not due:
                return
            self.obey(self.due(due[0][1]))

    # --- what was decided ---
    def judged(self) -> Iterator[SlotsJudged]:
        return (one.body for one in self.log if isinstance(one.body, SlotsJudged))

    @property
    def num_experiments(self) -> int:
        return sum(isinstance(one.body, ExperimentBegun) for one in self.log)

    def innocent(self) -> list[str]:
        """Nodes that were taken out, and were neither bad nor at a bad link in the day before."""
        found: list[str] = []
        for record in self.log:
            if isinstance(record.body, SlotsJudged) and record.body.verdict == "slot":
                sick = {
                    name
                    for one in self.bad
                    if one.kind != "switch" and -86_400 < one.since_s - record.at_s < 0
                    for name in one.nodes
                }
                found += [x.slot.node for x in record.body.suspects if x.slot.node not in sick]
        return found
