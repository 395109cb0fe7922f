"""`make megatron-lm DIR=...`: Megatron-LM's own script under agents, a rank killed in each layout.

Metrics: `loss_equal` (1: every printed loss is that of Megatron-LM's own loop over one replica, to
its last digit but one), `iterations_lost`, `fault_to_step_s` (from the kill to the end of the step
that it struck). In a round trip Megatron-LM's own loop saves, agents load, heal and save, and its
own loop loads: `loss_equal` is that of all three. Rows: build/bench/megatron_lm.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import megatron_trial
from bench.recovery.rows import Row, finish, row
from megatron_trial import CASES, DEFAULTS, DEFAULTS_TRIP, TRIP
from real_cluster import running

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "unicron"
USUAL_JOB = "TP 2 x PP 2 x DP 2, usual job"
ROUND_TRIP = ", round trip"


def main() -> None:
    """Run each case `n` times; write the rows and the stamp."""
    parser = argparse.ArgumentParser(prog="make megatron-lm")
    parser.add_argument("clone", type=Path, help="a clone of Megatron-LM")
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "megatron_lm.json")
    options = parser.parse_args()
    if not (options.clone / "pretrain_gpt.py").is_file():
        parser.error(f"{options.clone} has no pretrain_gpt.py: DIR names a clone of Megatron-LM")
    began_s, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "cluster") as cluster:
        for name, case in CASES.items():
            expected = megatron_trial.stock(options.clone, case)
            trials = [megatron_trial.struck(cluster, options.clone, case, Path(folder) / "out")
                      for _ in range(options.n)]
            rows += _rows(name, expected, trials)
            print(f"{name}: done", flush=True)
        trips = [megatron_trial.round_trip(cluster, options.clone, TRIP, Path(folder) / f"trip-{n}")
                 for n in range(options.n)]
        rows += _rows(f"TP 2 x DP 2{ROUND_TRIP}", megatron_trial.stock(options.clone, TRIP), trips)
    expected = megatron_trial.stock(options.clone, DEFAULTS)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "cluster", 4) as cluster:
        trial = megatron_trial.struck(cluster, options.clone, DEFAULTS, Path(folder) / "out")
        rows += _usual(USUAL_JOB, expected, trial)
        trip = megatron_trial.round_trip(cluster, options.clone, DEFAULTS_TRIP,
                                         Path(folder) / "trip")
        rows += _usual(USUAL_JOB + ROUND_TRIP, expected, trip)
    finish(rows, options.out, began_s, ())


def _rows(name: str, expected: megatron_trial.Lines, trials: list[megatron_trial.Healed]
          ) -> list[Row]:
    equal = [float(not megatron_trial.unequal(expected, trial.lines)) for trial in trials]
    return [row(name, SYSTEM, "loss_equal", equal, ""),
            row(name, SYSTEM, "iterations_lost",
                [float(trial.iterations_lost) for trial in trials], ""),
            row(name, SYSTEM, "fault_to_step_s",
                [took_s for trial in trials for took_s in trial.fault_to_step_s], "s")]


def _usual(name: str, expected: megatron_trial.Lines, trial: megatron_trial.Healed) -> list[Row]:
    """In 16 bits the replicas round in other places than a single one does: the largest difference
    of a printed loss, in place of `loss_equal`."""
    gaps = [megatron_trial.loss_rel(line, trial.lines[place]) for place, line in expected.items()]
    return [row(name, SYSTEM, "loss_rel", [max(gaps)], "ratio"),
            row(name, SYSTEM, "iterations_lost", [float(trial.iterations_lost)], ""),
            row(name, SYSTEM, "fault_to_step_s", trial.fault_to_step_s, "s")]


if __name__ == "__main__":
    main()
