"""`make bench-settlement`: what a settlement costs one rank and the control plane, by ranks.

The printed results are also written to build/bench/settlement.json. docs/guides/bench-settlement.md
describes the scenes and has the results of one run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.recovery.rows import Row, finish, row
from bench.settlement import control_plane, ranks

ROOT = Path(__file__).resolve().parents[3]
CASES = {"ranks_64": 64, "ranks_256": 256, "ranks_1024": 1024}
NUM_SHARDS = 2000
GROWTH = (1000, 2000, 4000)
SYSTEM = "unicron"
GOALS = {
    "metadata_bytes": 1e6,
    "settle_cpu_s": 0.5,
    "control_plane_s": 1.0,
    "cpu_growth_per_doubling": 2.0,
}
UNITS = {
    "metadata_bytes": "B",
    "settle_cpu_s": "s",
    "store_sent_bytes": "B",
    "control_plane_s": "s",
    "cpu_growth_per_doubling": "x",
}
GOAL_CASE = "ranks_1024"


def main() -> None:
    """Measure, compare with the goals."""
    parser = argparse.ArgumentParser(prog="make bench-settlement")
    parser.add_argument("-n", type=int, default=3, help="trials of each case")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "settlement.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    began_s, rows = time.monotonic(), list[Row]()
    try:
        for case in options.cases:
            rows += measured(case, options.n)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finish(rows, options.out, began_s, held_to(rows), rounds=options.n)


def measured(case: str, num: int) -> list[Row]:
    """The rows of a case: of both scenes and of several members, the worst."""
    num_ranks = CASES[case]
    found: dict[str, list[float]] = {}
    worst: dict[int, list[float]] = {}
    for num_shards in GROWTH:
        worlds = [ranks.World(scene) for scene in ranks.scenes(num_ranks, num_shards).values()]
        for _ in range(num):
            costs = [world.cost(place) for world in worlds for place in (0, num_ranks // 2)]
            worst.setdefault(num_shards, []).append(max(cost.cpu_s for cost in costs))
            if num_shards != NUM_SHARDS:
                continue
            found.setdefault("metadata_bytes", []).append(
                max(cost.metadata_bytes for cost in costs)
            )
            found.setdefault("settle_cpu_s", []).append(worst[num_shards][-1])
            found.setdefault("store_sent_bytes", []).append(
                max(cost.read_bytes for cost in costs) * num_ranks
            )
            found.setdefault("control_plane_s", []).append(control_plane.transition_s(num_ranks))
        print(f"{case}  {num_shards} shards a rank: {min(worst[num_shards]):.3f} CPU s", flush=True)
    doublings = math.log2(GROWTH[-1] / GROWTH[0])
    found["cpu_growth_per_doubling"] = [
        (most / least) ** (1 / doublings)
        for least, most in zip(worst[GROWTH[0]], worst[GROWTH[-1]], strict=True)
    ]
    return [row(case, SYSTEM, metric, found[metric], unit) for metric, unit in UNITS.items()]


def held_to(rows: Sequence[Row]) -> list[str]:
    """The goals at the largest size."""
    return [
        f"{'holds ' if one.value <= GOALS[one.metric] else 'misses'}  {one.case}, "
        f"{one.metric}: {one.value:.3g}, goal at most {GOALS[one.metric]:g}"
        for one in rows
        if one.case == GOAL_CASE and one.metric in GOALS and one.value is not None
    ]


if __name__ == "__main__":
    main()
