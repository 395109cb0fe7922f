"""The demo's twins: each task trained undisturbed, in one process; our losses, our parameters.

Two processes at a time. Each twin is trained once more with its micro-batches summed the other way
round: what that changes is the noise that two equal trainings of this task may differ by.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ..terminal.format import span, table
from .acts import Player
from .stage import BrokenError, Stage

Plain = dict[str, Any]
TWIN_S_MAX = 240.0
TOLD_S = 6.0
LOOK_S = 0.05
NUM_TOGETHER = 2
NOISE_TIMES_MAX = 10.0
"""The tolerance, in measured noise of summing the same gradients in another order. Training
magnifies it: of five orders the noise of one was 6 times that of another. One micro-batch lost in
one iteration of these shows as 600,000 times the noise."""
ROUNDING_RATIO = 2.0**-23
"""Relative resolution of float32: one sample of the noise can be smaller than it by chance."""
REVERSED, NOISE = "reversed", "noise"


class Job(Struct, kw_only=True):
    """One process of the reference, started when those it needs are done."""

    name: str
    arguments: list[str]
    needs: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_done(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class Twins:
    """Of a task that finished, losses and parameters; of one that was cancelled, its losses."""

    def __init__(self, stage: Stage, finished: Player, cancelled: Player) -> None:
        self._stage, self._players = stage, [finished, cancelled]
        self._folder = stage.state.path / "twin"
        self._folder.mkdir()
        self._jobs: list[Job] = []
        for player in self._players:
            self._jobs += [self._training(player, player.name),
                           self._training(player, _reversed(player), "--reversed")]
        self._jobs[0].arguments += ["--compare", str(Path(finished.train.output) / "latest")]
        self._jobs.append(Job(name=NOISE, needs=(finished.name, _reversed(finished)), arguments=[
            "--compare", str(self._folder / _reversed(finished) / "final"),
            "--to", str(self._folder / finished.name / "final")]))

    def _training(self, player: Player, name: str, *options: str) -> Job:
        """As many iterations as the task came, undisturbed."""
        out = self._folder / name
        out.mkdir()
        spec = out / "spec.json"
        spec.write_text(json.dumps(msgspec.to_builtins(player.spec, str_keys=True)))
        return Job(name=name, arguments=[
            "--spec", str(spec), "--out", str(out),
            "--iterations", str(len(self._stage.losses(player.task))), *options])

    def run(self) -> None:
        """Train all, hold our losses and models to them, judge. Raises BrokenError."""
        began_s = told_s = time.monotonic()
        while True:
            done = all(job.is_done for job in self._jobs)
            self._start_next()  # raises where one failed, so also for the last
            if done:
                break
            time.sleep(LOOK_S)
            if time.monotonic() - began_s > TWIN_S_MAX:
                raise BrokenError(f"the twins are not done within {span(TWIN_S_MAX)}")
            if time.monotonic() - told_s > TOLD_S:
                told_s = time.monotonic()
                self._stage.say("twin", "undisturbed: " + ", ".join(
                    f"{job.name} {len(self._told(job))}" for job in self._jobs
                    if job.process is not None and job.name != NOISE))
        self._stage.say("twin", "each task undisturbed, same seed, one process, stock Megatron "
                                f"loop: {span(time.monotonic() - began_s)} in all")
        self._judge()

    def stop(self) -> None:
        """End what still trains."""
        for job in self._jobs:
            if job.process is not None:
                if job.is_running:
                    job.process.kill()
                job.process.wait()

    def _start_next(self) -> None:
        done = [job.name for job in self._jobs if job.is_done]
        for job in self._jobs:
            if job.process is not None and job.process.poll():
                raise BrokenError(f"the twin {job.name} failed, see {self._folder}")
            room = sum(one.is_running for one in self._jobs) < NUM_TOGETHER
            if job.process is None and room and all(name in done for name in job.needs):
                with ((self._folder / f"{job.name}.jsonl").open("wb") as out,
                      (self._folder / f"{job.name}.log").open("wb") as log):
                    job.process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "unicron.workers.training.reference",
                         *job.arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                        env={**os.environ, "OMP_NUM_THREADS": "1"})

    def _lines(self, job: Job) -> list[Plain]:
        text = (self._folder / f"{job.name}.jsonl").read_text()
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def _told(self, job: Job) -> list[float]:
        """The losses that it told so far."""
        return [line["loss"] for line in self._lines(job) if "loss" in line]

    def _judge(self) -> None:
        stage = self._stage
        jobs = {job.name: job for job in self._jobs}
        rows: list[list[str]] = []
        for player in self._players:
            told = stage.losses(player.task)
            theirs = self._told(jobs[player.name])
            gaps = [("losses", _gap([told[at] for at in sorted(told)], theirs),
                     _gap(self._told(jobs[_reversed(player)]), theirs))]
            if player is self._players[0]:
                gaps.append(("parameters", self._lines(jobs[player.name])[-1]["param_rel"],
                             self._lines(jobs[NOISE])[-1]["param_rel"]))
            for what, gap, noise in gaps:
                most = _tolerance(noise)
                equal = gap <= most
                rows.append([player.name, f"{len(told)} {what}" if what == "losses" else
                             f"all {what}", f"{gap:.1e}", f"{noise:.1e}", f"{most:.1e}",
                             "EQUAL" if equal else "NOT EQUAL"])
                stage.promise(equal, f"{player.name}'s {what} equal its undisturbed twin's")
        for line in table(("", "", "OURS", "NOISE", "TOLERANCE", "VERDICT"), rows,
                          right=(2, 3, 4)):
            stage.note(None, line)
        stage.note(None, "ours: the largest relative gap of a loss; of all parameters, the norm")
        stage.note(None, "noise: the twin against itself, micro-batches summed in reverse order")
        stage.note(None, f"tolerance: {NOISE_TIMES_MAX:g} x the noise, which is at least one "
                         f"rounding of float32 ({ROUNDING_RATIO:.1e})")
        stage.note(None, f"{self._players[1].name} was cancelled: its losses are held to its twin, "
                         "stopped there")


def _reversed(player: Player) -> str:
    return f"{player.name}-{REVERSED}"


def _gap(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two losses; infinite where one is missing or NaN."""
    if len(ours) != len(theirs) or not ours:
        return math.inf
    gaps = [abs(mine - their) / abs(their) for mine, their in zip(ours, theirs, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _tolerance(noise: float) -> float:
    """How far from its twin still counts as equal; nothing does where no noise was measured."""
    if not math.isfinite(noise):
        return math.nan
    return NOISE_TIMES_MAX * max(noise, ROUNDING_RATIO)
