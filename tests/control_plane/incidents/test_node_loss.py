"""Suspicion, then loss: a short silence is enough if the task's other members wait for the node."""

from __future__ import annotations

from typing import Any

from decider import Driver, at_rest, failed, kinds, only, spec, task_of, the
from unicron.control_plane.incidents.node_loss import suspects
from unicron.control_plane.service.leases import Leases
from unicron.control_plane.state.node import Node
from unicron.events.log.port import Heartbeat
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

OBSERVE_S = 0.3


class Cluster(Driver):
    """A cluster with a heartbeat every 0.5 s, and leases observed as in the coordinator."""

    def __init__(self, *, nodes: int = 3) -> None:
        super().__init__(nodes=nodes, slots=1)
        self.leases = Leases()
        self.leases.grant(self.now_s)
        self.last_s = dict.fromkeys(self.state.nodes, self.now_s)
        self.silent: set[str] = set()

    def run_for(self, length_s: float, *, blind: bool = False) -> list[Record]:
        """Advance the time; returns the records. `blind`: the leader is paused."""
        records: list[Record] = []
        until_s = self.now_s + length_s
        while self.now_s < until_s - 1e-9:
            self.now_s += min(0.1, until_s - self.now_s)
            for name in self.last_s:
                if name not in self.silent and self.now_s - self.last_s[name] >= 0.5:
                    self.last_s[name] = self.now_s
            if not blind and self.now_s - self.leases._observed_s >= OBSERVE_S - 1e-9:
                records += self.observe()
            for name, deadline in list(self.state.deadlines.items()):
                if deadline.due_s <= self.now_s and not blind:
                    late = self.due(name)
                    records += [*late, *self.obey(late)]
        return records

    def quiesced(self, task: int, rank: int) -> list[Record]:
        return [] if self.is_silent(task, rank) else super().quiesced(task, rank)

    def reconfigured(self, order: o.Reconfigure, rank: int) -> list[Record]:
        return [] if self.is_silent(order.task, rank) else super().reconfigured(order, rank)

    def is_silent(self, task: int, rank: int) -> bool:
        return self.state.tasks[task].ranks[rank].slot.node in self.silent

    def observe(self) -> list[Record]:
        self.leases.observe(
            [
                Heartbeat(node=name, incarnation=1, age_s=self.now_s - at_s)
                for name, at_s in self.last_s.items()
            ],
            self.now_s,
            pause_s=OBSERVE_S,
            state=self.state,
        )
        records = [
            self.tell(f"leader/{self.state.nonce}", body)
            for body in list(self.leases.verdicts(self.state))
        ]
        return [x for one in records for x in [*one, *self.obey(one)]]


def run_three(d: Cluster) -> int:
    task = d.running(spec(slots={"min": 1, "max": 3}))
    d.progress(task, 3)
    return task


def test_a_killed_agent_is_lost_in_two_seconds() -> None:
    """The ranks end with their agent, so other ranks report a failed collective at once."""
    d = Cluster()
    task = run_three(d)
    killed_s = d.now_s
    d.silent.add("n3")
    for rank in (0, 1):
        failed(d, task, rank)
    assert suspects(d.state) == {"n3"}
    records = d.run_for(2.0)
    unreachable = next(x for x in records if isinstance(x.body, r.NodeUnreachable))
    assert unreachable.at_s - killed_s < 2.0
    lost = [
        x.body
        for x in records
        if isinstance(x.body, (decisions.IncidentOpened, decisions.IncidentEscalated))
        and x.body.severity == "SEV1"
    ]
    assert [(x.node, x.status) for x in lost] == [("n3", "lost connection")]
    assert next(x for x in records if x.body is lost[0]).at_s - killed_s < 2.0
    assert d.state.nodes["n3"].health == "lost"
    d.progress(task)
    assert len(task_of(d, task).members) == 2
    assert task_of(d, task).iterations_lost == 0
    at_rest(d)


def report_waiting(d: Cluster, task: int, *ranks: int) -> None:
    """These ranks report that they have waited in a collective for 1.5 s."""
    for rank in ranks:
        it = task_of(d, task)
        d.tell(
            d.source(it.ranks[rank].slot.node),
            r.RankStalled(
                task=task,
                rank=rank,
                attempt=1,
                generation=it.generation,
                iteration=3,
                where="collective",
                what="reduce",
                collective=1,
                in_s=1.5,
                normal_s=0.4,
            ),
        )


def test_a_node_that_all_others_wait_for_is_lost() -> None:
    """The connections stay open: the other ranks wait in the collective and report no error."""
    d = Cluster()
    task = run_three(d)
    d.silent.add("n3")
    d.run_for(1.5)
    report_waiting(d, task, 0)
    assert suspects(d.state) == {"n2", "n3"}, "neither n2 nor n3 has reported yet"
    report_waiting(d, task, 1)
    assert suspects(d.state) == {"n3"}
    records = d.run_for(2.5)
    lost = the(decisions.IncidentOpened, records)
    assert (lost.severity, lost.status, lost.node) == ("SEV1", "lost connection", "n3")
    assert lost.why == "node n3 is silent; rank 2 is waited for in a collective"
    unreachable = next(x for x in records if isinstance(x.body, r.NodeUnreachable))
    stalls = [x.seq for x in d.log if isinstance(x.body, r.RankStalled)]
    assert lost.evidence == (stalls[0], unreachable.seq), "a stall and the silence"
    assert [member.rank for member in task_of(d, task).members] == [0, 1]
    d.progress(task)
    assert task_of(d, task).iterations_lost == 0
    at_rest(d)


def test_a_cut_that_ends_in_time_changes_nothing() -> None:
    d = Cluster()
    task = run_three(d)
    d.silent.add("n3")
    d.run_for(1.5)
    report_waiting(d, task, 0, 1)
    records = d.run_for(0.4)
    assert [x.kind for x in records if not x.cause] == ["NodeUnreachable"]
    d.silent.clear()
    for rank in (0, 1):
        it = task_of(d, task)
        d.tell(
            d.source(it.ranks[rank].slot.node),
            r.RankUnstalled(
                task=task,
                rank=rank,
                attempt=1,
                generation=it.generation,
                iteration=3,
                stalled_s=2.0,
            ),
        )
    records = d.run_for(5.0)
    assert not {"StopRank", "Quiesce", "StartRank", "TaskPlaced", "IncidentOpened"} & {
        x.kind for x in records
    }
    assert len(task_of(d, task).members) == 3
    at_rest(d)


def test_silence_without_a_second_source_changes_no_task() -> None:
    """A silence of 3 s causes no record. After 20 s the node is unreachable; no task changes."""
    d = Cluster()
    task = run_three(d)
    d.silent.add("n2")
    assert d.run_for(3.0) == []
    d.silent.clear()
    assert d.run_for(3.0) == []
    d.silent.add("n2")
    away = d.run_for(20.0)
    assert [x.kind for x in away] == ["NodeUnreachable"]
    assert d.state.nodes["n2"].health == "unreachable"
    d.submit(spec(name="beta"))
    assert len(task_of(d, task).target) == 3, "a new plan does not change the task"
    d.progress(task, 3)
    d.silent.clear()
    back = d.run_for(2.0)
    assert [x.kind for x in back if not x.cause] == ["NodeReachable"]
    assert not {"StopRank", "Quiesce", "StartRank", "TaskPlaced"} & set(kinds(back))
    assert not d.state.incidents
    assert task_of(d, task).iterations_lost == 0
    at_rest(d)


def test_a_node_that_reports_the_collective_is_reachable() -> None:
    d = Cluster()
    task = run_three(d)
    for rank in range(3):
        failed(d, task, rank)
    assert suspects(d.state) == set()
    records = d.run_for(2.0)
    assert not only(r.NodeUnreachable, records)
    assert the(decisions.IncidentOpened, records).severity == "SEV3"
    d.progress(task)
    assert not d.state.nodes["n1"].node_faults
    at_rest(d)


def test_only_nodes_of_the_task_are_suspected() -> None:
    d = Cluster(nodes=4)
    task = d.running(spec(slots={"min": 2, "max": 2}))
    assert not suspects(d.state)
    homes = {x.slot.node for x in task_of(d, task).ranks.values()}
    failed(d, task, 0)
    assert suspects(d.state) == homes - {task_of(d, task).ranks[0].slot.node}
    assert not d.run_for(0.9), "heartbeats arrive, so no node is unreachable"


def test_a_leader_that_was_paused_suspects_no_node() -> None:
    """The leader and all heartbeats were paused, so the age of heartbeats does not count."""
    d = Cluster()
    task = run_three(d)
    failed(d, task, 0)
    before = dict(d.last_s)
    d.run_for(1.5, blind=True)
    d.last_s = before
    assert d.observe() == []
    d.silent.add("n3")
    assert not only(r.NodeUnreachable, d.run_for(0.9))


def test_a_wrong_suspicion_ends_with_the_next_heartbeat() -> None:
    d = Cluster()
    task = run_three(d)
    d.silent.add("n3")
    failed(d, task, 0)
    records = d.run_for(1.7)
    assert len(only(r.NodeUnreachable, records)) == 1
    assert not only(r.NodeReachable, records), "an old heartbeat does not count"
    d.silent.clear()
    assert len(only(r.NodeReachable, d.run_for(1.0))) == 1
    assert d.state.nodes["n3"].health == "healthy"


def test_a_node_that_never_sent_a_heartbeat_is_unreachable_after_its_lease() -> None:
    d = Cluster()
    del d.last_s["n3"]
    assert not only(r.NodeUnreachable, d.run_for(4.5))
    assert [x.body.node for x in only(r.NodeUnreachable, d.run_for(1.5))] == ["n3"]


def test_only_nodes_that_may_have_a_change_are_looked_at() -> None:
    """The question is asked after each batch of reports, on a cluster of any size."""
    looked: list[str] = []

    class Looked(dict[str, Node]):
        def get(self, name: str, default: object = None) -> Any:
            looked.append(name)
            return super().get(name, default)

    d = Cluster()
    d.run_for(1.0)
    d.state.nodes = Looked(d.state.nodes)
    assert list(d.leases.verdicts(d.state)) == looked == []
    d.silent.add("n3")
    d.run_for(2.0)
    looked.clear()
    assert list(d.leases.verdicts(d.state)) == []
    assert looked == ["n3"], "late, and its lease has not ended"


def test_nodes_that_are_lost_in_one_moment_share_a_plan() -> None:
    """A rack: 64 plans, one after another, moved healthy tasks and took seconds."""
    d = Driver(nodes=6)
    tasks = [d.running(spec(name=f"t{number}")) for number in range(3)]
    lost = {"n2", "n4", "n6"}
    for task in tasks:
        for rank in list(d.state.tasks[task].ranks.values()):
            if rank.slot.node not in lost:
                failed(d, task, rank.rank)
    after = len(d.log)
    for name in sorted(lost):
        d.now_s -= 0.01  # the driver's step: all verdicts have the same time
        d.tell(
            "leader/abc",
            r.NodeUnreachable(
                node=name, incarnation=d.state.nodes[name].incarnation, silence_s=6.0
            ),
        )
    assert {name for name in d.state.nodes if d.state.nodes[name].health == "lost"} == lost
    (first,) = only(decisions.PlanChosen, d.log[after:])
    assert first.body.trigger == "node n2 lost"
    shared = the(decisions.PlanChosen, d.due("losses"))
    assert shared.trigger == "nodes lost"
    assert sum(one.slots for one in shared.allocations) == 6
    seats = [seat.slot.node for task in tasks for seat in d.state.tasks[task].target]
    assert sorted(seats) == ["n1", "n1", "n3", "n3", "n5", "n5"]
    assert not d.state.deadlines.keys() & {"losses"}
