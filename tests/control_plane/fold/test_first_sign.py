"""What an agent's successor tells late is as old as its first sign: the pause begins there."""

from __future__ import annotations

import pytest
from decider import Driver, failed, only, spec, task_of, the
from hangs import stalled
from unicron.events.records import decisions
from unicron.events.records import reports as r

LATE_S = 2.0


def again(d: Driver, node: str) -> decisions.IncidentOpened:
    """The agent was killed with its ranks; its successor speaks late."""
    d.now_s += LATE_S
    told = d.join(node, incarnation=8)
    d.obey(told)
    return the(decisions.IncidentOpened, told)


def pause_s(d: Driver, task: int) -> float:
    d.progress(task)
    (closed,) = only(decisions.IncidentClosed, d.log)
    return float(closed.body.pause_s)


def test_where_nobody_could_tell_it_stands_since_its_next_iteration_was_due(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    name = task_of(d, task).ranks[0].slot.node
    d.progress(task)  # iterations of 0.2 s
    stood_s = d.now_s + 0.2
    opened = again(d, name)
    assert opened.why == f"the agent of {name} started again"
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == pytest.approx(stood_s)
    assert pause_s(d, task) == pytest.approx(d.now_s - stood_s)
    assert d.now_s - stood_s > LATE_S - 0.2


def test_a_collective_that_failed_before_begins_the_pause_and_is_evidence(
        d: Driver, task: int) -> None:
    told = failed(d, task, 0)
    opened = again(d, "n2")
    assert opened.evidence[0] == told[0].seq
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s <= told[0].at_s


def test_silence_begins_the_pause_and_is_evidence(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["true"], slots={"min": 4, "max": 4}))
    d.obey(d.log[-20:])
    assert len(task_of(d, task).ranks) == 4
    silenced = d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(
        node="n2", incarnation=1, silence_s=1.0))[0]
    opened = again(d, "n2")
    assert opened.evidence[0] == silenced.seq
    (incident,) = d.state.incidents.values()
    assert incident.pause_s == pytest.approx(d.now_s - silenced.at_s, abs=0.1)
    assert incident.pause_s > LATE_S


def test_an_agent_that_starts_again_at_once_has_stood_no_longer(d: Driver) -> None:
    """The next iteration is not due yet: nothing is known to stand before it is told."""
    task = d.running(spec(slots={"min": 1, "max": 1}))
    name = task_of(d, task).ranks[0].slot.node
    d.progress(task, times_s=(60.0,))
    told = d.join(name, incarnation=8)
    d.obey(told)
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == told[0].at_s


def test_a_node_that_the_others_wait_for_is_lost_since_they_wait(d: Driver, task: int) -> None:
    """Nothing fails: packets do not come."""
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=1.3))
    waited_s = d.now_s - 1.6
    for rank in (0, 1):
        stalled(d, task, rank)
    d.now_s += LATE_S
    told = d.due(f"hang/{task}/{task_of(d, task).generation}")
    assert the(decisions.IncidentOpened, told).node == "n2"
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == pytest.approx(waited_s, abs=0.2)
    d.obey(told)
    assert pause_s(d, task) == pytest.approx(d.now_s - waited_s, abs=0.2)
