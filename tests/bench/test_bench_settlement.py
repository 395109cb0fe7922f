"""The settlement bench: its member does what a rank does, and its goals are listed."""

from __future__ import annotations

import pytest
from bench.recovery.rows import row
from bench.settlement import control_plane, main, ranks


@pytest.mark.parametrize("name", ["joined", "reshaped"])
def test_a_settlement_costs_a_rank_little(name: str) -> None:
    scene = ranks.scenes(64, 200)[name]
    world = ranks.World(scene)
    assert world.receivers == ([32] if name == "joined" else [*range(64)])
    for place in (0, 32):
        cost = world.cost(place)
        assert 0 < cost.metadata_bytes < 1e5
        assert cost.read_bytes < cost.metadata_bytes
    rows, requests = world.those_that_ask(40 if name == "joined" else 0)
    assert len(rows) >= len(requests) > 0


def test_a_transition_takes_the_decider_less_than_a_second() -> None:
    assert 0 < control_plane.transition_s(64) < 1.0


def test_goals_are_of_the_largest_case() -> None:
    rows = [
        row(case, "unicron", "settle_cpu_s", [value], "s")
        for case, value in (("ranks_256", 9.0), ("ranks_1024", 0.25))
    ]
    assert main.held_to(rows) == ["holds   ranks_1024, settle_cpu_s: 0.25, goal at most 0.5"]
