"""The slot time of full strength is accounted for exactly once: trained, or lost and why."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenarios import DAY_S, HAPPENINGS, lost, plain
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.accounting import WafAccount
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace.external_event import ExternalEvent


def play(policy: str, happenings: list[ExternalEvent], tasks: int = 1) -> WafAccount:
    data = plain()
    one = data["tasks"][0]
    data["tasks"] = [
        one
        | {"name": f"task-{number}", "weight": 1.0 + number, "slots": {"min": 1, "max": 8 // tasks}}
        for number in range(tasks)
    ]
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, policy)
    return Run(scenario.run_input(parsed, chosen, happenings), chosen).play().earnings


@settings(deadline=None, max_examples=60)
@given(HAPPENINGS, st.sampled_from([*policies.POLICIES]), st.integers(1, 3))
@example([ExternalEvent(0.0, "n0", "left"), ExternalEvent(5.0, "n0", "joined")], "unicron", 2)
def test_slot_time_is_counted_completely_and_once(
    happenings: list[ExternalEvent], policy: str, tasks: int
) -> None:
    found = play(policy, sorted(happenings, key=lambda one: one.at_s), tasks)
    full_s = sum(found.full_slots.values()) * 10 * DAY_S
    assert found.slot_s + sum(found.lost_slot_s.values()) == pytest.approx(full_s, rel=1e-12)


def test_a_task_that_is_on_one_node_alone_moves_when_nobody_reaches_that_node() -> None:
    """It has no peers that could tell. Without probes it would wait for replace_after_s."""
    data = plain()
    data["tasks"][0]["slots"] = {"min": 1, "max": 1}
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, "unicron")
    happenings = lost("n0", DAY_S, 2 * DAY_S)
    found = Run(scenario.run_input(parsed, chosen, happenings), chosen).play().earnings.down_s
    detection_s = chosen.costs.detection_s("lost connection", 0.0)
    assert 0 < sum(found.values()) < detection_s + chosen.costs.start_s + 10


def test_slot_time_of_an_absent_node() -> None:
    away_s, start_s = 4 * 3600.0, policies.POLICIES["unicron"].costs.start_s
    found = play("unicron", lost("n1", DAY_S, DAY_S + away_s)).lost_slot_s
    assert found["sub-healthy"] == pytest.approx(2 * (away_s + start_s), rel=1e-3)
    assert found["waiting"] == 0
    found = play("megatron", lost("n1", DAY_S, DAY_S + away_s)).lost_slot_s
    assert found["waiting"] == pytest.approx(8 * away_s, rel=1e-3)
