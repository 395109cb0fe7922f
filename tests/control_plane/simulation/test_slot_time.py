"""The time of every slot is accounted for exactly once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenarios import DAY_S, HAPPENINGS, lost, plain
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.cluster import SlotTime
from unicron.control_plane.simulation.run import Outcome, Run
from unicron.control_plane.simulation.trace.external_event import ExternalEvent


class Checked(SlotTime):
    """Slot time that asserts that no count of slots is ever negative."""

    def end(self, at_s: float) -> None:
        assert at_s == self._since_s or min(self.now.values()) >= 0, self.now
        super().end(at_s)


def play(policy: str, happenings: list[ExternalEvent], tasks: int = 1) -> Outcome:
    data = plain()
    one = data["tasks"][0]
    data["tasks"] = [one | {"name": f"task-{number}", "weight": 1.0 + number,
                            "slots": {"min": 1, "max": 8 // tasks}} for number in range(tasks)]
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, policy)
    run = Run(scenario.run_input(parsed, chosen, happenings), chosen)
    run.cluster.slot_time = Checked()
    run.account.set_training = run.cluster.slot_time.set_training
    return run.play()


@settings(deadline=None, max_examples=60)
@given(HAPPENINGS, st.sampled_from([*policies.POLICIES]), st.integers(1, 3))
@example([ExternalEvent(0.0, "n0", "left"), ExternalEvent(5.0, "n0", "joined")], "unicron", 2)
def test_slot_time_is_counted_completely_and_once(
    happenings: list[ExternalEvent], policy: str, tasks: int) -> None:
    found = play(policy, sorted(happenings, key=lambda one: one.at_s), tasks)
    assert sum(found.slot_s.values()) == pytest.approx(8 * 10 * DAY_S, rel=1e-12)
    again_s = found.earnings.lost_slot_s["recomputed"]
    assert found.slot_s["trained"] == pytest.approx(found.earnings.slot_s + again_s, rel=1e-9)


def test_slot_time_of_an_absent_node() -> None:
    away_s, start_s = 4 * 3600.0, policies.POLICIES["unicron"].costs.start_s
    found = play("unicron", lost("n1", DAY_S, DAY_S + away_s)).slot_s
    assert found["away"] == pytest.approx(2 * away_s)
    assert found["idle"] == found["waiting"] == 0
    assert found["transition"] == pytest.approx(2 * start_s, abs=8 * 4)
    found = play("megatron", lost("n1", DAY_S, DAY_S + away_s)).slot_s
    assert found["away"] == pytest.approx(2 * away_s)
    assert found["idle"] == pytest.approx(6 * away_s, rel=1e-3)
