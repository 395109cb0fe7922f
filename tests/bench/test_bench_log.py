"""The bench of the log: its cases run with few records, and a loss would be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.log import chaos, library, main, takeover
from bench.log.chaos import Told
from bench.log.records import Life
from decider import Driver
from unicron.control_plane.decide.replay import verify
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

FEW = main.Sizes(
    long=3_000, short=1_500, memory=2_000, rest=300, library=500, moments=4, year=3_000, typed=3_000
)


def test_the_records_are_those_of_a_cluster_that_heals() -> None:
    records: list[Record] = []
    for made in Life().turns():
        records += made
        if len(records) > 5_000:
            break
    assert verify(records).ok
    kinds = {one.kind for one in records}
    assert {"TaskProgressed", "MemoryCheckpointStored", "IncidentClosed", "Reconfigure"} <= kinds


def test_each_case_of_one_log_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {
        "num": 500,
        "append_s": [0.01] * 2,
        "append_cpu_s": 0.01,
        "replay_s": 0.01,
        "replay_cpu_s": 0.01,
    }
    monkeypatch.setattr(library, "measured", lambda folder, num: told)
    rows = main.of_log(tmp_path, FEW)
    assert {one.case for one in rows} == set(main.LOG_CASES)
    assert all(one.value is not None and one.value > 0 for one in rows)
    goals = [line for line in main.held_to(rows) if line.startswith(("holds", "misses"))]
    assert len(goals) == 6
    assert any("at_1m, p99_s" in line and line.startswith("holds") for line in goals)


@pytest.mark.thorough
def test_the_history_of_a_year_is_measured(tmp_path: Path) -> None:
    rows = {one.metric: one.value for one in main.of_history(tmp_path, FEW)}
    assert rows.keys() == {"first_s", "file_mb", "answer_s", "again_s", "days"}
    assert all(value is not None and value > 0 for value in rows.values())
    assert rows["days"] in (365, 366, 367)


def test_typed_commands_are_measured(tmp_path: Path) -> None:
    rows = {one.metric: one.value for one in main.of_typed(tmp_path, FEW)}
    assert {name.removesuffix("_s") for name in rows} >= {
        "status",
        "status_task",
        "incident",
        "incident_all",
        "status_task_cpu",
    }
    assert all(value is not None and value > 0 for value in rows.values())


@pytest.mark.parametrize("case", takeover.CASES)
@pytest.mark.thorough
def test_a_takeover_is_measured(case: str, tmp_path: Path) -> None:
    rows = main.of_takeovers(case, tmp_path, 1)
    if why := takeover.why_not(case):
        pytest.skip(why)
    assert all(one.value is not None and 0.2 < one.value < 30 for one in rows)


@pytest.mark.thorough
def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    lost, doubled, note = chaos.chaos(tmp_path, 2, seed=3)
    assert (lost, doubled) == (0, 0), note


def test_a_lost_record_and_a_doubled_one_are_counted() -> None:
    d = Driver(nodes=1)
    task = d.running()
    first = len(d.log)
    for number in range(3):
        d.tell(f"operator/{number}", r.TaskWeightSet(task=task, weight=1.0 + number, reason=""))
    records = d.log
    seqs = [one.seq for one in records[first:] if isinstance(one.body, r.TaskWeightSet)]
    seen = {one.seq: codec.encode_record(one) for one in records}
    told = Told(dict(zip((1.0, 2.0, 3.0), seqs, strict=True)), seen)
    assert (chaos.lost_of(records, told), chaos.doubled_of(records)) == (0, 0)
    without = [one for one in records if one.seq != seqs[1]]
    assert chaos.lost_of(without, told) == 2, "the answer, and what was read"
    assert chaos.doubled_of([*records, records[seqs[2] - 1]]) >= 1
    report = next(one for one in records if one.source == "n1/1" and one.source_seq == 2)
    assert chaos.lost_of([one for one in records if one is not report], Told({}, {})) == 1
