"""`make bench-sim`: simulation speed on clusters of four sizes, by policy, and its growth.

Each trial is a separate process. The printed results are also written to build/bench/sim.json.
docs/guides/simulate.md has the results of one run and describes the scenarios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row, finish, row
from bench.simulator.cluster import CASES, POLICIES, scenario

ROOT = Path(__file__).resolve().parents[3]
UNICRON = Path(sys.executable).parent / "unicron"
METRICS = {"events_per_s": "1/s", "cpu_s": "s", "events": "1", "faults": "1", "peak_mib": "MiB"}
WHOLE = "all, the command"
GOAL_CASE, GOAL_S = "10000", 60.0
TRIAL_S_MAX = 3600.0
Told = dict[str, Any]


def main() -> None:
    """Measure, compare with the goal."""
    parser = argparse.ArgumentParser(prog="make bench-sim")
    parser.add_argument("-n", type=int, default=1, help="rounds")
    parser.add_argument("--systems", nargs="*", choices=POLICIES, default=POLICIES)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "sim.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    began_s, rows = time.monotonic(), list[Row]()
    try:
        for case in options.cases:
            rows += measured(case, options.systems, options.n, ROOT / "build" / "bench-sim")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finish(rows, options.out, began_s, [*growth(rows), *held_to(rows)], rounds=options.n)


def measured(case: str, systems: Sequence[str], num: int, folder: Path) -> list[Row]:
    """The rows of each policy alone, and one row for the command with all policies."""
    told: dict[str, list[Told]] = {system: [] for system in systems}
    whole: list[float] = []
    for _ in range(num):
        for system in systems:
            one = json.loads(
                _ran(sys.executable, "-P", "-m", "bench.simulator.trial", case, system)
            )
            told[system].append(one)
            print(
                f"{case:>7} GPUs  {system:<9} {one['events']} events in {one['cpu_s']:.2f} s, "
                f"{one['events_per_s']:.0f} a second, {one['peak_mib']:.0f} MiB",
                flush=True,
            )
        file = folder / f"sim-{case}.json"  # JSON is YAML
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(scenario(case, systems)))
        began_s = time.perf_counter()
        _ran(str(UNICRON), "simulate", "--scenario", str(file), "-o", "json")
        whole.append(time.perf_counter() - began_s)
        print(f"{case:>7} GPUs  {WHOLE} in {whole[-1]:.2f} s", flush=True)
    rows = [
        row(case, system, metric, [one[metric] for one in ones], unit)
        for system, ones in told.items()
        for metric, unit in METRICS.items()
    ]
    return [*rows, row(case, WHOLE, "wall_s", whole, "s")]


def _ran(*words: str) -> str:
    """The output of a command. Raises RuntimeError with the last line of stderr on failure."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TRIAL_S_MAX)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def growth(rows: Sequence[Row]) -> list[str]:
    """How the event rate changes from each size to the next."""
    found = {(one.case, one.system): one.value for one in rows if one.metric == "events_per_s"}
    systems = dict.fromkeys(system for _, system in found)
    lines: list[str] = []
    for less, more in pairwise(dict.fromkeys(case for case, _ in found)):
        told = [
            f"{system} {found[more, system] / found[less, system]:.2f} x"
            for system in systems
            if found.get((less, system)) and found.get((more, system))
        ]
        lines.append(f"grows   events/s from {less} to {more} GPUs: {', '.join(told)}")
    return lines


def held_to(rows: Sequence[Row]) -> list[str]:
    """The goal for each policy: CPU seconds of a year of 10,000 GPUs."""
    found = [
        (one.system, one.value)
        for one in rows
        if (one.case, one.metric) == (GOAL_CASE, "cpu_s") and one.value is not None
    ]
    return [
        f"{'holds ' if value <= GOAL_S else 'misses'}  {GOAL_CASE} GPUs, a year, {system}: "
        f"{value:.3g} CPU s, goal at most {GOAL_S:g}"
        for system, value in found
    ]


if __name__ == "__main__":
    main()
