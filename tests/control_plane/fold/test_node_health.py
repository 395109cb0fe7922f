"""Unhealthy site checks: how many nodes they disable, and when slots are enabled again."""

from __future__ import annotations

import pytest
from decider import Driver, kinds, spec
from device_errors import health
from two_tasks import seen
from unicron.control_plane.fold.node_health import FLAPPING_S, RECOVERED_S
from unicron.control_plane.planner.problem_of_state import input_digest
from unicron.events.records import reports, statuses

pytestmark = pytest.mark.nodes(3)


def test_a_check_that_ends_node_by_node_disables_no_other_node(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 4}))
    d.progress(task, 3)
    for node in ("n3", "n1", "n2"):
        d.obey(health(d, node, "unhealthy", check="check/disk"))
    d.progress(task)
    for node in ("n3", "n1", "n2"):
        digest = input_digest(d.state)
        assert kinds(health(d, node, "healthy", check="check/disk")) == []
        assert input_digest(d.state) == digest
    assert [bool(x.slots_unhealthy) for x in d.state.nodes.values()] == [False, False, True]
    assert kinds(health(d, "n1", "unhealthy", check="check/disk")) == [], "n3 is still disabled"
    records = d.due("recovered/n3")
    assert [bool(x.slots_unhealthy) for x in d.state.nodes.values()] == [True, False, False]
    d.obey(records)
    d.progress(task)


def test_a_confirmed_node_allows_another_unconfirmed_one(d: Driver) -> None:
    for node in ("n3", "n1"):
        health(d, node, "unhealthy", check="check/disk")
    digest = input_digest(d.state)
    health(d, "n3", "unhealthy", check="gpu", status=statuses.ECC_ERRORS)
    assert [bool(x.slots_unhealthy) for x in d.state.nodes.values()] == [True, False, True]
    assert input_digest(d.state) != digest


# --- each slot has its own recovery time ----------------------------------------------------------
DUE = "recovered/n2"


def unhealthy_slots(d: Driver) -> list[int]:
    return d.state.nodes["n2"].slots_unhealthy


def test_each_slot_waits_for_its_own_recovery(d: Driver) -> None:
    for slot in (0, 1):
        health(d, "n2", "unhealthy", check=f"check/fan{slot}", devices=(slot,))
    first_s = d.now_s
    health(d, "n2", "healthy", check="check/fan0", devices=(0,))
    d.now_s += 50
    health(d, "n2", "healthy", check="check/fan1", devices=(1,))
    last_s = d.state.at_s
    (recovery,) = [x["recovers"] for x in seen(d)["nodes"] if x["id"] == "n2"]
    assert recovery["from_s"] == last_s + RECOVERED_S, "the view shows when the last slot recovers"
    d.due(DUE)
    assert unhealthy_slots(d) == [1], "slot 1 was healthy for ten seconds only"
    assert d.now_s - first_s < RECOVERED_S + 1
    d.due(DUE)
    assert unhealthy_slots(d) == []
    assert d.state.at_s >= last_s + RECOVERED_S
    assert DUE not in d.state.deadlines


def test_a_flapping_slot_starts_its_recovery_again(d: Driver) -> None:
    for slot in (0, 1):
        health(d, "n2", "unhealthy", check=f"check/fan{slot}", devices=(slot,))
        health(d, "n2", "healthy", check=f"check/fan{slot}", devices=(slot,))
    d.now_s += 40
    health(d, "n2", "unhealthy", check="check/fan0", devices=(0,))
    health(d, "n2", "healthy", check="check/fan0", devices=(0,))
    d.due(DUE)
    assert unhealthy_slots(d) == [0]
    d.due(DUE)
    assert unhealthy_slots(d) == []


def test_the_last_check_of_a_slot_decides(d: Driver) -> None:
    health(d, "n2", "unhealthy", check="check/disk")
    health(d, "n2", "unhealthy", check="check/fan", devices=(1,))
    health(d, "n2", "healthy", check="check/disk")
    d.due(DUE)
    assert unhealthy_slots(d) == [1], "only the fan of slot 1 is unhealthy"
    assert DUE not in d.state.deadlines
    health(d, "n2", "healthy", check="check/fan", devices=(1,))
    assert unhealthy_slots(d) == [1]
    d.due(DUE)
    assert unhealthy_slots(d) == []


def test_an_unknown_check_enables_no_slot(d: Driver) -> None:
    health(d, "n2", "unhealthy", check="check/disk")
    for _ in range(2):
        assert kinds(health(d, "n2", "unknown", check="check/disk")) == []
    assert unhealthy_slots(d) == [0, 1]
    assert DUE not in d.state.deadlines
    assert d.state.nodes["n2"].unhealthy_why == (
        "check/disk: check/disk is unhealthy; now it cannot say: check/disk is unknown"
    )
    health(d, "n2", "unknown", check="check/other")
    assert [(x.check, x.health) for x in d.state.nodes["n2"].checks] == [
        ("check/disk", "unhealthy"),
        ("check/other", "unknown"),
    ]
    health(d, "n2", "degraded", check="check/disk")
    d.due(DUE)
    assert unhealthy_slots(d) == []


def test_slots_that_recover_together_are_one_plan(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 6}))
    d.obey(health(d, "n2", "unhealthy", check="check/disk"))
    d.progress(task)
    d.obey(health(d, "n2", "healthy", check="check/disk"))
    assert kinds(d.due(DUE)).count("PlanChosen") == 1
    assert unhealthy_slots(d) == []


def test_a_new_leader_starts_every_recovery_again(d: Driver) -> None:
    for slot in (0, 1):
        health(d, "n2", "unhealthy", check=f"check/fan{slot}", devices=(slot,))
    health(d, "n2", "healthy", check="check/fan0", devices=(0,))
    d.now_s += 50
    health(d, "n2", "healthy", check="check/fan1", devices=(1,))
    healthy_s = d.state.at_s
    d.epoch = 2
    d.tell("leader/next", reports.EpochStarted(nonce="next", code="test", heart=d.state.heart))
    d.due(DUE)
    assert unhealthy_slots(d) == [], "both slots waited the full time again"
    assert d.state.at_s >= healthy_s + RECOVERED_S


# --- room: no flapping hardware --------------------------------------------------------------
def full(d: Driver, said: str, rule: str = "disk-full") -> None:
    health(d, "n2", said, check="disk", rule=rule if said != "healthy" else "")


@pytest.mark.parametrize("rule", ["disk-full", "disk-inodes"])
@pytest.mark.parametrize("back", ["degraded", "healthy"])
def test_slots_are_used_at_once_when_a_disk_has_room_again(d: Driver, rule: str, back: str) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    full(d, "unhealthy", rule)
    assert unhealthy_slots(d) == [0, 1]
    (recovery,) = [x["recovers"] for x in seen(d)["nodes"] if x["id"] == "n2"]
    assert (recovery["after_s"], recovery["from_s"]) == (0.0, None)
    full(d, back, rule)
    assert unhealthy_slots(d) == []
    assert DUE not in d.state.deadlines
    assert len(d.state.tasks[task].target) == 6, "planned with its slots, at once"


def test_a_disk_that_fills_again_and_again_is_waited_for(d: Driver) -> None:
    full(d, "unhealthy")
    full(d, "healthy")
    d.now_s += FLAPPING_S / 2
    full(d, "unhealthy")
    full(d, "healthy")
    assert unhealthy_slots(d) == [0, 1]
    d.due(DUE)
    assert unhealthy_slots(d) == []
    d.now_s += FLAPPING_S
    full(d, "unhealthy")
    full(d, "healthy")
    assert unhealthy_slots(d) == []


def test_room_is_no_reason_to_trust_other_hardware(d: Driver) -> None:
    health(d, "n2", "unhealthy", check="check/fan", devices=(1,))
    full(d, "unhealthy")
    full(d, "healthy")
    assert unhealthy_slots(d) == [0, 1], "the fan still fails"
    health(d, "n2", "healthy", check="check/fan", devices=(1,))
    assert unhealthy_slots(d) == [0, 1]
    d.due(DUE)
    assert unhealthy_slots(d) == []
    full(d, "unhealthy", "disk-read-only")
    full(d, "healthy")
    assert unhealthy_slots(d) == [0, 1]
