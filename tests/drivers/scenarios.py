"""Scenarios of the simulator, small enough to check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.policies.policy import Policy
from unicron.control_plane.simulation.run import RunInput
from unicron.control_plane.simulation.trace.external_event import ExternalEvent

EXAMPLE = Path(__file__).parents[2] / "deploy" / "scenarios" / "two-weeks.yaml"
DAY_S = 86400.0
NODE, DEVICE, PROCESS = "lost connection", "ECC errors", "exited abnormally"


def plain(**changes: Any) -> dict[str, Any]:
    """Four nodes of two slots; one task that may use all of them, at 1e12 FLOP/s per slot."""
    return {
        "apiVersion": "unicron/v1",
        "name": "by-hand",
        "cluster": {"nodes": 4, "slots": 2},
        "tasks": [
            {
                "name": "one",
                "slots": {"min": 1, "max": 8},
                "throughput": {size: 1e12 * size for size in range(1, 9)},
            }
        ],
        "policies": {name: {} for name in policies.POLICIES},
        "trace": "trace.csv",
        "horizon_s": 10 * DAY_S,
    } | changes


def two_tasks(
    happenings: list[ExternalEvent], weight: float = 1.0, **changes: Any
) -> tuple[RunInput, Policy]:
    """Two tasks under Unicron whose maxima add up to all slots; `weight` is the second's."""
    tasks = [
        {
            "name": name,
            "weight": its,
            "slots": {"min": 1, "max": most},
            "throughput": {size: 1e12 * size**0.9 for size in range(1, most + 1)},
        }
        for name, its, most in (("one", 1.0, 5), ("two", weight, 3))
    ]
    given = scenario.parse(plain(tasks=tasks) | changes)
    policy = scenario.policy(given, "unicron")
    return scenario.run_input(given, policy, sorted(happenings, key=lambda one: one.at_s)), policy


def lost(node: str, at_s: float, back_s: float) -> list[ExternalEvent]:
    return [ExternalEvent(at_s, node, "fault", NODE), ExternalEvent(back_s, node, "repaired")]


HAPPENINGS = st.lists(
    st.builds(
        ExternalEvent,
        st.floats(0, 9.9 * DAY_S),
        st.sampled_from(["n0", "n1", "n2", "n3"]),
        st.sampled_from(["fault", "fault", "repaired", "left", "joined"]),
        st.sampled_from([*TABLE]),
    ),
    max_size=12,
)
