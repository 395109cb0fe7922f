"""Quarantine: a node that fails repeatedly gets no tasks; an operator may lift the quarantine."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, kinds, only, spec, task_of, the, waits_of
from two_tasks import facts, seen
from unicron.cli.screens import cluster, nodes
from unicron.cli.screens.incident import page
from unicron.control_plane.api import requests
from unicron.control_plane.api.requests import Refusal
from unicron.events.records import decisions, orders, reports, statuses
from unicron.events.records.decisions import NodeQuarantined
from unicron.events.records.envelope import Record
from unicron.events.spec import policy as r

pytestmark = pytest.mark.nodes(3)


def xid(d: Driver, node: str, slot: int) -> list[Record]:
    """A device error without a failed rank. Returns the decisions at its deadline."""
    records = d.tell(
        d.source(node),
        reports.DeviceErred(
            node=node,
            incarnation=d.state.nodes[node].incarnation,
            origin="kernel",
            status=statuses.GPU_DRIVER_ERRORS,
            rule="xid-79",
            text="fallen off the bus",
            devices=(slot,),
            code=79,
        ),
    )
    if records[0].seq in [x.seq for x in d.state.nodes[node].erred if x.incident]:
        return records
    return d.due(f"device/{node}/{records[0].seq}")


def rejoin(d: Driver, node: str) -> list[Record]:
    return d.join(node, incarnation=d.state.nodes[node].incarnation + 1)


def fail_twice(d: Driver, node: str = "n3") -> list[Record]:
    xid(d, node, 0)
    d.now_s += 3600
    rejoin(d, node)
    return xid(d, node, 1)


def test_the_second_fault_quarantines(d: Driver) -> None:
    xid(d, "n3", 0)
    assert d.state.nodes["n3"].quarantine is None
    d.now_s += 3600
    rejoin(d, "n3")
    records = xid(d, "n3", 1)
    record = the(NodeQuarantined, records)
    first, second = (x.seq for x in only(decisions.IncidentOpened, d.log))
    assert (record.node, record.incidents) == ("n3", (first, second))
    assert record.until_s == pytest.approx(d.state.at_s + 86400)
    assert record.why.startswith("2 faults in 30 days, the last: n3/1 GPU driver errors (xid-79)")
    task = d.running(spec(slots={"min": 1, "max": 6}))
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n2"}


def test_quarantine_survives_restarts_and_expires(d: Driver) -> None:
    fail_twice(d)
    task = d.running(spec(slots={"min": 1, "max": 6}))
    d.obey(rejoin(d, "n3"))
    assert len(task_of(d, task).ranks) == 4
    d.tell("n3/3", reports.NodeLeft(node="n3", incarnation=3, reason="to be repaired"))
    d.obey(d.join("n3", incarnation=4))
    assert len(task_of(d, task).ranks) == 4
    d.tell("leader/new", reports.EpochStarted(nonce="new", code="1", heart=8), epoch=2)
    d.epoch = 2
    left_s = d.state.deadlines["quarantine/n3"].due_s - d.state.at_s
    assert left_s < 86400, "a new leader does not extend it"
    d.obey(d.due("quarantine/n3"))
    d.progress(task)
    assert len(task_of(d, task).ranks) == 6
    again = xid(d, "n3", 0)
    assert "NodeQuarantined" in kinds(again), "one more fault within the window is enough"
    d.obey(again)


def test_a_task_leaves_a_quarantined_node_without_loss(d: Driver, task: int) -> None:
    d.progress(task, 3)
    assert "n2" in {x.slot.node for x in task_of(d, task).ranks.values()}
    d.obey(xid(d, "n2", 0))
    d.progress(task)
    d.now_s += 100
    d.obey(rejoin(d, "n2"))
    d.progress(task)
    records = xid(d, "n2", 1)
    assert "NodeQuarantined" in kinds(records)
    assert "StopRank" not in kinds(records)
    d.obey(records)
    d.progress(task)
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n3"}
    assert task_of(d, task).iterations_lost == 0


def test_old_faults_do_not_count(d: Driver) -> None:
    xid(d, "n3", 0)
    d.now_s += 31 * 86400
    rejoin(d, "n3")
    assert "NodeQuarantined" not in kinds(xid(d, "n3", 1))


def test_nodes_that_all_fail_equally_are_not_quarantined(d: Driver) -> None:
    """One fault of each node: a second fault of n3 can be chance, a fifth cannot."""
    for node in ("n1", "n2", "n3"):
        xid(d, node, 0)
        d.now_s += 3600
        rejoin(d, node)
    for num in (2, 3, 4):
        assert not only(NodeQuarantined, xid(d, "n3", 0)), num
        d.now_s += 3600
        rejoin(d, "n3")
    assert the(NodeQuarantined, xid(d, "n3", 0)).why.startswith("5 faults in 30 days")


def test_one_fault_of_several_tasks_counts_once(d: Driver) -> None:
    one = d.running(spec(slots={"min": 1, "max": 3}))
    other = d.running(spec(name="beta", slots={"min": 1, "max": 3}))
    shared = next(
        name
        for name, node in d.state.nodes.items()
        if {x.task for x in node.occupants.values()} == {one, other}
    )
    for slot in (0, 1):
        d.tell(
            d.source(shared),
            reports.DeviceErred(
                node=shared,
                incarnation=1,
                origin="kernel",
                status=statuses.NVLINK_ERRORS,
                rule="xid-74",
                text="NVLink",
                devices=(slot,),
                code=74,
            ),
        )
    records: list[Record] = []
    for task in (one, other):
        for rank in [x.rank for x in task_of(d, task).ranks.values() if x.slot.node == shared]:
            records += d.exit(task, rank)
    assert len(only(decisions.IncidentOpened, d.log)) == 2
    assert len(d.state.nodes[shared].node_faults) == 1
    d.obey(records)


def lose(d: Driver, task: int, node: str) -> list[Record]:
    """The agent is killed: collectives fail without a root cause, then the node is unreachable."""
    num, generation = len(d.log), task_of(d, task).generation
    peers = [x for x in task_of(d, task).living_members() if x.slot.node != node]
    for rank in peers:
        d.tell(
            d.source(rank.slot.node),
            reports.CollectiveFailed(
                task=task,
                rank=rank.rank,
                attempt=rank.attempt,
                generation=generation,
                iteration=1,
                error="closed by peer",
            ),
        )
    d.due(f"evidence/{task}/{generation}")
    for rank in peers:
        d.quiesced(task, rank.rank)
    d.tell(
        "leader/abc",
        reports.NodeUnreachable(
            node=node, incarnation=d.state.nodes[node].incarnation, silence_s=5.0
        ),
    )
    d.obey([x for x in d.log[num:] if isinstance(x.body, orders.Reconfigure)])
    d.progress(task, 3)
    return d.log[num:]


@pytest.mark.nodes(2)
def test_a_restarted_agent_that_is_lost_again_counts_twice(d: Driver, task: int) -> None:
    records = lose(d, task, "n1")
    assert the(decisions.IncidentOpened, records).severity == "SEV3", "the cause was not known yet"
    assert the(decisions.IncidentEscalated, records).severity == "SEV1"
    d.now_s += 10
    d.obey(rejoin(d, "n1"))
    d.progress(task, 3)
    assert d.state.nodes["n1"].quarantine is None
    assert "NodeQuarantined" in kinds(lose(d, task, "n1"))
    assert d.state.at_s - d.state.nodes["n1"].node_faults[0].at_s < d.state.policy.replace_after_s


@pytest.mark.nodes(2)
def test_a_link_that_is_cut_again_at_once_counts_once(d: Driver, task: int) -> None:
    """No agent was started in between, so the second loss counts as the same fault."""
    lose(d, task, "n1")
    d.obey(d.tell("leader/abc", reports.NodeReachable(node="n1", incarnation=1)))
    d.progress(task, 3)
    assert {x.slot.node for x in task_of(d, task).ranks.values()} == {"n1", "n2"}
    assert "NodeQuarantined" not in kinds(lose(d, task, "n1"))


def test_an_injected_fault_does_not_count(d: Driver) -> None:
    d.tell("leader/abc", reports.PolicySet(policy=r.Policy(allow_inject=True, quarantine_faults=1)))
    task = d.running()
    d.tell("operator/break", reports.FaultRequested(what="node", node="n2"))
    d.tell("leader/abc", reports.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    process = task_of(d, task).ranks[0]
    records = d.tell(
        d.source(process.slot.node),
        reports.CollectiveFailed(
            task=task, rank=0, attempt=process.attempt, generation=1, iteration=1, error="closed"
        ),
    )
    assert the(decisions.IncidentOpened, records).severity == "SEV1"
    assert not d.state.nodes["n2"].node_faults
    d.obey(records)


def test_a_bug_of_the_task_is_no_node_fault(d: Driver, task: int) -> None:
    for _ in range(3):
        d.obey(d.exit(task, 2, signal=None, code=1))
        d.progress(task, 11)
    assert not d.state.nodes["n2"].node_faults


def test_many_unreachable_nodes_are_a_network_fault() -> None:
    d = Driver(nodes=6, slots=1)
    d.tell("leader/abc", reports.PolicySet(policy=r.Policy(quarantine_faults=1)))
    task = d.running(spec(slots={"min": 1, "max": 6}))
    for node in ("n4", "n5", "n6"):
        d.tell("leader/abc", reports.NodeUnreachable(node=node, incarnation=1, silence_s=5.0))
    process = task_of(d, task).ranks[0]
    records = d.tell(
        d.source(process.slot.node),
        reports.CollectiveFailed(
            task=task, rank=0, attempt=process.attempt, generation=1, iteration=1, error="closed"
        ),
    )
    d.obey(records)
    for name in list(d.state.deadlines):
        if name.startswith("silent/"):
            d.obey(d.due(name))
    assert len(only(NodeQuarantined, d.log)) <= 1, "the first may precede the other losses"


# --- operators ------------------------------------------------------------------------------------
def lift(d: Driver, node: str, reason: str = "a new cable") -> list[Record]:
    return d.tell(f"operator/{len(d.log)}", requests.lift(d.state, requests.Reason(reason), node))


def test_an_operator_lifts_the_quarantine(d: Driver) -> None:
    fail_twice(d)
    task = d.running(spec(slots={"min": 1, "max": 6}))
    d.obey(rejoin(d, "n3"))
    d.obey(lift(d, "n3"))
    d.progress(task)
    assert len(task_of(d, task).ranks) == 6
    assert "quarantine/n3" not in d.state.deadlines
    assert "NodeQuarantined" not in kinds(xid(d, "n3", 0)), "the count starts again"
    d.obey(d.log[-8:])


@pytest.mark.parametrize(
    ("node", "body", "status", "why"),
    [
        ("n1", {}, 409, "node n1 is not quarantined"),
        ("n9", {}, 404, "there is no node 'n9'"),
        ("n1", {"why": "x"}, 400, "unknown field"),
    ],
)
def test_a_wrong_lift_request_is_refused(
    d: Driver, node: str, body: Any, status: int, why: str
) -> None:
    with pytest.raises(Refusal) as refused:
        requests.lift(d.state, requests.convert(body, requests.Reason), node)
    assert refused.value.status == status
    assert why in str(refused.value)


def test_the_screens_show_the_quarantine_and_the_command(d: Driver) -> None:
    fail_twice(d)
    d.running(spec(slots={"min": 1, "max": 6}))
    for screen in (
        nodes.nodes(seen(d), now_s=d.now_s),
        cluster.status(seen(d), cluster="test", now_s=d.now_s),
    ):
        words = " ".join(" ".join(screen).split())
        assert "quarantined to 1970-01-02" in words
        assert "2 faults in 30 days" in words
        assert "unicron lift n3" in words
    (row,) = [x for x in nodes.nodes(seen(d), now_s=d.now_s) if x.startswith("n3 ") and "/2" in x]
    assert "quarantined to" in row
    records = " ".join(" ".join(page(facts(d.log))).split())
    assert "SEV1 GPU driver errors" in records
    assert "n3: " in records


def test_a_task_that_waits_due_to_a_quarantine_says_so(d: Driver) -> None:
    fail_twice(d)
    task = d.submit(spec(slots={"min": 5, "max": 6}))
    assert "n3 quarantined" in waits_of(d, task).needs
    d.obey(rejoin(d, "n3"))
    assert task_of(d, task).phase == "idle"
