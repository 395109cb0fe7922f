"""`make megatron-lm DIR=...`: Megatron-LM's own script under agents, ranks killed in each layout.

Metrics: `loss_equal` (1: every printed loss is that of Megatron-LM's own loop over one replica, to
its last digit but one), `iterations_lost`, `fault_to_step_s` (from the kill to the end of the next
step). In a round trip Megatron-LM's own loop saves, agents load, heal three faults at random
moments and save, and its own loop loads: `loss_equal` is that of all three. The mandatory cell is a
round trip of the usual job; there losses, masters and moments are equal within 3 x the worst of
three orders of summing. In bitwise cases `loss_equal` is 1 and `tensors_differing` 0 if each tensor
of the last state has the bits of a run without faults on the fewest ranks. It prints a table.
Rows: build/bench/megatron_lm.json.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from importlib import util
from pathlib import Path

import megatron_trial
from bench.recovery.main import interrupt
from bench.recovery.rows import Row, finish, row
from megatron_trial import BITWISE, CASES, EXACT_TRIP, MANDATORY, TRIP
from real_cluster import running

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "unicron"
PACKAGES = ("triton", "pybind11", "six", "regex", "psutil")
"""What Megatron-LM needs beside torch. Without psutil its own loop waits for ever when it saves."""
ROUND_TRIP = "TP 2 x DP 2, round trip"
MANDATORY_CELL = "TP 2 x PP 2 x DP 2, usual job, round trip"


def main() -> None:
    """Run each case `n` times; write the rows and the stamp."""
    parser = argparse.ArgumentParser(prog="make megatron-lm")
    parser.add_argument("clone", type=Path, help="a clone of Megatron-LM")
    parser.add_argument("-n", type=int, default=1)
    parser.add_argument("--mandatory", action="store_true", help="the mandatory cell alone")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(1000),
        help="of the moments of the round trips' faults",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "megatron_lm.json")
    options = parser.parse_args()
    if not (options.clone / "pretrain_gpt.py").is_file():
        parser.error(f"{options.clone} has no pretrain_gpt.py: DIR names a clone of Megatron-LM")
    if absent := [name for name in PACKAGES if util.find_spec(name) is None]:
        parser.error(
            f"Megatron-LM needs {' '.join(absent)}: "
            f"{sys.executable} -m pip install {' '.join(absent)}"
        )
    signal.signal(signal.SIGTERM, interrupt)  # the cluster is ended, too
    began_s, draw = time.monotonic(), random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    rows = [] if options.mandatory else _small_cells(options.clone, options.n, draw)
    finish(
        [*rows, *_mandatory_cell(options.clone, draw)], options.out, began_s, (), seed=options.seed
    )


def _small_cells(clone: Path, num: int, draw: random.Random) -> list[Row]:
    """All cells but the mandatory one, on a cluster of four slots."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "cluster") as cluster:
        for name, case in CASES.items():
            expected = megatron_trial.stock(clone, case)
            trials = [
                megatron_trial.struck(cluster, clone, case, Path(folder) / "out")
                for _ in range(num)
            ]
            rows += _rows(
                name,
                trials,
                [not megatron_trial.unequal(expected, trial.lines) for trial in trials],
            )
            print(f"{name}: done", flush=True)
        trips = [
            megatron_trial.round_trip(cluster, clone, TRIP, Path(folder) / f"trip-{n}", draw)
            for n in range(num)
        ]
        expected = megatron_trial.stock(clone, TRIP)
        rows += _rows(
            ROUND_TRIP, trips, [not megatron_trial.unequal(expected, trip.lines) for trip in trips]
        )
        print(f"{ROUND_TRIP}: done", flush=True)
        for name, case in BITWISE.items():
            rows += _bits(
                f"{name}, bitwise",
                *megatron_trial.bits_of(cluster, clone, case, Path(folder) / name),
            )
        rows += _bits(
            f"{ROUND_TRIP}, bitwise",
            *megatron_trial.bits_of_round_trip(
                cluster, clone, EXACT_TRIP, Path(folder) / "bits", draw
            ),
        )
    return rows


def _mandatory_cell(clone: Path, draw: random.Random) -> list[Row]:
    """The cell of the usual job, on eight slots."""
    with tempfile.TemporaryDirectory() as folder:
        with running(Path(folder) / "cluster", 4) as cluster:
            trip = megatron_trial.round_trip(cluster, clone, MANDATORY, Path(folder), draw)
        found = megatron_trial.compared(clone, MANDATORY, Path(folder) / "orders", trip)
    print(found.table(), flush=True)
    return _rows(MANDATORY_CELL, [trip], [found.equal])


def _bits(name: str, healed: megatron_trial.Healed, differing: list[str]) -> list[Row]:
    print(f"{name}: {len(differing)} tensors differ", flush=True)
    return [
        row(name, SYSTEM, "tensors_differing", [float(len(differing))], ""),
        *_rows(name, [healed], [not differing]),
    ]


def _rows(name: str, trials: list[megatron_trial.Healed], equal: list[bool]) -> list[Row]:
    return [
        row(name, SYSTEM, "loss_equal", list(map(float, equal)), ""),
        row(
            name, SYSTEM, "iterations_lost", [float(trial.iterations_lost) for trial in trials], ""
        ),
        row(
            name,
            SYSTEM,
            "fault_to_step_s",
            [took_s for trial in trials for took_s in trial.fault_to_step_s],
            "s",
        ),
    ]


if __name__ == "__main__":
    main()
