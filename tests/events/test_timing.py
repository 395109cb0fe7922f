"""Times on which two packages agree, and the bounds of the policy that follow from them."""

from __future__ import annotations

import pytest
from unicron.control_plane.service.leases import Leases
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.state.node import Node
from unicron.events import timing
from unicron.events.errors import SpecError
from unicron.events.log.port import Heartbeat
from unicron.events.spec.policy import BOUNDS, Policy, parse

READ_S = 0.1
"""Time between two reads of the heartbeats here; a leader reads them at least as often as this for
the shortest lease."""


def lost_beats(silence_s: float, sent_s: list[float]) -> int:
    """How often a node with heartbeats at these times becomes unreachable."""
    state = ClusterState(policy=Policy(silence_s_max=silence_s))
    node = Node(name="n1", incarnation=1, host="", pid=1, num_slots=1, accelerator="")
    state.nodes["n1"] = node
    leases, num = Leases(), 0
    leases.grant(0.0)
    for turn in range(1, round(sent_s[-1] / READ_S)):
        now_s = turn * READ_S
        last_s = max((at_s for at_s in sent_s if at_s <= now_s), default=0.0)
        leases.observe([Heartbeat("n1", 1, now_s - last_s)], now_s, pause_s=READ_S, state=state)
        for body in leases.verdicts(state):
            is_lost = type(body).__name__ == "NodeUnreachable"
            node.health = "unreachable" if is_lost else "healthy"
            state.unreachable = ["n1"] if is_lost else []
            num += is_lost
    return num


def test_at_the_shortest_lease_a_lost_and_a_late_heartbeat_change_nothing() -> None:
    """Of the heartbeats each second one is lost, and each third that arrives is late."""
    arrive_s = [2 * n * timing.BEAT_S + (n % 3 == 0) * 0.8 * timing.BEAT_S for n in range(40)]
    assert lost_beats(timing.LEASE_S_MIN, arrive_s) == 0
    assert lost_beats(timing.LEASE_S_MIN / 3, arrive_s) > 10, "a lease of one heartbeat flaps"


@pytest.mark.parametrize(
    ("name", "least_s"),
    [("silence_s_max", 3 * timing.BEAT_S), ("suspect_s_max", 2 * timing.BEAT_S)],
)
def test_a_policy_leaves_an_agent_its_heartbeats(name: str, least_s: float) -> None:
    assert getattr(parse({name: least_s}), name) == least_s
    with pytest.raises(SpecError, match=f"{name}: must be between {least_s}") as refused:
        parse({name: least_s - 0.01})
    assert "heartbeats at least: an agent sends one every 0.5 s" in refused.value.hint


def test_a_policy_of_an_old_log_stays_usable() -> None:
    """Only what is given now is judged: `simulate --from-log` changes one field of a log's."""
    old = Policy(silence_s_max=0.3)
    assert parse({"moves_max": 1}, old) == Policy(silence_s_max=0.3, moves_max=1)
    with pytest.raises(SpecError, match="silence_s_max"):
        parse({"silence_s_max": 0.3}, old)


def test_the_defaults_are_within_their_bounds() -> None:
    usual = Policy()
    for name, (least, most) in BOUNDS.items():
        value = getattr(usual, name)
        for number in value.values() if isinstance(value, dict) else (value,):
            assert number is None or least <= number <= most, name


def test_the_control_plane_waits_longer_than_what_it_waits_for() -> None:
    usual = Policy()
    assert usual.reconfigure_s_max > timing.RENDEZVOUS_S_MAX
    assert usual.quiesce_s_max > timing.FINISH_S_MAX
    assert timing.SETTLE_S > timing.LOG_RETRY_S_MAX
