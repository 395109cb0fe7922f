"""`make bench-planner`: planning problems solved by Unicron and by common solvers.

The systems take turns; each trial is a separate process. The printed results are also written to
build/bench/planner.json. docs/guides/bench-planner.md describes what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.planner import solvers as environment
from bench.recovery.rows import Row, finish, row

ROOT = Path(__file__).resolve().parents[3]
CASES = ("6x128", "100x4096", "1000x100000")
PEERS = ("glpk_mi", "highs", "cp_sat")
SYSTEMS = ("unicron", *PEERS, "plain_dp")
METRICS = {"plan_ms": "ms", "explained_ms": "ms", "objective": "G"}
"""plan_ms: the bare solver. explained_ms: what production runs, with alternatives."""
GOALS_MS = {"6x128": 2.0, "100x4096": 10.0, "1000x100000": 150.0}
GOALS_TIMES = {"100x4096": 10.0, "1000x100000": 30.0}
EXPLAINED_TIMES = 3.0
"""Limit of explained_ms over plan_ms."""
GAP_RATIO = 1e-4
"""HiGHS accepts a plan within this gap of its bound; the other solvers are exact."""
START_S_MAX = 60.0
Told = dict[str, Any]


def main() -> None:
    """Build the environment, measure, compare."""
    parser = argparse.ArgumentParser(prog="make bench-planner")
    parser.add_argument("-n", type=int, default=5, help="rounds; each has its own instances")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a solver may take")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "planner.json")
    args = parser.parse_args()
    if args.n < 1:
        parser.error("-n must be at least 1")
    environment.ensure()
    began_s = time.monotonic()
    rows: list[Row] = []
    try:
        for case in args.cases:
            told = measured(case, args.systems, args.n, args.limit)
            rows += rows_of(case, told, args.limit)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finish(rows, args.out, began_s, held_to(rows), versions=environment.versions(), rounds=args.n)


def measured(case: str, systems: Sequence[str], num: int, limit_s: float) -> dict[str, list[Told]]:
    """By system, one trial per round. A system that exceeds the limit is not run again."""
    told: dict[str, list[Told]] = {system: [] for system in systems}
    for seed in range(num):
        for system in systems:
            if any(one.get("late") for one in told[system]):
                continue
            one = trial(system, case, seed, limit_s)
            told[system].append(one)
            said = "late" if one.get("late") else f"{one['plan_ms']:.2f} ms"
            print(f"{case}  round {seed + 1}  {system:<9} {said}", flush=True)
    return told


def trial(system: str, case: str, seed: int, limit_s: float) -> Told:
    """One solve in a separate process. Raises RuntimeError (last line of stderr) on failure."""
    try:
        done = subprocess.run(
            [
                str(environment.PYTHON),
                "-P",
                "-m",
                "bench.planner.trial",
                system,
                case,
                str(seed),
                str(limit_s),
            ],
            env=environment.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=3 * limit_s + START_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return {"late": True}
    if done.returncode:
        raise RuntimeError(f"{system} on {case}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(case: str, told: dict[str, list[Told]], limit_s: float) -> list[Row]:
    """The medians of a case. The note of plan_ms compares the objective values with Unicron's."""
    ours = [one["objective"] for one in told.get("unicron", [])]
    rows: list[Row] = []
    for system, trials in told.items():
        late = any(one.get("late") for one in trials)
        there = [one for one in trials if not one.get("late")]
        note = (
            f"not within {limit_s:g} s"
            if late
            else compared(ours, [one["objective"] for one in there], system)
        )
        for metric, unit in METRICS.items():
            values = [one[metric] for one in there if metric in one]
            if values or metric == "plan_ms":
                rows.append(
                    row(
                        case,
                        system,
                        metric,
                        [] if late else values,
                        unit,
                        note if metric == "plan_ms" else "",
                    )
                )
    return rows


def compared(ours: Sequence[int], its: Sequence[int], system: str) -> str:
    """The objective values of a system against Unicron's, instance by instance, in words."""
    pairs = list(zip(ours, its, strict=False))
    if not pairs or system == "unicron":
        return ""
    if any(other > mine for mine, other in pairs):
        return "BROKEN: a plan of it is worth more than ours"
    worse = max((mine - other) / mine for mine, other in pairs)
    if worse == 0:
        return "objectives equal to ours, to the last digit"
    return (
        f"up to {100 * worse:.2g} % below ours"
        if worse <= GAP_RATIO
        else f"BROKEN: {100 * worse:.2g} % below ours"
    )


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each measured value beside its goal."""
    found = {(one.case, one.system, one.metric): one.value for one in rows}
    lines: list[str] = []

    def goal(text: str, value: float, wanted: float, *, at_least: bool = False) -> None:
        holds = value >= wanted if at_least else value <= wanted
        lines.append(
            f"{'holds ' if holds else 'misses'}  {text}: {value:.4g}, goal "
            f"{'at least' if at_least else 'at most'} {wanted:g}"
        )

    for case in dict.fromkeys(one.case for one in rows):
        plan_ms = found.get((case, "unicron", "plan_ms"))
        if plan_ms is None:
            continue
        goal(f"{case} plan_ms (the bare solver)", plan_ms, GOALS_MS[case])
        explained_ms = found.get((case, "unicron", "explained_ms"))
        if explained_ms is not None:
            goal(
                f"{case} explained_ms (what production runs) over plan_ms",
                explained_ms / plan_ms,
                EXPLAINED_TIMES,
            )
        peers = {
            peer: value
            for peer in PEERS
            if (value := found.get((case, peer, "plan_ms"))) is not None
        }
        if peers:
            fastest = min(peers, key=lambda peer: peers[peer])
            times, wanted = peers[fastest] / plan_ms, GOALS_TIMES.get(case)
            if wanted is not None:
                goal(
                    f"{case} {fastest}, the fastest peer, over unicron",
                    times,
                    wanted,
                    at_least=True,
                )
            else:
                lines.append(
                    f"        {case} {fastest}, the fastest peer, over unicron: {times:.4g}"
                )
    lines += [
        f"{one.case} {one.system} {one.note}" for one in rows if one.note.startswith("BROKEN")
    ]
    return lines


if __name__ == "__main__":
    main()
