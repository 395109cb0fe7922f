"""Rounds: each launches every system and injects the faults; then the rows of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.recovery import bare_torch
from bench.recovery import phases as parts
from bench.recovery.bare_torch import Floor
from bench.recovery.peers import Bare, made
from bench.recovery.rows import Row, row
from bench.recovery.trial import (
    RECOVER_S_MAX,
    NotStarted,
    Reference,
    System,
    Trial,
    reported_losses,
    strike,
)
from bench.recovery.unicron import Unicron

TWIN_NUM = 70
"""Iterations of the reference run; later losses are not compared."""
TWIN_STILL_S_MAX = 120.0
METRICS = (
    ("fault_to_step_s", "s"),
    ("recompute_s", "s"),
    ("iterations_lost", "iterations"),
    ("batch_kept", "0 or 1"),
    ("loss_equal", "0 or 1"),
    ("loss_rel", "ratio"),
    ("processes_restarted", "processes"),
    ("iteration_s", "s"),
)


class Taken(NamedTuple):
    """The phases of one recovery of Unicron, and its usual time of reduction and step."""

    phases: dict[str, float]
    step_ms: float | None


class Rounds:
    """All faults for all systems, in turn."""

    def __init__(
        self,
        folder: Path,
        systems: Sequence[str],
        cases: Sequence[str],
        absent: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """`absent`: the systems that cannot be started, and why."""
        self._folder, self._systems, self._cases, self._say = folder, systems, cases, say
        self._trials: list[Trial] = []
        self._taken: list[Taken] = []
        self._twin = Reference([])
        self._absent = absent
        self._floors = [Floor(folder, case, say) for case in cases if case in bare_torch.LAYOUTS]

    def run(self, num: int, has_time: Callable[[str], bool]) -> None:
        """Run `num` rounds, as long as `has_time` says so."""
        self._say("the undisturbed twin")
        self._twin = Reference(train_twin(self._folder / "twin", TWIN_NUM))
        for number in range(1, num + 1):
            if not has_time(f"round {number} of {num}"):
                break
            # Another order in each round, so that no system always follows the same one.
            turn = (number - 1) % len(self._systems)
            for name in (*self._systems[turn:], *self._systems[:turn]):
                if name == bare_torch.NAME:
                    for floor in self._floors:
                        floor.measure()
                elif name not in self._absent:
                    self._struck(name, number)

    def _struck(self, name: str, number: int) -> None:
        """Run all cases. A system that returns to full strength needs only one launch."""
        waiting = list(self._cases)
        while waiting:
            system = made(name, self._folder / f"{name}-{number}-{len(waiting)}")
            try:
                system.start()
                while waiting:
                    stays = system.comes_back(waiting[0])
                    trial = strike(system, waiting[0], self._twin, stays=stays)
                    waiting.pop(0)
                    self._add(trial, system, number)
                    if not stays or trial.step is None:
                        break
            except NotStarted as error:
                self._say(f"round {number}: {name} {error}")
                self._trials.append(Trial(waiting.pop(0), name, 0.0, 0, 0.0, why=str(error)))
            finally:
                system.stop()

    def _add(self, trial: Trial, system: System, number: int) -> None:
        self._trials.append(trial)
        took = (
            trial.why
            or f"{trial.fault_to_step_s:.3f} s and {trial.recompute_s:.3f} s of "
            f"micro-batches, {trial.iterations_lost:.0f} iterations lost"
        )
        self._say(f"round {number}: {trial.system} {trial.case} {took}")
        if isinstance(system, Unicron) and trial.case == "dp4_sigkill" and trial.step:
            lines = system.watch.lines
            self._taken.append(
                Taken(
                    parts.phases(system.look(), lines, trial),
                    parts.usual_step_ms(lines, trial.struck_s),
                )
            )

    # --- what came of it ------------------------------------------------------------------------
    def rows(self, breakdown: bool) -> list[Row]:
        """The rows of all systems. If a system is absent or does not recover, a note says so."""
        found: list[Row] = []
        for case in self._cases:
            for name in self._systems:
                trials = [one for one in self._trials if (one.case, one.system) == (case, name)]
                if name in self._absent:
                    why = self._absent[name]
                    found.append(Row(case, name, "recovered", None, "trials", 0, why))
                elif trials:
                    found += rows_of(case, name, trials)
            found += [row for floor in self._floors if floor.case == case for row in floor.rows()]
        if breakdown and self._taken:
            found += parts.rows(
                [one.phases for one in self._taken],
                [one.step_ms for one in self._taken],
                [one for floor in self._floors for one in floor.times],
            )
        return found


def train_twin(folder: Path, num: int, size: str = "1M") -> list[float]:
    """The losses of at least `num` iterations of the loop in bare Megatron. Raises NotStarted."""
    return train_undisturbed(Bare(folder, size=size, traced=False), num)


def train_undisturbed(system: System, num: int) -> list[float]:
    """The losses of at least `num` iterations without a fault; fewer if none comes for
    TWIN_STILL_S_MAX. Raises NotStarted."""
    try:
        system.start()
        losses = reported_losses(system, range(num), TWIN_STILL_S_MAX)
        if why := system.tend():
            raise NotStarted(f"the twin: {why}")
    finally:
        system.stop()
    return [losses[index] for index in sorted(losses)]


def rows_of(case: str, name: str, trials: Sequence[Trial]) -> list[Row]:
    """The number of a system's trials that recovered, None if none was struck; and each metric."""
    healed = [one for one in trials if one.step is not None]
    struck = any(one.iteration_s for one in trials)
    whys = sorted({one.why for one in trials if one.why})
    note = f"{len(healed)} of {len(trials)} recovered in {RECOVER_S_MAX:.0f} s" + (
        f": {'; '.join(whys)}" if whys else ""
    )
    value = float(len(healed)) if struck else None
    rows = [Row(case, name, "recovered", value, "trials", len(trials), note)]
    for metric, unit in METRICS:
        values = [getattr(one, metric) for one in trials if one.iteration_s]
        rows.append(row(case, name, metric, values, unit))
    return rows
