"""The settlement bench: its member does what a rank does, and its goals are listed."""

from __future__ import annotations

import resource

import pytest
from bench.recovery.rows import row
from bench.settlement import control_plane, main, ranks
from bench.settlement.crowd import FILES_BESIDE, allow_files, crowd_of


@pytest.mark.parametrize("name", ["joined", "reshaped"])
def test_a_settlement_costs_a_rank_little(name: str) -> None:
    world = ranks.World(ranks.scenes(64, 200)[name])
    assert world.receivers == ([32] if name == "joined" else [*range(64)])
    for place in ranks.measured_places(64):
        cost, known = world.cost(place)
        assert 0 < cost.metadata_bytes < 1e5
        assert bool(known.lists_read) == (name == "reshaped")
    assert len(world.requests_to(0)) == (0 if name == "joined" else 2)


@pytest.mark.parametrize("name", ["joined", "reshaped"])
def test_a_member_asks_the_store_equally_often_however_many_there_are(name: str) -> None:
    few, many = (crowd_of(ranks.World(ranks.scenes(num, 80)[name])) for num in (64, 128))
    assert few.num_requests == many.num_requests > 10
    assert many.bytes_a_rank < 1.5 * few.bytes_a_rank


def test_a_transition_takes_the_decider_less_than_a_second() -> None:
    decided = control_plane.transition(64)
    assert 0 < decided.cpu_s < 1.0
    assert 64 < decided.order_bytes < 10_000


def test_too_few_open_files_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 1024), (64, resource.RLIM_INFINITY), (1024, 1024)]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: asked.append(given))
    assert allow_files(4096) == "4096 members need 4160 open files, and `ulimit -Hn` is 1024"
    assert (allow_files(256), asked.pop()) == ("", (256 + FILES_BESIDE, 1024))
    del limits[0]
    assert (allow_files(4096), asked.pop()[0]) == ("", 4096 + FILES_BESIDE)
    del limits[0]
    assert (allow_files(256), asked) == ("", [])


def test_goals_are_of_one_case_and_of_the_requests_in_all() -> None:
    rows = [
        row(case, "unicron", metric, [value], "s")
        for case, metric, value in (
            ("ranks_256", "settle_cpu_s", 9.0),
            ("ranks_1024", "settle_cpu_s", 0.25),
            ("ranks_256", "store_requests_a_rank", 20.0),
            ("ranks_1024", "store_requests_a_rank", 40.0),
        )
    ]
    assert main.held_to(rows) == [
        "holds   ranks_1024, settle_cpu_s: 0.25, goal at most 0.5",
        "misses  store_requests_a_rank, most over least: 2, goal at most 1.1",
    ]
