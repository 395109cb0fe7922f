"""The recovery bench: values read from traces and records, and the cases of layouts."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from bench import environment as bench_environment
from bench.recovery import (
    bare_torch,
    check,
    environment,
    goals,
    job,
    layouts,
    main,
    moved,
    overhead,
    peers,
    phases,
    rounds,
)
from bench.recovery import rows as recovery_rows
from bench.recovery import trial as recovery_trial
from bench.recovery import watch as recovery_watch
from bench.recovery.moved import Change, change, in_words, lacking_bytes, least_bytes
from bench.recovery.rows import Row, interval, ratio, row, table, write
from bench.recovery.trial import Trial
from bench.recovery.unicron import Unicron
from unicron.events.spec.job import parse
from unicron.workers.host import linux

ROOT = Path(__file__).resolve().parents[2]
TP2DP2 = {"tp": 2, "pp": 1, "dp": 2, "chunks": 1}
TP2 = TP2DP2 | {"dp": 1}
DP4, DP3 = ({"tp": 1, "pp": 1, "dp": dp, "chunks": 1} for dp in (4, 3))


def line(
    t: float,
    rank: int,
    event: str,
    iteration: int,
    generation: int = 1,
    micro_batch: int = -1,
    pid: int = 0,
) -> recovery_watch.Line:
    return {
        "t": t,
        "rank": rank,
        "pid": pid or 100 + rank,
        "event": event,
        "iteration": iteration,
        "generation": generation,
        "micro_batch": micro_batch,
    }


# Rank 1 dies at 10.0 in iteration 4. Rank 0 finishes a micro-batch of the old generation. It then
# runs two in the new one, of 0.5 s and 0.3 s. Rank 2 runs one of 1.2 s; rank 0 waits for it.
STORY = [
    line(8.0, 0, "done", 2),
    line(8.0, 1, "done", 2),
    line(8.0, 2, "done", 2),
    line(9.0, 0, "done", 3),
    line(9.1, 1, "done", 3),
    line(9.1, 2, "done", 3),
    line(9.9, 0, "micro_batch", 4, micro_batch=0),
    line(10.5, 0, "micro_batch", 4, 2, 3),
    line(11.0, 0, "micro_batch", 4, 2, 6),
    line(10.5, 2, "micro_batch", 4, 2, 5),
    line(11.3, 0, "reduce", 4, 2),
    line(11.7, 2, "reduce", 4, 2),
    line(11.8, 0, "done", 4, 2),
    line(11.9, 2, "done", 4, 2),
    line(11.9, 0, "micro_batch", 5, 2, 0),
    line(12.5, 0, "reduce", 5, 2),
    line(12.6, 0, "done", 5, 2),
]


BEFORE = {100: 1, 101: 1, 102: 1}


def test_a_generation_is_new_by_its_process_count_or_by_the_maximum() -> None:
    assert recovery_watch.generations(STORY, 10.0) == BEFORE
    assert recovery_watch.is_new(line(11.0, 0, "done", 4, 2), {100: 1, 102: 3})
    assert not recovery_watch.is_new(line(11.0, 2, "done", 4, 2), {100: 1, 102: 3})
    assert not recovery_watch.is_new(line(11.0, 1, "done", 4, 3, pid=900), {100: 1, 102: 3})
    assert recovery_watch.is_new(line(11.0, 1, "done", 4, 4, pid=900), {100: 1, 102: 3})


def test_a_recovery_ends_with_the_first_step_of_a_new_generation() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert (step["t"], step["rank"], step["iteration"]) == (11.8, 0, 4)
    assert recovery_watch.first_step(STORY, {100: 2, 102: 2}, 10.0) is None
    # A newer generation that stepped before `from_s` does not count.
    assert recovery_watch.first_step(STORY, BEFORE, 12.0)["t"] == 12.6  # type: ignore[index]


def test_recomputed_time_is_that_of_the_slowest_member_before_the_step() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert recovery_watch.recompute_s(STORY, step, BEFORE, 10.0) == pytest.approx(1.2)
    without = [one for one in STORY if one["rank"] != 2]
    assert recovery_watch.recompute_s(without, step, BEFORE, 10.0) == pytest.approx(0.8)


def test_iterations_are_lost_if_the_new_generation_starts_before_the_old_ones_end() -> None:
    step = recovery_watch.first_step(STORY, BEFORE, 10.0)
    assert step is not None
    assert recovery_watch.iterations_lost(STORY, step, BEFORE) == 0
    assert recovery_watch.iterations_lost(STORY, {**step, "iteration": 1}, BEFORE) == 3


def test_iteration_times_are_from_step_to_step_before_the_fault() -> None:
    assert recovery_watch.iteration_s(STORY, 100, 10.0) == [1.0]
    assert recovery_watch.iteration_s(STORY, 100, 12.0) == pytest.approx([1.0, 2.8])


def test_losses_are_compared_with_the_reference_run_unless_one_is_missing() -> None:
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


def record(
    seq: int, kind: str, occurred_s: float, at_s: float, cause: int = 0, **body: object
) -> phases.Record:
    return {
        "seq": seq,
        "kind": kind,
        "occurred_s": occurred_s,
        "at_s": at_s,
        "cause": cause,
        "body": body,
    }


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


def test_the_interval_is_that_of_the_sign_test() -> None:
    values = [float(value) for value in range(20)]
    # Of 20, the sixth value from either side: 95.9 %; the seventh would be 88.5 %.
    assert interval(values[::-1]) == (5.0, 14.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(value) for value in range(6)]) == (0.0, 5.0)


def test_a_row_is_a_median_and_a_system_without_one_is_in_the_table(tmp_path: Path) -> None:
    rows = [
        row("c", "unicron", "fault_to_step_s", [0.2, 0.3, None, 0.1], "s"),
        Row("c", "other", "fault_to_step_s", None, "s", 0, "0 of 5 recovered in 30 s"),
    ]
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


def test_an_unknown_system_is_refused_before_the_environment_is_built() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bench.recovery.main", "--systems", "unicorn"],
        env={"PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/drivers", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "unicorn is none of unicron, bare_torch" in done.stderr
    assert recovery_rows.CONFIDENCE_RATIO == 0.95


def test_every_system_can_be_made(tmp_path: Path) -> None:
    systems = [
        peers.made(name, tmp_path / name) for name in main.SYSTEMS if name != bare_torch.NAME
    ]
    assert [system.name for system in systems] == [
        name for name in main.SYSTEMS if name != bare_torch.NAME
    ]
    assert all(system.watch.look() == [] for system in systems)


# --- the peers' environments ---------------------------------------------------------------------
def test_a_package_is_pinned_in_one_file() -> None:
    """Two pins of one package contradict each other as soon as one of them changes: pip then
    installs no peer."""
    for pins in (ROOT / "tests/bench").glob("*/constraints-*.txt"):
        both = pinned(pins) & pinned(ROOT / "constraints.txt")
        assert not both, f"{pins.name} and constraints.txt both pin {sorted(both)}"


def pinned(pins: Path) -> set[str]:
    return {
        re.sub("[-_.]+", "-", line.partition("==")[0]).lower()
        for line in pins.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }


def test_what_is_measured_is_pinned_with_its_day() -> None:
    packages = [kit.package for kit in environment.KITS.values() if kit.package]
    assert len(packages) == 3
    assert all(re.match(r"\S+ \S+, \d+ days old$", environment.age(one)) for one in packages)
    day = datetime.date(2025, 7, 27)
    assert (
        environment.age("nvidia-resiliency-ext", day) == "nvidia-resiliency-ext 0.4.1, 10 days old"
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build/bench-recovery, and an index that has nothing."""
    monkeypatch.setattr(environment, "PLACE", tmp_path)
    monkeypatch.setattr(bench_environment, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_peer_that_cannot_be_installed_does_not_hinder_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(place, "torchft", "0.2.0")
    absent = environment.ensure(["unicron", "torchrun", "nvrx", "torchft_stable"])
    assert list(absent) == ["nvrx"]
    assert absent["nvrx"].startswith("cannot be installed: Cannot install nvidia-resiliency-ext")
    asked = "import torch, torchft; print(torch.__file__, torchft.__file__)"
    said = subprocess.run(
        [str(environment.python("torchft_stable")), "-c", asked],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.split()
    own, below = place / "torchft_stable", sysconfig.get_path("purelib")
    assert said[0].startswith(below), "a peer has the torch of this environment"
    assert said[1].startswith(str(own))
    assert not (own / "venv/lib/python3.11/site-packages/torch").exists()
    # What failed is tried again, what was laid is not.
    wheel(place, "nvidia_resiliency_ext", "0.4.1")
    (place / "torchft-0.2.0-py3-none-any.whl").unlink()
    assert environment.ensure(["nvrx", "torchft_stable"]) == {}


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that holds an empty package and asks for torch."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(
            f"{about}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: torch>=2\n",
        )
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def test_a_system_that_was_asked_for_and_cannot_run_fails_the_verb() -> None:
    rows = [
        Row("c", "nvrx", "recovered", None, "trials", 0, "cannot be installed: no wheel"),
        Row("c", environment.LAUNCHER, "recovered", None, "trials", 0, main.NOT_ASKED),
        *rounds.rows_of("c", "torchrun", [Trial("c", "torchrun", 1.0, 1, 0.4, why="no step")]),
        *rounds.rows_of("c", "torchft_fast", [Trial("c", "torchft_fast", 0, 0, 0, why="ended")]),
    ]
    assert main._aged(rows[0], "a 1.0, 9 days old").note == (
        "a 1.0, 9 days old; cannot be installed: no wheel"
    )
    found = main.cannot_run(rows)
    assert found[0] == "c: nvrx cannot run: cannot be installed: no wheel"
    assert len(found) == 2, "torchrun ran, but did not recover; the launcher was not asked for"
    assert found[1].startswith("c: torchft_fast cannot run: 0 of 1 recovered")
    assert "ended" in found[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nvrx", "/proc"], "/proc is no source tree of NVRx"),
        (["--systems", "unicron,nvrx_ft_launcher"], "hint: NVRX=/path/to/it"),
    ],
)
def test_a_tree_that_is_not_there_is_refused(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


class Hangs(peers.Peer):
    """Four processes that never train; each has a child of its own session."""

    name = "hangs"

    def launch(self, rank: int) -> None:
        code = (
            "import subprocess, time; "
            "subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
        )
        self.spawn(f"rank-{rank}", "-c", code)


class Ends(peers.Peer):
    """Four processes that fail at once."""

    name = "ends"

    def launch(self, rank: int) -> None:
        self.spawn(f"rank-{rank}", "-c", "import torchfoo")


def test_a_peer_that_hangs_is_killed_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "KINDS", {"hangs": Hangs, "ends": Ends})
    said = check.why_dead(tmp_path, "hangs", still_s=3.0)
    assert said == "hangs: nothing new in its trace for 3 s, 0 of 4 ranks trained; killed"
    mark = f"{peers.MARK}={os.getpid()}-{tmp_path / 'hangs'}".encode()
    assert not linux.kill_marked(mark), "a process was left"
    said = check.why_dead(tmp_path, "ends", still_s=60.0)
    assert said.endswith("No module named 'torchfoo'")
    assert said.startswith("all ended: ")


def test_a_system_that_trains_without_one_rank_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Its trace has new lines all the time, so that the limit on silence does not act."""

    class Partial(peers.Peer):
        name = "partial"

        def launch(self, rank: int) -> None:
            raise AssertionError

        def tend(self) -> str:
            for rank in (0, 1, 3):
                told = [line(time.time(), rank, "done", number) for number in range(200)]
                with (self.watch.folder / f"1-{rank}.jsonl").open("a") as file:
                    file.write("".join(json.dumps(one) + "\n" for one in told))
            return ""

    made = Partial(tmp_path / "partial")
    made.watch.folder.mkdir()
    with pytest.raises(recovery_trial.NotStarted, match="100 iterations passed, none of them by"):
        recovery_trial.ripe(made, job.NUM_RANKS, 2, 5, lambda number: True, 3)


# --- the floor and the goals ---------------------------------------------------------------------
def test_bare_torch_reduces_again_without_the_killed_rank(tmp_path: Path) -> None:
    """Real processes, in the largest layout by groups."""
    layout = bare_torch.LAYOUTS["pp2dp2_sigkill"]
    times = bare_torch.BareTorch(tmp_path / "floor", layout, 1 << 20).times()
    assert times.keys() == {"error_s", "down_s", "up_s", "fault_to_step_s"}
    assert all(value > 0 for value in times.values())
    assert times["fault_to_step_s"] >= max(times[name] for name in ("error_s", "down_s", "up_s"))


def test_a_floor_that_fails_says_why(tmp_path: Path) -> None:
    layout = bare_torch.Layout({}, before=((0, 9),))
    with pytest.raises(recovery_trial.NotStarted, match=r"exit code 1: .*Error"):
        bare_torch.BareTorch(tmp_path / "floor", layout, 1 << 10).times()


def test_a_side_that_makes_no_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on silence: a slow side that still makes steps becomes warm."""

    class Slow:
        name = "slow"
        num = 0

        def __init__(self, last: int) -> None:
            self.last = last

        def steps(self) -> list[tuple[float, int]]:
            self.num += self.num < self.last
            return [(0.0, self.num)]

    monkeypatch.setattr(overhead, "STILL_S_MAX", 0.5)
    began_s = time.monotonic()
    overhead._warm(Slow(overhead.WARM_NUM))
    assert time.monotonic() - began_s > overhead.STILL_S_MAX
    with pytest.raises(recovery_trial.NotStarted, match="slow hangs: no step after 3 for"):
        overhead._warm(Slow(3))


def test_every_case_of_a_killed_rank_has_a_floor() -> None:
    assert {*bare_torch.LAYOUTS} == {case for case in main.CASES if case.endswith("_sigkill")}


def measured(**values: float | None) -> list[Row]:
    return [
        Row("dp4_sigkill", system, "fault_to_step_s", value, "s", 3 if value else 0)
        for system, value in values.items()
    ]


def test_goals_are_ratios_to_the_floor_and_to_the_fastest_peer() -> None:
    rows = measured(unicron=0.2, bare_torch=0.1, torchrun=None, torchft_fast=0.9, nvrx=3.0)
    found = {(one.system, one.metric): one for one in goals.ratios(rows)}
    assert found["unicron", "over_bare_torch"].value == pytest.approx(2.0)
    assert found["nvrx", "over_bare_torch"].value == pytest.approx(30.0)
    assert found["torchrun", "over_bare_torch"].value is None
    fastest = found["unicron", "fastest_peer_over_it"]
    assert fastest.value == pytest.approx(4.5)
    assert fastest.note == "the fastest peer: torchft_fast"
    assert ("bare_torch", "over_bare_torch") not in found
    assert goals.held_to(goals.ratios(rows)) == [
        "holds   dp4_sigkill unicron over_bare_torch: 2, goal at most 3",
        "holds   dp4_sigkill unicron fastest_peer_over_it: 4.5, goal at least 4; "
        "the fastest peer: torchft_fast",
    ]
    slow = goals.ratios(measured(unicron=0.4, bare_torch=0.1, torchft_fast=0.9))
    assert [one.split()[0] for one in goals.held_to(slow)] == ["BROKEN", "BROKEN"]


@pytest.mark.parametrize(
    ("rows", "unknown"),
    [
        (measured(unicron=0.2, torchft_fast=0.9), "over_bare_torch"),
        (measured(unicron=0.2, bare_torch=None, torchft_fast=0.9), "over_bare_torch"),
        (measured(unicron=0.2, bare_torch=0.1), "fastest_peer_over_it"),
        (measured(unicron=0.2, bare_torch=0.1, torchrun=None), "fastest_peer_over_it"),
    ],
)
def test_a_ratio_of_what_was_not_measured_has_no_number(rows: list[Row], unknown: str) -> None:
    ratios = goals.ratios(rows)
    (row,) = (one for one in ratios if (one.system, one.metric) == ("unicron", unknown))
    assert (row.value, row.n) == (None, 0)
    assert row.note
    assert [one for one in goals.held_to(ratios) if one.startswith("UNKNOWN")] == [
        f"UNKNOWN dp4_sigkill unicron {unknown}: not measured, goal "
        + ("at most 3" if unknown == "over_bare_torch" else "at least 4")
    ]


def test_the_file_of_every_bench_has_the_speed_of_the_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    recovery_rows.finish([row("c", "unicron", "detect_s", [0.2], "s")], out, time.monotonic(), [])
    first, speed = json.loads(out.read_text())
    assert first.keys() >= {"case", "system", "metric", "value", "unit", "n"}
    assert (speed["case"], speed["metric"], speed["unit"]) == ("machine", "cores_speed", "pieces/s")
    assert speed["value"] > 0
    assert "cores_speed" in capsys.readouterr().out


# --- changes of layout ---------------------------------------------------------------------------
def record_of(kind: str, generation: int, **body: Any) -> moved.Record:
    return {"seq": 0, "kind": kind, "body": {"task": 1, "generation": generation, **body}}


def order(
    generation: int, ranks: list[int], axes: moved.Axes | None, again: int = -1
) -> moved.Record:
    """`again`: this rank is in a new process."""
    return record_of(
        "Reconfigure",
        generation,
        axes=axes,
        members=[{"rank": rank, "node": "n1", "attempt": 1 + (rank == again)} for rank in ranks],
    )


def told(
    generation: int,
    rank: int,
    taken: dict[int, int],
    settle_s: float = 0.1,
    *,
    origin: str = "peer",
    received_bytes: int = 0,
    todo: tuple[int, ...] = (),
) -> moved.Record:
    return record_of(
        "Reconfigured",
        generation,
        rank=rank,
        origin=origin,
        settle_s=settle_s,
        received_bytes=received_bytes,
        kept=[],
        todo=list(todo),
        taken=[
            {"rank": giver, "node": "n1", "taken_bytes": taken_bytes}
            for giver, taken_bytes in taken.items()
        ],
    )


def test_moved_bytes_are_those_taken_from_other_members() -> None:
    records = [
        order(1, [0, 1, 2, 3], TP2DP2),
        record_of("Resume", 1),
        # Rank 2 is lost. Generation 2 never trains. In 3, rank 3 is standby and gives state.
        order(2, [0, 1, 3], TP2),
        order(3, [1, 0, 3], TP2),
        record_of("Resume", 3),
        told(3, 1, {1: 500, 3: 40}),
        told(3, 0, {}, 0.3, origin="own"),
        told(3, 3, {}),
        order(4, [1, 0, 3, 2], TP2DP2, 2),
        told(4, 1, {}),
        told(4, 3, {1: 100}),
        told(4, 2, {0: 70}),
        told(4, 0, {}),
    ]
    assert change(records, 3) == Change(TP2DP2, TP2, (1, 0), 40, 0.3)
    # Rank 3's state is of generation 1 and thus older than the state of the others.
    assert change(records, 4) == Change(TP2, TP2DP2, (0, 1, None, None), 170, 0.1)
    assert in_words(TP2) == "TP2xDP1"


def test_a_member_back_before_the_settlement_has_nothing() -> None:
    records = [
        order(1, [0, 1, 2, 3], TP2DP2),
        record_of("Resume", 1),
        order(2, [0, 1, 2, 3], TP2DP2, 2),
        told(2, 0, {}),
        told(2, 1, {}),
        told(2, 2, {0: 70}),
        told(2, 3, {}),
    ]
    assert change(records, 2) == Change(TP2DP2, TP2DP2, (0, 1, None, 3), 70, 0.1)


def test_a_member_that_is_rolled_back_has_no_valid_state() -> None:
    records = [
        order(1, [0, 1, 2, 3], None),
        record_of("Resume", 1),
        order(2, [0, 1, 3], DP3),
        told(2, 0, {}, origin="copy", received_bytes=600),
        told(2, 1, {}, origin="copy", received_bytes=500),
        told(2, 3, {}, origin="copy", received_bytes=400),
    ]
    assert change(records, 2) == Change(DP4, DP3, (None, None, None), 1500, 0.1)


def test_the_least_bytes_are_those_a_member_does_not_have() -> None:
    own = [["model.a", "float32 4x6", [0, 0], [2, 6]], ["model.a", "float32 4x6", [2, 0], [1, 3]]]
    wanted = [
        ["model.a", "float32 4x6", [1, 2], [3, 2]],
        ["model.b", "bfloat16 5", [0], [5]],
        ["model.c", "float32 ", [], []],
    ]
    # Of the six elements of a, row 1 is there, and the first column of row 2.
    assert lacking_bytes(wanted, own) == 4 * 3 + 2 * 5 + 4
    assert lacking_bytes(wanted, wanted) == 0
    assert lacking_bytes(own, []) == 4 * 15


@pytest.mark.thorough
def test_a_built_layout_says_what_each_member_lacks() -> None:
    spec = job.spec("bench", Path("/tmp/out"), parallel={"tensor": [2]})
    shrink = Change(TP2DP2, TP2, (0, 1), 0, 0.0)
    grow = Change(TP2, TP2DP2, (0, 1, None, None), 0, 0.0)
    crossed = Change(TP2DP2, TP2, (3, None), 0, 0.0)
    none, both, other = least_bytes(spec, [shrink, grow, crossed])
    ((first, second, *_),) = moved.parts_of(spec, [TP2DP2])
    each = [lacking_bytes(part["pieces"], ()) for part in (first, second)]
    assert none == 0
    assert both == sum(each)
    # Parameters and two moments, all fp32; gradients are not state.
    assert each[0] == 3 * first["param_bytes"] == 3 * first["gradient_bytes"]
    assert first["optimizer_bytes"] == 2 * first["param_bytes"]
    # One rank moves from the second part to the first: layer norms and biases are in both.
    assert each[1] < other < sum(each)


def traced(t: float, rank: int, event: str, generation: int) -> dict[str, Any]:
    return {
        "t": t,
        "rank": rank,
        "pid": 100 + rank,
        "event": event,
        "iteration": 0,
        "generation": generation,
    }


def test_a_pause_is_from_step_to_step_less_the_micro_batches() -> None:
    lines = [
        traced(9.0, 0, "done", 2),
        traced(9.1, 1, "done", 2),
        traced(9.9, 0, "micro_batch", 3),
        traced(10.4, 0, "reduce", 3),
        traced(9.8, 1, "micro_batch", 3),
        traced(10.0, 1, "micro_batch", 3),
        traced(10.5, 1, "reduce", 3),
        traced(10.6, 1, "done", 3),
        traced(10.7, 0, "done", 3),
        traced(10.8, 0, "micro_batch", 3),
        traced(10.9, 0, "reduce", 3),
        traced(11, 0, "done", 3),
    ]
    assert layouts.pause(lines, 3) == pytest.approx(1.5 - 0.7)
    assert layouts.pause(lines, 4) is None
    assert layouts.pause(lines, 2) is None


def test_the_pause_ratio_counts_the_change_and_the_return() -> None:
    stood_s = {"pp2dp2_sigkill": (0.5, 0.4), "tp2dp2_sigkill": (0.2, 0.4)}
    rows = [
        Row(case, "unicron", metric, value, "s", 3)
        for case, both in stood_s.items()
        for metric, value in zip(("fault_to_resume_s", "grow_pause_s"), both, strict=True)
    ]
    (found,) = layouts.reshaped(rows)
    assert found.value == pytest.approx(1.5)
    assert layouts.reshaped(rows[:-1]) == []


def test_each_kind_of_task_has_its_number_of_replicas_on_four_ranks() -> None:
    assert tuple(layouts.CASES) == main.LAYOUTS
    for kinds in layouts.CASES.values():
        for kind in kinds.values():
            spec = job.spec(
                "bench",
                Path("/tmp/out"),
                size="1M" if kind.is_loop else kind.size,  # a loop builds its own model
                parallel=kind.parallel,
                copy_every=kind.copy_every,
            )
            train = parse(spec).train
            assert train is not None
            for num_ranks in (3, 4):
                slots = num_ranks - (num_ranks % 2 if kind.parallel.get("tensor") else 0)
                assert list(train.parallel.layouts(slots, train.num_micro_batches))
            assert [axes.dp for axes in train.parallel.layouts(4, train.num_micro_batches)] == [
                kind.num_replicas
            ]


def test_a_batch_is_whole_when_each_replica_has_its_part_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Unicron(tmp_path / "unicron", parallel={"tensor": [2]})
    made.task = 1
    half = job.NUM_MICRO_BATCHES // 2
    parts = [tuple(range(half)), tuple(range(half, 2 * half))]
    made.records = [
        order(1, [0, 1, 2, 3], TP2DP2),
        *(told(1, rank, {}, todo=parts[rank // 2]) for rank in range(4)),
    ]
    monkeypatch.setattr(made, "look", lambda: made.records)
    step: dict[str, Any] = {"generation": 1}
    assert made.whole_batch(step) is True
    made.records[-1]["body"]["todo"].pop()
    assert made.whole_batch(step) is False
