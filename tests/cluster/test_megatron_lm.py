"""Clones of Megatron-LM (UNICRON_MEGATRON_LM=DIR:DIR) under agents, against their own loops."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import megatron_trial
import pytest
from megatron_trial import (
    BITWISE,
    CASES,
    DECLINED,
    EXACT_TRIP,
    ITERATIONS,
    LONG,
    MANDATORY,
    SAVED,
    TRIP,
)
from real_cluster import RealCluster, running


@pytest.fixture(
    scope="module", params=megatron_trial.clones_or_skip(), ids=lambda folder: folder.name
)
def clone(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_killed_rank_changes_no_printed_loss(
    cluster: RealCluster, clone: Path, tmp_path: Path, name: str
) -> None:
    stock_lines = megatron_trial.stock(clone, CASES[name])
    healed = megatron_trial.struck(cluster, clone, CASES[name], tmp_path / "out")
    assert sum(place.isdecimal() for place in stock_lines) == ITERATIONS
    assert len(stock_lines) == ITERATIONS + 4  # two evaluations, and two at the end
    assert megatron_trial.unequal(stock_lines, healed.lines) == []
    (incident,) = healed.incidents
    assert (incident.iterations_lost, incident.ckpt_read) == (0, False)
    for place, line in stock_lines.items():
        assert healed.lines[place] == pytest.approx(line, rel=1e-3)


@pytest.mark.parametrize("name", BITWISE)
def test_in_bitwise_a_killed_rank_changes_no_bit(
    cluster: RealCluster, clone: Path, tmp_path: Path, name: str
) -> None:
    healed, differing = megatron_trial.bits_of(cluster, clone, BITWISE[name], tmp_path)
    assert len(healed.incidents) == 1
    assert differing == []


def test_in_bitwise_a_round_trip_ends_with_the_same_bits(
    cluster: RealCluster, clone: Path, tmp_path: Path
) -> None:
    healed, differing = megatron_trial.bits_of_round_trip(
        cluster, clone, EXACT_TRIP, tmp_path, random.Random(1)
    )
    assert len(healed.incidents) == 3
    assert differing == []


def test_its_checkpoints_are_continued_and_its_own_loop_continues_ours(
    cluster: RealCluster, clone: Path, tmp_path: Path
) -> None:
    trip = megatron_trial.round_trip(cluster, clone, TRIP, tmp_path, random.Random(1))
    assert megatron_trial.unequal(megatron_trial.stock(clone, TRIP), trip.lines) == []
    assert [(one.iterations_lost, one.ckpt_read) for one in trip.incidents] == [(0, False)] * 3
    _a_checkpoint_that_does_not_fit_ends_the_task(cluster, clone, tmp_path / "between")


def test_the_usual_job_saves_heals_and_loads_as_its_own_loop(clone: Path, tmp_path: Path) -> None:
    with running(tmp_path / "cluster", 4) as four_nodes:
        trip = megatron_trial.round_trip(four_nodes, clone, MANDATORY, tmp_path, random.Random(1))
    assert [(one.iterations_lost, one.ckpt_read) for one in trip.incidents] == [(0, False)] * 3
    found = megatron_trial.compared(clone, MANDATORY, tmp_path / "orders", trip)
    print(found.table())
    assert found.equal, found.table()


def _a_checkpoint_that_does_not_fit_ends_the_task(
    cluster: RealCluster, clone: Path, folder: Path
) -> None:
    newest = folder / f"iter_{SAVED:07d}"
    for words, why in (
        (["--num-layers", "4"], "its num_layers is 2, the arguments say 4"),
        (["--vocab-size", "300"], "has another vocabulary"),
        (["--lr", "2e-3"], "in its schedule, the arguments say 0.002"),
    ):
        _refused(cluster, clone, folder, words, why)
    (newest / "__1_0.distcp").rename(folder / "kept")
    _refused(cluster, clone, folder, [], "__1_0.distcp")
    (folder / "kept").rename(newest / "__1_0.distcp")
    (newest / "common.pt").write_bytes((newest / "common.pt").read_bytes()[:100])
    _refused(cluster, clone, folder, [], "common.pt cannot be read")


def _refused(cluster: RealCluster, clone: Path, folder: Path, words: list[str], why: str) -> None:
    after = cluster.seq()
    task = cluster.submit(
        megatron_trial.job(
            clone,
            CASES["DP 3"],
            folder / "out",
            *TRIP.words,
            "--load",
            str(folder),
            *words,
            iterations=LONG,
        )
    )
    assert cluster.wait_ended(task)["state"] == "failed"
    assert why in cluster.endings(task)
    starts: list[Any] = [one.body for one in cluster.told(after, "RankStarted", task=task)]
    assert {one.attempt for one in starts} == {1}


def test_a_wrong_argument_ends_the_task_in_one_line(
    cluster: RealCluster, clone: Path, tmp_path: Path
) -> None:
    after = cluster.seq()
    for name, words, why in (
        ("DP 3", ["--no-such"], "unrecognized arguments: --no-such"),
        ("DP 3", ["--num-layers", "0x"], "argument --num-layers: invalid int value: '0x'"),
        ("DP 3", ["--ffn-hidden-size", "0", "--bf16", "--fp16"], "AssertionError"),
        (
            "PP 2 x DP 2",
            ["--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "4"],
            "by the arguments each rank has 2 virtual pipeline stages",
        ),
    ):
        task = cluster.submit(megatron_trial.job(clone, CASES[name], tmp_path, *words))
        ended = cluster.wait_ended(task)
        assert ended["state"] == "failed"
        assert why in cluster.endings(task)
        starts: list[Any] = [one.body for one in cluster.told(after, "RankStarted", task=task)]
        assert {one.attempt for one in starts} == {1}
        closed: Any = cluster.told(after, "IncidentClosed")[-1].body
        assert closed.outcome == "failed"
        assert closed.why.startswith("it cannot start"), closed.why


@pytest.mark.parametrize("name", DECLINED)
def test_its_own_loop_continues_from_memory(
    cluster: RealCluster, clone: Path, tmp_path: Path, name: str
) -> None:
    case = DECLINED[name]
    found = megatron_trial.restarted(cluster, clone, case, tmp_path / "out")
    assert found.declined.from_memory
    assert found.continued == [found.continued[0]] * case.slots
    assert min(map(int, filter(str.isdecimal, found.again))) == found.continued[0] + 1 > 2
    assert megatron_trial.unequal(megatron_trial.stock(clone, case), found.lines) == []
    (incident,) = found.incidents
    assert (incident.outcome, incident.ckpt_read) == ("healed", False)
