"""The demo's comparison with reference runs: losses, parameters and optimizer state of each task.

A reference run trains a task without faults, in one process. Each task has several reference runs,
which sum its micro-batches in different orders. Their differences are the numerical noise. The
losses of the demo's task, and its checkpoints after each fault and at the end, must match the first
run within a few times the noise. Bit for bit, there is one reference run, and no noise. Two
processes run at a time.
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
import reference
from msgspec import Struct
from reference import (
    NOISE_TIMES_MAX,
    ROUNDING_RATIO,
    state_folder,
    tolerance,
)
from unicron.cli.terminal.format import Plain, number_of, span, table

from .acts import Player
from .stage import BrokenError, Stage

STALLED_S_MAX = 300.0
PROGRESS_S = 6.0
LOOK_S = 0.05
NUM_TOGETHER = 2
ORDERS = ("", "-reversed", "-shuffled")
"""The suffix of a run's name for each order of summing (reference.py)."""
COMPARISON = "comparison"


class Job(Struct, kw_only=True):
    """One process of the reference runs, started when the jobs in `needs` are done."""

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


class SavedState(Struct, frozen=True):
    """A checkpoint of the demo's task that is compared, and the reason."""

    iteration: int
    path: str
    why: str


def saved_states(stage: Stage, player: Player) -> list[SavedState]:
    """The first checkpoint after each fault, and the last one."""
    num_reported = len(stage.losses(player.task))
    paths = {
        record["body"]["step_version"]: record["body"]["path"]
        for record in stage.all("CheckpointSaved", task=player.task)
        if record["body"]["step_version"] <= num_reported
    }
    why: dict[int, list[str]] = {}
    for number, struck in enumerate(stage.faults, 1):
        after = [at for at in paths if at > struck.get(player.task, math.inf)]
        stage.promise(
            bool(after) or player.task not in struck,
            f"{player.name}'s state was saved after fault {number}",
        )
        if after:
            why.setdefault(min(after), []).append(f"fault {number}")
    if paths:
        why.setdefault(max(paths), [])
    return [
        SavedState(
            iteration=at,
            path=str(Path(player.train.output) / paths[at]),
            why=f"after {' and '.join(faults)}" if faults else "the last",
        )
        for at, faults in sorted(why.items())
    ]


def _orders(player: Player) -> tuple[str, ...]:
    """The orders of summing in which the task's reference runs train."""
    return ORDERS if player.train.reproducible == "rounding" else ORDERS[:1]


class ReferenceRuns:
    """Starts the reference runs and compares. Call `run`, and `stop` in any case."""

    def __init__(self, stage: Stage, players: list[Player]) -> None:
        self._stage, self._players = stage, players
        self._folder = stage.state.path / "reference"
        self._folder.mkdir()
        self._states = {player.task: saved_states(stage, player) for player in players}
        self._jobs = [
            self._training(player, order)
            for player in players
            for order in range(len(_orders(player)))
        ]
        self._jobs += [self._comparison(player) for player in players]

    def _training(self, player: Player, order: int) -> Job:
        """The training of as many iterations as the task has done, without faults."""
        name = f"{player.name}{ORDERS[order]}"
        out = self._folder / name
        out.mkdir()
        spec = out / "spec.json"
        spec.write_text(json.dumps(msgspec.to_builtins(player.spec, str_keys=True)))
        return Job(
            name=name,
            arguments=[
                "--spec",
                str(spec),
                "--out",
                str(out),
                "--order",
                str(order),
                "--iterations",
                str(len(self._stage.losses(player.task))),
                "--keep",
                *(str(state.iteration) for state in self._states[player.task]),
            ],
        )

    def _comparison(self, player: Player) -> Job:
        """The comparison of each checkpoint, and of the other orders, with the first order."""
        runs = [f"{player.name}{end}" for end in _orders(player)]
        ones: list[str] = []
        others: list[str] = []
        for state in self._states[player.task]:
            first, *rest = (str(state_folder(self._folder / run, state.iteration)) for run in runs)
            ones += [state.path, *rest]
            others += [first] * len(runs)
        return Job(
            name=f"{player.name}-{COMPARISON}",
            needs=tuple(runs),
            arguments=["--compare", *ones, "--to", *others] if ones else [],
        )

    def run(self) -> None:
        """Train, compare, judge. Raises BrokenError."""
        began_s = said_s = changed_s = time.monotonic()
        num_bytes, said = 0, ""
        while True:
            done = all(job.is_done for job in self._jobs)
            self._start_next()  # raises BrokenError if a run failed, also the last
            if done:
                break
            time.sleep(LOOK_S)
            printed_bytes = sum(file.stat().st_size for file in self._folder.glob("*.jsonl"))
            if printed_bytes != num_bytes:
                num_bytes, changed_s = printed_bytes, time.monotonic()
            if time.monotonic() - changed_s > STALLED_S_MAX:
                raise BrokenError(f"no reference run went on for {span(STALLED_S_MAX)}")
            if time.monotonic() - said_s > PROGRESS_S and changed_s > said_s:
                said_s, before = time.monotonic(), said
                said = "reference runs: " + ", ".join(
                    f"{job.name} {len(self._losses(job.name))}"
                    for job in self._jobs
                    if job.process is not None and not job.needs
                )
                if said != before:
                    self._stage.say("compare", said)
        runs = number_of(len(_orders(self._players[0])), "reference run")
        self._stage.say(
            "compare",
            f"with {runs} of each task: undisturbed, "
            "same seed, one process, stock Megatron loop: "
            f"{span(time.monotonic() - began_s)} in all",
        )
        self._judge()

    def stop(self) -> None:
        """Kill the running processes."""
        for job in self._jobs:
            if job.process is not None:
                if job.is_running:
                    job.process.kill()
                job.process.wait()

    def _start_next(self) -> None:
        done = [job.name for job in self._jobs if job.is_done]
        for job in self._jobs:
            if job.process is not None and job.process.poll():
                raise BrokenError(f"the reference run {job.name} failed, see {self._folder}")
            is_free = sum(one.is_running for one in self._jobs) < NUM_TOGETHER
            if job.process is None and is_free and all(name in done for name in job.needs):
                with (
                    (self._folder / f"{job.name}.jsonl").open("wb") as out,
                    (self._folder / f"{job.name}.log").open("wb") as log,
                ):
                    job.process = subprocess.Popen(
                        [sys.executable, "-P", reference.__file__, *job.arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=log,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )

    def _lines(self, name: str) -> list[Plain]:
        text = (self._folder / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self._lines(name) if "loss" in line]

    def _judge(self) -> None:
        rows: list[list[str]] = []
        for player in self._players:
            for what, ours, *noises in self._differences(player):
                most = tolerance(noises) if noises else 0.0
                equal = ours <= most
                rows.append(
                    [
                        player.name,
                        what,
                        f"{ours:.1e}",
                        f"{max(noises, default=0.0):.1e}",
                        f"{most:.1e}",
                        "EQUAL" if equal else "NOT EQUAL",
                    ]
                )
                self._stage.promise(equal, f"{player.name}'s {what} equal the reference run's")
        stage = self._stage
        for line in table(("", "", "OURS", "NOISE", "TOLERANCE", "VERDICT"), rows, right=(2, 3, 4)):
            stage.note(None, line)
        stage.note(
            None,
            "ours: the largest relative difference of a loss; of all parameters as "
            "one vector; of Adam's moments, the larger",
        )
        if all(len(_orders(player)) == 1 for player in self._players):
            stage.note(None, "tolerance: none, as all sums are exact")
            return
        stage.note(
            None,
            f"noise: the largest difference between {len(ORDERS)} reference runs that "
            "sum the micro-batches in different orders",
        )
        stage.note(
            None,
            f"tolerance: {NOISE_TIMES_MAX:g} x the noise, which counts as at least "
            f"one rounding of float32 ({ROUNDING_RATIO:.1e})",
        )

    def _differences(self, player: Player) -> list[tuple[Any, ...]]:
        """For each compared item: its name, the difference of the demo's task from the first order,
        and the differences of the other orders."""
        first, *others = (self._losses(f"{player.name}{end}") for end in _orders(player))
        losses = self._stage.losses(player.task)
        found: list[tuple[Any, ...]] = [
            (
                f"{len(losses)} losses",
                _gap([losses[at] for at in sorted(losses)], first),
                *(_gap(other, first) for other in others),
            )
        ]
        lines = iter(self._lines(f"{player.name}-{COMPARISON}"))
        for state in self._states[player.task]:
            gaps = [next(lines) for _ in _orders(player)]
            for name, key in (("parameters", "param_rel"), ("optimizer", "optimizer_rel")):
                found.append(
                    (f"{name} at {state.iteration}, {state.why}", *(gap[key] for gap in gaps))
                )
        return found


def _gap(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two losses; infinite if one is missing or NaN."""
    if len(ours) != len(theirs) or not ours:
        return math.inf
    gaps = [abs(mine - their) / abs(their) for mine, their in zip(ours, theirs, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)
