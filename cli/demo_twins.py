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

from .demo_acts import Player
from .demo_stage import BrokenError, Stage
from .figures import span, table

Plain = dict[str, Any]
TWIN_S_MAX = 240.0
TOLD_S = 6.0
LOOK_S = 0.05
NUM_TOGETHER = 2
NOISE_TIMES_MAX = 3.0
"""The tolerance, in measured noise of summing the same gradients in another order."""
ROUNDING_RATIO = 2.0**-23
"""Relative resolution of float32: one sample of the noise can be smaller than it by chance."""
REVERSED = "reversed"


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
    """Each as far as its task came."""

    def __init__(self, stage: Stage, players: list[Player]) -> None:
        self._stage, self._players = stage, players
        self._folder = stage.state.path / "twin"
        self._folder.mkdir()
        twins = [self._twin(player) for player in players]
        again = [self._backwards(player) for player in players]
        self._jobs = [*twins[:2], again[0], *twins[2:], *again[1:]]  # the longest first

    def _twin(self, player: Player) -> Job:
        arguments = self._common(player, player.name)
        if self._stage.told.tasks[player.task].outcome == "finished":
            arguments += ["--compare", str(Path(player.train.output) / "latest")]
        return Job(name=player.name, arguments=arguments)

    def _backwards(self, player: Player) -> Job:
        twin = self._folder / player.name / "final"
        return Job(name=f"{player.name}-{REVERSED}", needs=(player.name,), arguments=[
            *self._common(player, f"{player.name}-{REVERSED}"), "--reversed",
            "--compare", str(twin)])

    def _common(self, player: Player, name: str) -> list[str]:
        out = self._folder / name
        out.mkdir()
        spec = out / "spec.json"
        spec.write_text(json.dumps(msgspec.to_builtins(player.spec, str_keys=True)))
        return ["--spec", str(spec), "--out", str(out),
                "--iterations", str(len(self._stage.losses(player.task)))]

    def run(self) -> None:
        """Train all, hold our losses and models to them, judge. Raises BrokenError."""
        began_s = told_s = time.monotonic()
        while not all(job.is_done for job in self._jobs):
            self._start_next()
            time.sleep(LOOK_S)
            if time.monotonic() - began_s > TWIN_S_MAX:
                raise BrokenError(f"the twins are not done within {span(TWIN_S_MAX)}")
            if time.monotonic() - told_s > TOLD_S:
                told_s = time.monotonic()
                self._stage.say("twin", "undisturbed: " + ", ".join(
                    f"{job.name} {len(self._told(job))}" for job in self._jobs
                    if job.process is not None))
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
        found = {job.name: self._lines(job) for job in self._jobs}
        rows: list[list[str]] = []
        for player in self._players:
            noise = found[f"{player.name}-{REVERSED}"][-1]
            loss_rel = self._gap(player, [line["loss"] for line in found[player.name]
                                          if "loss" in line])
            param_rel = found[player.name][-1].get("param_rel")
            equal = loss_rel <= _most(noise["loss_rel"]) and (
                param_rel is None or param_rel <= _most(noise["param_rel"]))
            rows.append([player.name, str(len(stage.losses(player.task))), f"{loss_rel:.1e}",
                         f"{noise['loss_rel']:.1e}", f"{_most(noise['loss_rel']):.1e}",
                         *(["-"] * 3 if param_rel is None else
                           [f"{param_rel:.1e}", f"{noise['param_rel']:.1e}",
                            f"{_most(noise['param_rel']):.1e}"]),
                         "EQUAL" if equal else "NOT EQUAL"])
            stage.promise(equal, f"{player.name} equals its undisturbed twin")
        for line in table(("", "LOSSES", "GAP", "NOISE", "TOLERANCE", "PARAMETERS", "NOISE",
                           "TOLERANCE", "VERDICT"), rows, right=(1, 2, 3, 4, 5, 6, 7)):
            stage.note(None, line)
        stage.note(None, "the largest relative gap of a loss; that of all parameters, which a "
                         "cancelled task leaves none of")
        stage.note(None, "noise: each twin against itself, micro-batches summed in reverse order")
        stage.note(None, f"tolerance: {NOISE_TIMES_MAX:g} x the noise, which is at least one "
                         f"rounding of float32 ({ROUNDING_RATIO:.1e})")

    def _gap(self, player: Player, theirs: list[float]) -> float:
        """The largest relative difference of a loss in the log; infinite where one is missing."""
        ours = self._stage.losses(player.task)
        if sorted(ours) != list(range(len(theirs))):
            return math.inf
        return max((abs(ours[at] - loss) / abs(loss) for at, loss in enumerate(theirs)),
                   default=math.inf)


def _most(noise: float) -> float:
    """The tolerance for that noise."""
    return NOISE_TIMES_MAX * max(noise, ROUNDING_RATIO)
