"""The demo without a run: its plans, and the transitions and figures that it reads from a log."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import reference
from demo import acts, main, proof, twins
from demo.stage import BrokenError, Stage
from msgspec import to_builtins
from transitions import Transition as Moved
from transitions import transitions
from two_tasks import gives, plain
from unicron.cli.terminal import format as figures
from unicron.control_plane.history.history import history
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.problem import PlanProblem, TaskDemand
from unicron.control_plane.throughput import table
from unicron.control_plane.throughput.transition_cost import Transition
from unicron.events.log import archive
from unicron.events.records import codec
from waf import waf

PLAIN = [
    codec.to_plain(record)
    for record in archive.read(Path(__file__).parents[1] / "data" / "demo.jsonl")
]
"""One task on four ranks; rank 2 is killed and replaced."""
NAN = float("nan")
ALPHA, BETA, GAMMA = (main._player(name, 150) for name in main.NUM_SLOTS)


def plan(num_slots: int, *now: int, faulted: bool = False) -> planner.Choice:
    """The planner's choice for the first tasks of the demo, which hold `now` slots."""
    wishes: list[TaskDemand] = []
    for number, (player, have) in enumerate(zip((ALPHA, BETA, GAMMA), now, strict=False), 1):
        found = table.candidates(table.table(number, player.spec), have)
        wishes.append(
            TaskDemand(
                task=number,
                name=player.name,
                now=have,
                faulted=faulted and number == 1,
                transition=Transition.uniform(10.0),
                sizes=tuple(size for size, _ in found),
                wafs=tuple(player.spec.weight * rate for _, rate in found),
            )
        )
    return planner.choose_plan(
        PlanProblem(demands=tuple(wishes), num_slots=num_slots, mtbf_gpu_s=7.2e6, gain_min=0.005)
    )


def test_a_folder_of_another_program_is_refused(tmp_path):
    kept = tmp_path / "build" / "demo" / "thesis.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    tests = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "demo.main"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests / 'drivers'}"},
    )
    assert ran.returncode == 2
    assert "exists and is not a demo's" in ran.stderr
    assert kept.read_text() == "mine"


def test_the_demo_tasks_get_the_expected_plans():
    assert plan(6, 0, 0).plan.slots == (ALPHA.num_slots, BETA.num_slots)
    assert plan(6, 4, 2, 0).plan.slots == (3, 1, GAMMA.num_slots)
    assert plan(6, 3, 1).plan.slots == (4, 2)


def test_the_healthy_task_gives_a_slot_to_the_plan():
    choice = plan(4, 4, 2, faulted=True)
    assert choice.plan.slots == (3, 1)
    beaten = {tuple(slots for _, slots in other.slots): other.waf for other in choice.alternatives}
    assert (4, 0) in beaten
    assert max(beaten.values()) < choice.plan.waf


def moves(records: list[dict]) -> list[Moved]:
    return transitions(map(codec.from_plain, records))


def test_transitions_are_read_from_the_log():
    first, shrunk, grown = moves(PLAIN)
    assert (first.num_before, first.num_after) == (0, 4)
    assert (shrunk.num_before, shrunk.num_after, shrunk.newcomers) == (4, 3, ())
    assert (grown.num_before, grown.num_after) == (3, 4)
    assert [body.rank for body in grown.newcomers] == [2]
    assert first.lost == shrunk.lost == grown.lost == 0
    assert grown.step_s is not None
    assert 0.0 < grown.still_s < grown.step_s


def test_a_repeated_iteration_counts_as_lost():
    records = copy.deepcopy(PLAIN)
    told = next(record for record in records if record["kind"] == "Quiesced")
    told["body"]["step_version"] += 2
    assert [move.lost for move in moves(records)] == [0, 2, 0]
    seen = history(map(codec.from_plain, records)).transitions
    assert seen == [(one.seq, one.still_s, one.lost) for one in moves(records)]


@pytest.mark.parametrize("source", [-1, 2, 0])
def test_a_newcomer_that_read_a_checkpoint_breaks_the_promise(source, tmp_path):
    stage, records = Stage(tmp_path), copy.deepcopy(PLAIN)
    next(
        record["body"]
        for record in records
        if record["kind"] == "Reconfigured" and record["body"]["attempt"] == 2
    )["source"] = source
    (body,) = moves(records)[-1].newcomers
    acts.promise_from_memory(stage, to_builtins(body))
    assert (body.rank, bool(stage.broken)) == (2, source != 0)


def test_a_generation_that_failed_to_form_is_skipped():
    """The newcomer gets its state in a third generation that fails; the fourth succeeds."""
    records: list[dict] = []
    for record in copy.deepcopy(PLAIN):
        third = record["body"].get("generation") == 3
        if third and record["kind"] in ("Reconfigure", "Reconfigured"):
            records.append(copy.deepcopy(record))
            if record["kind"] == "Reconfigured":
                record["body"] |= {"source": record["body"]["rank"], "received_bytes": 0}
        if third:
            record["body"]["generation"] = 4
            record["seq"] += 100
        records.append(record)
    grown = moves(records)[-1]
    assert (grown.generation, grown.num_before, grown.num_after) == (4, 3, 4)
    assert [(body.rank, body.source) for body in grown.newcomers] == [(2, 0)]
    assert (grown.lost, grown.still_s) == (0, moves(PLAIN)[-1].still_s)


def test_a_transition_counts_before_its_first_step_is_reported():
    until = next(
        at
        for at, record in enumerate(PLAIN)
        if record["kind"] == "Resume" and record["body"]["generation"] == 3
    )
    grown = moves(PLAIN[: until + 1])[-1]
    assert (grown.generation, grown.step_s) == (3, None)
    assert grown.still_s > 0.0


def test_a_task_is_full_only_when_all_its_ranks_step(tmp_path):
    stage = Stage(tmp_path)
    task = next(record["seq"] for record in PLAIN if record["kind"] == "TaskSubmitted")
    full: list[bool] = []
    for record in PLAIN:
        stage.records.append(record)
        if record["kind"] in ("Reconfigure", "TaskProgressed"):
            full.append(stage.is_full(task, 4))
    changes = [now for before, now in zip([False, *full], full, strict=False) if before != now]
    assert changes == [True, False, True]
    assert not stage.is_full(task, 3)
    assert acts.nodes(stage, task) == "n1 n2"
    assert stage.members(task) == stage.seats(task) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_curves_can_share_one_maximum():
    assert figures.curve([0.0, 7.0], 2, 0.0) == "▁█"
    assert figures.curve([0.0, 7.0], 2, 0.0, 14.0) == "▁▅"
    assert figures.curve([0.0, 0.0], 2, 0.0, 0.0) == "▁▁"


def test_the_timeline_counts_detection_from_the_kill(tmp_path, capsys):
    stage = Stage(tmp_path)
    for record in PLAIN:
        stage.history.add(codec.from_plain(record))
    (one,) = stage.history.incidents.values()
    stage.killed_s[one.id] = one.fault_s - 0.5
    one.detected_s = one.fault_s + 0.25
    proof.timeline(stage)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (told,) = [row for row in rows if row[0] == f"inc-{one.id}"]
    (control,) = [row for row in rows if row[1:2] == ["control"]]
    assert told[5:7] == ["750", "ms"]
    assert control[-2:] == ["-", "-"]
    assert not stage.broken


class FixedLog:
    """A control plane with a fixed log, of which the first `told` records are visible."""

    def __init__(self, records: list[dict], told: int) -> None:
        self.all, self.told = records, told

    def records(self, after: int, *, follow: bool) -> list[dict]:
        return [record for record in self.all[: self.told] if record["seq"] > after]

    def post(self, path: str, body: object) -> dict:
        """Make all records visible; the request is the fifth record from the end."""
        self.told = len(self.all)
        return {"seq": self.all[-5]["seq"]}


def test_the_time_from_a_cancel_request_to_the_end(tmp_path, capsys):
    """Records that arrived before the request do not count."""
    records = copy.deepcopy(PLAIN)
    for number, record in enumerate(records):
        record["at_s"] = 1000.0 + number
    ended = next(record for record in records if record["kind"] == "TaskEnded")
    ended["body"]["outcome"] = "cancelled"
    player = copy.deepcopy(ALPHA)
    player.task = ended["body"]["task"]
    stage = Stage(tmp_path)
    stage._client = FixedLog(records, len(records) - 20)
    acts.cancel(stage, player)
    assert f"ended {figures.ms(ended['at_s'] - records[-5]['at_s'])} later" in (
        capsys.readouterr().out
    )
    assert not stage.broken


def time_before(out: str, words: str) -> str:
    """The time at the start of the line that contains these words."""
    (line,) = [line for line in out.splitlines() if words in line]
    return " ".join(line.split()[:2])


def test_a_kill_is_timed_like_the_timeline(tmp_path, capsys, monkeypatch):
    """Reports count from their append to the log, as in the column DETECTED."""
    exited = next(record for record in PLAIN if record["kind"] == "RankExited")
    killed = acts.Kill(
        at_s=exited["occurred_s"] - 0.25,
        event={"pid": exited["body"]["pid"], "event": "backward", "iteration": 7},
    )
    stage = played(tmp_path, monkeypatch, PLAIN)
    stage.trace = mock.Mock(iteration=lambda task: 99, of=lambda *wanted: [])
    for name, what in (
        ("_kill", lambda *given: killed),
        ("_healed", mock.Mock()),
        ("_return", mock.Mock()),
    ):
        monkeypatch.setattr(acts, name, what)
    player = copy.deepcopy(ALPHA)
    player.task = exited["body"]["task"]
    acts.kill_rank(stage, player)
    time_text = time_before(capsys.readouterr().out, "rank 2 exited, signal 9")
    assert time_text == figures.ms(exited["at_s"] - killed.at_s) != "250 ms"
    proof.timeline(stage)
    assert f" {time_text} " in next(
        line for line in capsys.readouterr().out.splitlines() if "inc-" in line
    )


def test_a_lost_node_is_timed_like_the_timeline(tmp_path, capsys, monkeypatch):
    d, alpha, _ = gives()
    records = plain(d)
    for record in records:
        record["occurred_s"] = record["at_s"] - 0.25
    failed = next(record for record in records if record["kind"] == "CollectiveFailed")
    stage = played(tmp_path, monkeypatch, records)
    player = copy.deepcopy(ALPHA)
    player.task = alpha
    acts._suspect_then_lost(stage, player, 0, failed["at_s"] - 1.5)
    assert time_before(capsys.readouterr().out, "failed, so a peer is suspected") == "1500 ms"


def test_a_transition_is_printed_with_its_times(tmp_path, capsys, monkeypatch):
    stage = played(tmp_path, monkeypatch, PLAIN)
    stage.look()
    monkeypatch.setattr(acts, "_prepared", lambda stage, body: "")
    acts.say_moves(stage, 0)
    shrunk = moves(PLAIN)[1]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " 4 -> 3: " in line]
    assert line.split(maxsplit=1)[1] == (
        f"4 -> 3: stopped for {figures.ms(shrunk.still_s)} at iteration {shrunk.iteration}; next "
        f"iteration finished {figures.ms(shrunk.step_s)} after the stop"
    )


def test_each_waf_curve_is_printed_with_its_maximum(tmp_path, capsys, monkeypatch):
    stage = played(tmp_path, monkeypatch, PLAIN)
    stage.look()
    proof.waf(stage)
    out = capsys.readouterr().out
    rates = waf(map(codec.from_plain, stage.records), proof.WAF_COLUMNS)
    for what, values in (
        ("achieved", rates.achieved),
        ("plan", rates.planned),
        ("ideal", rates.ideal),
    ):
        (line,) = [line for line in out.splitlines() if line.split()[0] == what]
        assert line.endswith(f"max {figures.scaled(max(values), 'FLOP/s')}")
    assert "achieved up to its own max, plan and ideal up to the ideal's" in out


def test_an_alternative_with_the_same_rounded_waf_shows_the_gap(tmp_path, capsys):
    """Two plans that both round to 138 GFLOP/s."""
    body = {
        "num_slots": 6,
        "trigger": "task gamma submitted",
        "waf": 138.2e9,
        "allocations": [],
        "alternatives": [
            {"what": "the next best", "waf": 137.9e9, "slots": []},
            {"what": "keep as it is", "waf": 80.6e9, "slots": []},
        ],
    }
    acts.say_plan(Stage(tmp_path), {"body": body})
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["138", "GFLOP/s", "chosen"],
        ["138", "GFLOP/s", "the next best, 0.2 % less"],
        ["80.6", "GFLOP/s", "keep as it is"],
    ]


def played(path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict]) -> Stage:
    """A stage that reads a fixed log and does not renice the processes in it."""
    monkeypatch.setattr(Stage, "_give_way", lambda stage, ready: None)
    stage = Stage(path)
    stage._client = FixedLog(records, len(records))
    return stage


@pytest.mark.parametrize(
    ("ours", "theirs", "gap"),
    [
        ([4.0, 2.0], [4.0, 2.0], 0.0),
        ([4.0, 2.0], [4.0, 1.0], 1.0),
        ([4.0], [4.0, 2.0], float("inf")),
        ([], [], float("inf")),
        ([4.0, NAN], [4.0, 2.0], float("inf")),
        ([4.0, 2.0], [NAN, 2.0], float("inf")),
        ([float("inf"), 2.0], [float("inf"), 2.0], float("inf")),
    ],
)
def test_a_missing_or_broken_loss_is_no_small_gap(ours, theirs, gap):
    assert twins._gap(ours, theirs) == gap


@pytest.mark.parametrize("noise", [float("inf"), NAN])
def test_without_measured_noise_nothing_is_equal(noise):
    for noises in ([noise, 1e-6], [1e-6, noise]):
        most = reference.tolerance(noises)
        assert not any(gap <= most for gap in (0.0, 1e-9, float("inf"), NAN))


def test_the_tolerance_follows_the_worst_order_and_is_never_below_a_rounding():
    assert reference.tolerance([1e-5, 4e-5]) == reference.NOISE_TIMES_MAX * 4e-5
    assert reference.tolerance([0.0, 0.0]) == reference.NOISE_TIMES_MAX * reference.ROUNDING_RATIO


def test_each_order_of_summing_has_every_micro_batch_once():
    for num in (1, 6, 12):
        assert [sorted(order) for order in reference.orders(num)] == [list(range(num))] * 3
    assert len({tuple(order) for order in reference.orders(6)}) == len(twins.ORDERS)


def compared(
    path: Path, saved: tuple[int, ...], *faults: dict[int, int]
) -> tuple[Stage, acts.Player]:
    """A stage where alpha trained 40 iterations, with these saved states and faults."""
    stage = Stage(path)
    player = copy.deepcopy(ALPHA)
    player.task = 6
    stage.losses = lambda task: dict.fromkeys(range(40), 1.0)  # type: ignore[method-assign]
    stage.records = [
        {
            "seq": 10 + at,
            "kind": "CheckpointSaved",
            "body": {"task": 6, "path": f"gen-1/iter-{at}", "step_version": at},
        }
        for at in saved
    ]
    stage.faults = list(faults)
    return stage, player


def test_states_after_each_fault_and_the_last_are_compared(tmp_path):
    stage, player = compared(tmp_path, (8, 16, 24, 32, 40, 48), {6: 7, 14: 9}, {6: 12}, {6: 15})
    assert [(state.iteration, state.why) for state in twins.saved_states(stage, player)] == [
        (8, "after fault 1"),
        (16, "after fault 2 and fault 3"),
        (40, "the last"),
    ]
    assert not stage.broken


def test_a_fault_without_a_later_saved_state_breaks_the_promise(tmp_path):
    stage, player = compared(tmp_path, (8,), {6: 7}, {14: 9}, {6: 8})
    assert [state.why for state in twins.saved_states(stage, player)] == ["after fault 1"]
    assert stage.broken == ["alpha's state was saved after fault 3"]


@pytest.mark.parametrize(
    ("key", "ours", "broken"),
    [
        ("param_rel", 2.9e-5, []),
        ("param_rel", 3.1e-5, ["parameters at 8, after fault 1"]),
        ("optimizer_rel", 3.1e-5, ["optimizer at 8, after fault 1"]),
        ("optimizer_rel", NAN, ["optimizer at 8, after fault 1"]),
        ("loss", 1.1, ["40 losses"]),
    ],
)
def test_a_state_outside_of_the_tolerance_is_not_equal(tmp_path, capsys, key, ours, broken):
    """The other orders differ by 1e-6 and 1e-5: up to 3e-5 is equal."""
    stage, player = compared(tmp_path, (8, 40), {6: 7})
    runs = twins.ReferenceRuns(stage, [player])
    for end in twins.ORDERS:
        write_lines(
            tmp_path / "reference" / f"alpha{end}.jsonl",
            [{"iteration": at, "loss": ours if key == "loss" else 1.0} for at in range(40)],
        )
    lines = [{"param_rel": gap, "optimizer_rel": gap} for gap in (1e-6, 1e-6, 1e-5)] * 2
    lines[0] = lines[0] | {key: ours}
    write_lines(tmp_path / "reference" / "alpha-comparison.jsonl", lines)
    runs._judge()
    assert stage.broken == [f"alpha's {what} equal the reference run's" for what in broken]
    assert capsys.readouterr().out.count("NOT EQUAL") == len(broken)


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_failure_of_the_last_reference_run_is_noticed(tmp_path):
    stage, player = compared(tmp_path, (8,), {6: 7})
    runs = twins.ReferenceRuns(stage, [player])
    for job in runs._jobs:
        code = int(job is runs._jobs[-1])
        job.process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        job.process.wait()
    with pytest.raises(BrokenError, match="the reference run alpha-comparison failed"):
        runs.run()
