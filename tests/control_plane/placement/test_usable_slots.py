"""Tasks whose orders some agents cannot read: they get slots of newer ones, or wait."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, spec, waits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane.placement import placement, usable_slots
from unicron.control_plane.state.task import Task
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.order_format import ORDER_FORMAT_VERSION
from unicron.events.records.types import Seat, Slot

pytestmark = pytest.mark.nodes(1)
EXACT: dict[str, Any] = {
    "train": {
        "iterations": 50,
        "output": "/tmp/exact",
        "batch": {"global": 24, "micro": 2},
        "reproducible": "bitwise",
    }
}


def old_agent(d: Driver, node: str, incarnation: int = 1) -> None:
    """An agent of release 0.3.0 joins with two slots."""
    d.obey(
        d.tell(
            f"{node}/{incarnation}",
            r.NodeJoined(
                node=node,
                incarnation=incarnation,
                host="127.0.0.1",
                pid=1,
                num_slots=2,
                keeper=f"{node}:1",
            ),
        )
    )


def nodes_of(d: Driver, task: int) -> set[str]:
    return {seat.slot.node for seat in d.state.tasks[task].target}


def test_a_task_waits_for_a_newer_agent_and_says_so() -> None:
    d = Driver(nodes=0)
    old_agent(d, "n1")
    task = d.submit(spec(name="exact", **EXACT))
    assert not [record for record in d.log if isinstance(record.body, o.StartRank)]
    why = "the agent of n1 reads order format 0, and this job needs 1"
    assert d.state.tasks[task].why == why
    assert waits_of(d, task).why == why
    assert "a newer agent there" in waits_of(d, task).needs
    # The agent is restarted with new code, and goes on as the same incarnation.
    d.obey(
        d.tell(
            "n1/1",
            r.AgentRestarted(node="n1", incarnation=1, pid=2, order_format=ORDER_FORMAT_VERSION),
        )
    )
    assert len(d.state.tasks[task].ranks) == 2
    assert not d.state.tasks[task].why


def test_a_task_is_placed_on_newer_agents_beside_older_ones() -> None:
    d = Driver(nodes=0)
    old_agent(d, "n1")
    d.join("n2")
    exact = d.submit(spec(name="exact", **EXACT))
    plain = d.submit(spec(name="plain"))
    assert nodes_of(d, exact) == {"n2"}
    assert nodes_of(d, plain) == {"n1"}
    d.join("n3")
    assert nodes_of(d, exact) <= {"n2", "n3"}
    for record in d.log:
        if isinstance(record.body, o.StartRank) and record.body.task == exact:
            assert record.body.slot.node != "n1"


def test_an_older_agent_that_joins_moves_no_running_task() -> None:
    d = Driver(nodes=1)
    task = d.submit(spec(name="exact", **EXACT))
    d.obey([record for record in d.log if isinstance(record.body, o.StartRank)])
    before, at = d.state.tasks[task].target, len(d.log)
    old_agent(d, "n9")
    assert d.state.tasks[task].target == before
    assert not [record for record in d.log[at:] if isinstance(record.body, o.StopRank)]


def test_a_running_task_stays_where_its_agents_report_no_format() -> None:
    """Agents between the release and the first format run such tasks, and report no number."""
    d = Driver(nodes=1)
    task = d.submit(spec(name="exact", **EXACT))
    d.obey([record for record in d.log if isinstance(record.body, o.StartRank)])
    d.state.nodes["n1"].order_format = 0
    before = d.state.tasks[task].target
    d.join("n2", slots=0)
    assert d.state.tasks[task].target == before


def test_a_job_of_the_release_does_not_care_about_formats() -> None:
    d = Driver(nodes=0)
    old_agent(d, "n1")
    d.join("n2")
    assert nodes_of(d, d.submit(spec(name="plain"))) == {"n1", "n2"}


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_each_task_gets_its_count_on_nodes_that_it_may_have(data: st.DataObject) -> None:
    slots = [Slot(f"n{node}", index) for node in range(1, 5) for index in range(2)]
    free, tasks, unread = list(slots), list[Task](), dict[int, usable_slots.Barred]()
    for number in range(1, data.draw(st.integers(1, 4)) + 1):
        own = [
            free.pop(data.draw(st.integers(0, len(free) - 1)))
            for _ in range(data.draw(st.integers(0, min(3, len(free)))))
        ]
        task = Task(
            id=number,
            weight=1.0,
            submitted_s=0.0,
            since_s=0.0,
            spec=spec(slots={"min": 1, "max": 6}),
        )
        task.target = tuple(Seat(rank, slot) for rank, slot in enumerate(sorted(own)))
        tasks.append(task)
        if names := data.draw(st.frozensets(st.sampled_from(["n1", "n2", "n3"]))):
            unread[number] = usable_slots.Barred(unread=names)
    pools = usable_slots.pools(tasks, slots, unread)
    most = usable_slots.most_slots(tasks, pools, unread)
    left, counts = len(slots), list[int]()
    for task in tasks:
        size = data.draw(st.integers(0, min(6, left, most.get(task.id, left))))
        counts.append(size)
        left -= size
    seats = placement.place(tasks, counts, slots, {}, unread)
    given_slots = [seat.slot for own in seats.values() for seat in own]
    assert len(given_slots) == len(set(given_slots))
    for task, count in zip(tasks, counts, strict=True):
        assert len(seats[task.id]) == count
        barred = unread.get(task.id, usable_slots.Barred())
        assert not {seat.slot.node for seat in seats[task.id]} & barred.unread


def test_an_agent_that_an_older_one_replaces_gets_no_order_that_it_cannot_read() -> None:
    """An upgrade is taken back on a node where the task has a seat: the task moves, or waits."""
    d = Driver(nodes=1)
    task = d.submit(spec(name="exact", **EXACT))
    d.obey([record for record in d.log if isinstance(record.body, o.StartRank)])
    assert nodes_of(d, task) == {"n1"}
    at = len(d.log)
    old_agent(d, "n1", incarnation=2)
    assert not [record for record in d.log[at:] if isinstance(record.body, o.StartRank)]
    assert d.state.tasks[task].why == "the agent of n1 reads order format 0, and this job needs 1"
    d.join("n2")
    assert nodes_of(d, task) == {"n2"}
    assert all(
        record.body.slot.node == "n2"
        for record in d.log[at:]
        if isinstance(record.body, o.StartRank)
    )


def test_a_process_does_not_start_again_where_an_older_agent_goes_on() -> None:
    """An older agent takes over the incarnation: running processes stay, no new one starts."""
    d = Driver(nodes=1)
    task = d.submit(spec(name="exact", **EXACT, slots={"min": 1, "max": 1}))
    d.obey([record for record in d.log if isinstance(record.body, o.StartRank)])
    d.tell("n1/1", r.AgentRestarted(node="n1", incarnation=1, pid=2))
    (rank,) = d.state.tasks[task].ranks.values()
    at = len(d.log)
    d.tell(
        "n1/1",
        r.RankExited(
            task=task, rank=rank.rank, attempt=rank.attempt, pid=rank.pid, exit_code=None, signal=9
        ),
    )
    assert not [record for record in d.log[at:] if isinstance(record.body, o.StartRank)]
    assert d.state.tasks[task].why == "the agent of n1 reads order format 0, and this job needs 1"
    d.join("n2")
    assert nodes_of(d, task) == {"n2"}
