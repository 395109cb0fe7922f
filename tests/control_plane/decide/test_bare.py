"""A node that a plan has nothing of makes no plan out of date; any other one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from decider import Driver, at_rest, drain, kinds, spec, task_of, the
from hypothesis import given, settings
from msgspec.structs import replace
from scenarios import HAPPENINGS, plain, two_tasks
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.planner.problem_of_state import plan_input
from unicron.control_plane.simulation import scenario
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace.external_event import Happening
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

OF_NODES = r.NodeJoined | r.NodeDrained | r.NodeUndrained


@pytest.fixture
def d() -> Iterator[Driver]:
    made = Driver(nodes=3)
    yield made
    at_rest(made)


def undrain(d: Driver, node: str) -> list[Record]:
    return d.tell(f"operator/undrain-{node}", r.NodeUndrained(node=node, reason=""))


def test_a_drained_node_that_was_idle_joins_again_for_nobody(d: Driver) -> None:
    d.running()
    assert "PlanChosen" in kinds(drain(d, "n3")), "its slots were to be had"
    assert kinds(d.join("n3", incarnation=2)) == []
    assert the(decisions.PlanChosen, undrain(d, "n3")).num_slots == 6


def test_a_node_that_somebody_trains_on_is_no_such_node(d: Driver) -> None:
    d.running()
    assert "PlanChosen" in kinds(drain(d, "n1"))


def test_it_is_told_where_a_task_waits(d: Driver) -> None:
    waits = d.submit(spec(name="large", slots={"min": 6, "max": 6}))
    d.tell("n3/1", r.NodeLeft(node="n3", incarnation=1, reason="stopped"))
    assert task_of(d, waits).why == "not enough slots"
    told = drain(d, "n3")
    assert "n3 drained" in the(decisions.TaskWaiting, told).needs


def planned_anyway(log: Sequence[Record]) -> int:
    """Records of nodes of which no plan followed: what a plan follows from is as before, but for
    what time alone has changed."""
    state, num = ClusterState(), 0
    for record in log:
        before = None
        if isinstance(record.body, OF_NODES) and not state.replan:
            before = plan_input(state)
        fold(state, record)
        if before is None or state.replan:
            continue
        after = plan_input(state)
        num += 1
        assert after.slots == before.slots
        assert replace(after.asked, mtbf_gpu_s=before.asked.mtbf_gpu_s) == before.asked
        assert after.num_slots_all == before.num_slots_all
    return num


@settings(deadline=None, max_examples=25)
@given(HAPPENINGS)
def test_no_plan_would_be_another(happenings: list[Happening]) -> None:
    log = list[Record]()
    Run(*two_tasks(happenings, limits={"hot_spare": True}), log.append).play()
    planned_anyway(log)


def test_so_it_is_with_nodes_of_one_slot() -> None:
    """A device fails, the node is drained, repaired, joins again, and is undrained."""
    given_by = scenario.parse(plain(cluster={"nodes": 10, "slots": 1}))
    policy, log = scenario.policy(given_by, "unicron"), list[Record]()
    happenings = [Happening(at_s * 86400.0 + back_s, f"n{at_s}", event, "ECC errors" * (not back_s))
                  for at_s in range(1, 9) for event, back_s in (("fault", 0.0), ("repaired", 4e4))]
    Run(scenario.ground(given_by, policy, happenings), policy, log.append).play()
    assert planned_anyway(log) >= 14
