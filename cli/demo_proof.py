"""The demo's proof: the undisturbed twin, and the log decided again by a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ..events.spec import JobSpec
from .demo_stage import BrokenError, Stage
from .figures import ms, ranks, span, table
from .history import History, IncidentHistory
from .screens import loss_curve

Plain = dict[str, Any]
TWIN_S_MAX = 240.0
COMPARE_S_MAX = 60.0
TOLD_S = 6.0
NOISE_TIMES_MAX = 3.0
"""The tolerance, in measured noise of summing the same gradients in another order."""
ROUNDING_RATIO = 2.0**-23
"""Relative resolution of float32: one sample of the noise can be smaller than it by chance."""
LOOK_S = 0.05
NOTE_COLUMNS = 80


class Twins:
    """Two undisturbed trainings side by side: the twin, and one that sums the other way round."""

    def __init__(self, stage: Stage, spec: JobSpec) -> None:
        self._stage = stage
        self._folder = stage.state.path / "twin"
        self._folder.mkdir()
        self._spec = self._folder / "spec.json"
        self._spec.write_text(json.dumps(msgspec.to_builtins(spec, str_keys=True)))
        assert spec.train is not None
        self._num_iterations = spec.train.iterations
        self._running: list[subprocess.Popen[str]] = []
        self._num_told = 0

    def run(self, ours: Path) -> None:
        """Train both, hold our model to the twin, judge. Raises BrokenError."""
        began_s = time.monotonic()
        twin = self._start("twin")
        self._start("reversed", "--reversed")
        threading.Thread(target=self._count, args=(twin,), daemon=True).start()
        told_s = time.monotonic()
        while any(process.poll() is None for process in self._running):
            time.sleep(LOOK_S)
            if time.monotonic() - began_s > TWIN_S_MAX:
                raise BrokenError(f"the twin is not done within {span(TWIN_S_MAX)}")
            if time.monotonic() - told_s > TOLD_S and self._num_told:
                told_s = time.monotonic()
                self._stage.say("twin", f"undisturbed {self._num_told}/{self._num_iterations}")
        if any(process.returncode for process in self._running):
            raise BrokenError(f"a twin failed, see {self._folder}")
        took_s = time.monotonic() - began_s
        twin_model = self._folder / "twin" / "final"
        comparing = [self._compare(ours, twin_model),
                     self._compare(self._folder / "reversed" / "final", twin_model)]
        gap, noise = (self._difference(process) for process in comparing)
        self._judge(gap, noise, took_s)

    def stop(self) -> None:
        """End what still trains."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(self, name: str, *options: str) -> subprocess.Popen[str]:
        out = self._folder / name
        out.mkdir()
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                _reference("--spec", str(self._spec), "--out", str(out), *options), text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if not options else log,
                stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._running.append(process)
        return process

    def _count(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._num_told = json.loads(line).get("iteration", self._num_told - 1) + 1

    def _compare(self, one: Path, other: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(_reference("--compare", str(one), "--to", str(other)),
                                   text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self._running.append(process)
        return process

    def _difference(self, process: subprocess.Popen[str]) -> Plain:
        out, errors = process.communicate(timeout=COMPARE_S_MAX)
        if process.returncode:
            raise BrokenError(f"the models cannot be compared: {errors.strip()[-200:]}")
        gap: Plain = json.loads(out.splitlines()[-1])
        return gap

    def _judge(self, gap: Plain, noise: Plain, took_s: float) -> None:
        stage = self._stage
        stage.say("twin", f"undisturbed, same seed, one process, stock Megatron loop: "
                          f"{span(took_s)}")
        tolerance = {key: NOISE_TIMES_MAX * max(noise[key], ROUNDING_RATIO)
                     for key in ("loss_rel", "param_rel")}
        rows = [[what, f"{gap[key]:.1e}", f"{noise[key]:.1e}",
                 f"{tolerance[key]:.1e}" if key in tolerance else "-"]
                for what, key in (("largest difference of a loss", "loss_abs"),
                                  ("  relative", "loss_rel"),
                                  ("largest difference of a parameter", "param_abs"),
                                  ("  of all, relative norm", "param_rel"))]
        for line in table(("", "OURS", "NOISE", "TOLERANCE"), rows, right=(1, 2, 3)):
            stage.note(None, line)
        stage.note(None, "noise: the twin against itself, micro-batches summed in reverse order")
        stage.note(None, f"tolerance: {NOISE_TIMES_MAX:g} x the noise, which is at least one "
                         f"rounding of float32 ({ROUNDING_RATIO:.1e})")
        equal = gap["num_losses"] == self._num_iterations and all(
            gap[key] <= most for key, most in tolerance.items())
        stage.say("verdict", f"{gap['num_losses']} losses and all parameters: "
                             f"{'EQUAL' if equal else 'NOT EQUAL'}")
        stage.promise(equal, "the healed training equals its undisturbed twin")


def _reference(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "unicron.workers.training.reference", *arguments]


def unicron(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of our commands in a fresh process that knows of no cluster."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    return subprocess.run([sys.executable, "-P", "-m", "unicron.cli.main", *arguments], text=True,
                          capture_output=True, check=False, env=clean, timeout=COMPARE_S_MAX)


def export(stage: Stage, name: str) -> Path:
    """Write the log as it is now to a file."""
    path = stage.state.path / name
    told = unicron("export", str(path), "--state", str(stage.state.path))
    if told.returncode:
        raise BrokenError(f"export: {told.stderr.strip()}")
    return path


def hash_at(path: Path, seq: int) -> str:
    """The state's hash after that record, by a fold of the file in a fresh process."""
    told = unicron("replay", str(path), "--until", str(seq), "-o", "json")
    if told.returncode:
        raise BrokenError(f"replay: {told.stderr.strip()}")
    return str(json.loads(told.stdout)["cluster"]["hash"])


def verify(stage: Stage, path: Path) -> None:
    """`unicron replay FILE --verify` in a fresh process; the last line but the table's."""
    told = unicron("replay", str(path), "--verify", "-o", "json")
    verdict: Plain = json.loads(told.stdout) if told.stdout else {}
    ok = told.returncode == 0 and bool(verdict.get("ok"))
    made = verdict.get("recomputed", {})
    stage.say("replay", f"{verdict.get('num_records', 0)} records by a fresh process, no "
                        "server: "
                        + (f"{sum(made.values())} of {sum(made.values())} decisions made "
                           "again: VERIFIED" if ok else "DIFFERENT"))
    kinds = ", ".join(f"{num}~{kind}" for kind, num in sorted(made.items()))
    for line in textwrap.wrap(kinds, NOTE_COLUMNS):
        stage.note(None, line.replace("~", " "))
    stage.promise(ok, f"the log verifies: {told.stderr.strip()}")
    live = stage.client.get("/v1/state")["cluster"]
    stage.promise(verdict.get("state_hash") == live["hash"] or live["seq"]
                  != verdict.get("num_records"), "its state is the control plane's")


def timeline(stage: Stage, killed_s: float, away: tuple[str, ...]) -> None:
    """The incidents' phases, since the fault itself; the control plane's has but its own end."""
    stage.say("timeline", "since the fault; from the log's records")
    rows = [_phases(one, killed_s) for one in stage.told.incidents.values()]
    rows.append(list(away))
    for line in table(("INCIDENT", "WHAT", "DETECTED", "DECIDED", "REBUILT", "RESUMED", "STEPPED",
                       "LOST"), rows, right=(2, 3, 4, 5, 6, 7)):
        stage.note(None, line)


def _phases(one: IncidentHistory, killed_s: float) -> list[str]:
    def since(at_s: float | None) -> str:
        return "-" if at_s is None else ms(at_s - killed_s)

    return [f"inc-{one.id}", f"{one.severity} {ranks(one.ranks)}", since(one.fault_s),
            since(one.decided_s), since(one.rebuilt_s), since(one.resumed_s),
            since(one.stepped_s), str(one.iterations_lost)]


def loss(stage: Stage, told: History, task: int) -> None:
    """The loss curve with the faults marked."""
    lines = loss_curve(told.tasks[task], told)
    for number, line in enumerate(lines):
        if number:
            stage.note(None, line)
        else:
            stage.say("loss", line)
