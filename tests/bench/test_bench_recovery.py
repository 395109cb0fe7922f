"""The bench of recovery: what is read off traces and records is what was written into them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.recovery import job, main, peers, phases, unicron
from bench.recovery import rows as recovery_rows
from bench.recovery import trial as recovery_trial
from bench.recovery import watch as recovery_watch
from bench.recovery.rows import Row, interval, ratio, row, table, write
from bench.recovery.trial import Trial
from unicron.events.spec.job import parse

ROOT = Path(__file__).resolve().parents[2]


def line(t: float, rank: int, event: str, iteration: int, generation: int = 1,
         micro_batch: int = -1, pid: int = 0) -> recovery_watch.Line:
    return {"t": t, "rank": rank, "pid": pid or 100 + rank, "event": event, "iteration": iteration,
            "generation": generation, "micro_batch": micro_batch}


# Rank 1 dies at 10.0 in iteration 4. Rank 0 finishes a micro-batch of the old world, then runs two
# in the new one, of 0.5 s and 0.3 s, and waits 0.1 s for rank 2, which runs one of 1.2 s.
STORY = [
    line(8.0, 0, "done", 2), line(8.0, 1, "done", 2), line(8.0, 2, "done", 2),
    line(9.0, 0, "done", 3), line(9.1, 1, "done", 3), line(9.1, 2, "done", 3),
    line(9.9, 0, "micro_batch", 4, micro_batch=0),
    line(10.5, 0, "micro_batch", 4, 2, 3), line(11.0, 0, "micro_batch", 4, 2, 6),
    line(10.5, 2, "micro_batch", 4, 2, 5),
    line(11.3, 0, "reduce", 4, 2), line(11.7, 2, "reduce", 4, 2),
    line(11.8, 0, "done", 4, 2), line(11.9, 2, "done", 4, 2),
    line(11.9, 0, "micro_batch", 5, 2, 0), line(12.5, 0, "reduce", 5, 2),
    line(12.6, 0, "done", 5, 2),
]


BEFORE = {100: 1, 101: 1, 102: 1}


def test_a_world_is_new_by_its_process_own_count_and_a_new_process_by_all() -> None:
    assert recovery_watch.generations(STORY, 10.0) == BEFORE
    assert recovery_watch.is_new(line(11.0, 0, "done", 4, 2), {100: 1, 102: 3})
    assert not recovery_watch.is_new(line(11.0, 2, "done", 4, 2), {100: 1, 102: 3})
    assert not recovery_watch.is_new(line(11.0, 1, "done", 4, 3, pid=900), {100: 1, 102: 3})
    assert recovery_watch.is_new(line(11.0, 1, "done", 4, 4, pid=900), {100: 1, 102: 3})


def test_the_step_is_the_first_of_the_new_world() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert (step["t"], step["rank"], step["iteration"]) == (11.8, 0, 4)
    assert recovery_watch.first_step(STORY, {100: 2, 102: 2}, 10.0) is None
    # a newer generation that stepped before the fault is of an earlier story
    assert recovery_watch.first_step(STORY, BEFORE, 12.0)["t"] == 12.6  # type: ignore[index]


def test_recomputed_is_what_the_slowest_member_ran_in_the_new_world_before_that_step() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert recovery_watch.recompute_s(STORY, step, BEFORE, 10.0) == pytest.approx(1.2)
    without = [one for one in STORY if one["rank"] != 2]
    assert recovery_watch.recompute_s(without, step, BEFORE, 10.0) == pytest.approx(0.8)


def test_iterations_are_lost_where_the_new_world_begins_before_the_old_ones_end() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert recovery_watch.iterations_lost(STORY, step, BEFORE) == 0
    assert recovery_watch.iterations_lost(STORY, {**step, "iteration": 1}, BEFORE) == 3


def test_how_long_an_iteration_takes_is_told_from_step_to_step_before_the_fault() -> None:
    assert recovery_watch.iteration_s(STORY, 100, 10.0) == [1.0]
    assert recovery_watch.iteration_s(STORY, 100, 12.0) == pytest.approx([1.0, 2.8])


def test_losses_are_held_to_the_twins_and_missing_ones_are_not_equal() -> None:
    twin = [4.0, 3.0, 2.0]
    assert recovery_watch.differs({1: 3.0, 2: 2.0}, twin, 1, 2) == 0.0
    assert recovery_watch.differs({1: 3.3, 2: 2.0}, twin, 1, 2) == pytest.approx(0.1)
    assert recovery_watch.differs({1: 3.0}, twin, 1, 2) is None
    assert recovery_watch.differs({2: 2.0, 3: 1.0}, twin, 2, 2) is None


def test_a_watch_reads_whole_lines_once(tmp_path: Path) -> None:
    file = tmp_path / "1-0.jsonl"
    file.write_text(json.dumps(STORY[0]) + "\n" + json.dumps(STORY[1])[:20])
    watch = recovery_watch.Watch(tmp_path)
    assert watch.look() == [STORY[0]]
    with file.open("a") as more:
        more.write(json.dumps(STORY[1])[20:] + "\n")
    (tmp_path / "told-0.jsonl").write_text('{"iteration": 3, "loss": 2.5}\n')
    assert watch.look() == [STORY[1]]
    assert watch.losses() == {3: 2.5}
    assert watch.look() == []


def record(seq: int, kind: str, occurred_s: float, at_s: float, cause: int = 0, **body: object
           ) -> phases.Record:
    return {"seq": seq, "kind": kind, "occurred_s": occurred_s, "at_s": at_s, "cause": cause,
            "body": body}


def test_the_phases_of_a_recovery_add_up_to_it() -> None:
    records = [
        record(1, "RankExited", 10.02, 10.03, rank=1),
        record(2, "IncidentOpened", 10.03, 10.03, cause=1),
        record(3, "Quiesced", 10.10, 10.11, rank=0, generation=1),
        record(4, "Quiesced", 10.20, 10.21, rank=2, generation=1),
        record(5, "Reconfigure", 10.22, 10.22, generation=2),
        record(6, "Reconfigured", 10.25, 10.26, rank=0, generation=2, down_s=0.01),
        record(7, "Reconfigured", 10.30, 10.31, rank=2, generation=2, down_s=0.05),
        record(8, "Resume", 10.40, 10.40, generation=2),
    ]
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    trial = Trial("dp4_sigkill", "unicron", 10.0, 1, 1.0, step=step, recompute_s=1.2)
    found = phases.phases(records, STORY, trial)
    assert tuple(found) == phases.PHASES
    wanted = [20, 10, 120, 50, 20, 80, 100, 100, 1200, 100]
    assert list(found.values()) == pytest.approx(wanted)
    assert sum(found.values()) == pytest.approx(1800)
    assert phases.phases(records[:-1], STORY, trial) == {}


def test_the_interval_is_the_sign_tests() -> None:
    values = [float(value) for value in range(20)]
    # Of 20, the sixth from either side: 95.9 %; the seventh would be 88.5 %.
    assert interval(values[::-1]) == (5.0, 14.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(value) for value in range(6)]) == (0.0, 5.0)


def test_a_row_is_a_median_and_a_system_without_one_is_in_the_table(tmp_path: Path) -> None:
    rows = [row("c", "unicron", "fault_to_step_s", [0.2, 0.3, None, 0.1], "s"),
            Row("c", "other", "fault_to_step_s", None, "s", 0, "0 of 5 recovered in 30 s")]
    assert (rows[0].value, rows[0].n) == (0.2, 3)
    shown = table(rows)
    assert "0.2 [0.1, 0.3]" in shown
    assert "other: 0 of 5 recovered in 30 s" in shown
    assert ratio(rows, "c", "fault_to_step_s", "other", "unicron") is None
    write(rows, tmp_path / "rows.json", {"cores": 2})
    read = json.loads((tmp_path / "rows.json").read_text())
    assert [(one["system"], one["value"]) for one in read] == [("unicron", 0.2), ("other", None)]
    stamp = json.loads((tmp_path / "rows.stamp").read_text())
    assert stamp["cores"] == 2
    assert {"commit", "at"} <= stamp.keys()


def test_every_system_trains_the_same_valid_job() -> None:
    for size in job.SIZES:
        made = parse(job.spec("bench", Path("/tmp/out"), size=size))
        assert made.train is not None
        assert made.train.num_micro_batches == job.NUM_MICRO_BATCHES
    assert recovery_trial.is_due(job.SAVE_EVERY_NUM + job.STRUCK_NUM)
    assert not recovery_trial.is_due(job.SAVE_EVERY_NUM)


def test_a_wrong_word_is_refused_before_anything_is_laid() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bench.recovery.main", "--systems", "unicorn"],
        env={"PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/drivers", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "unicorn is none of unicron, torchrun" in done.stderr
    assert recovery_rows.CONFIDENCE_RATIO == 0.95


def test_every_system_can_be_made(tmp_path: Path) -> None:
    systems = [unicron.Unicron(tmp_path / "unicron"),
               *(kind(tmp_path / name, name) for name, kind in peers.KINDS.items())]
    assert {system.name for system in systems} == {*main.SYSTEMS, "bare"}
    assert all(system.watch.look() == [] for system in systems)
