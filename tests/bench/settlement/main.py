"""`make bench-settlement`: what a settlement costs rank, store and control plane, by ranks.

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
from bench.settlement.crowd import allow_files, crowd_of

ROOT = Path(__file__).resolve().parents[3]
CASES = {"ranks_64": 64, "ranks_256": 256, "ranks_1024": 1024, "ranks_4096": 4096}
NUM_SHARDS = 2000
GROWTH = (1000, 2000, 4000)
SYSTEM = "unicron"
GOALS = {
    "metadata_bytes": 1e6,
    "settle_cpu_s": 0.5,
    "control_plane_s": 1.0,
    "cpu_growth_per_doubling": 2.1,
}
UNITS = {
    "store_requests_a_rank": "1",
    "store_bytes_a_rank": "B",
    "store_s": "s",
    "store_cpu_s": "s",
    "metadata_bytes": "B",
    "settle_cpu_s": "s",
    "control_plane_s": "s",
    "order_bytes": "B",
    "cpu_growth_per_doubling": "x",
}
GOAL_CASE = "ranks_1024"
SAME_REQUESTS = 1.1
"""By how much the requests a rank may differ between the smallest and the largest case."""


def main() -> None:
    """Measure, compare with the goals."""
    parser = argparse.ArgumentParser(prog="make bench-settlement")
    parser.add_argument("-n", type=int, default=3, help="trials of each case")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "settlement.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    if why := allow_files(max((CASES[case] for case in options.cases), default=0)):
        sys.exit(f"{why}: raise it, or choose smaller CASES")
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
    found: dict[str, list[float]] = {metric: [] for metric in UNITS}
    worst: dict[int, list[float]] = {}
    for num_shards in GROWTH:
        worlds = [ranks.World(scene) for scene in ranks.scenes(num_ranks, num_shards).values()]
        for _ in range(num):
            places = ranks.measured_places(num_ranks)
            costs = [world.cost(place)[0] for world in worlds for place in places]
            worst.setdefault(num_shards, []).append(max(cost.cpu_s for cost in costs))
            if num_shards != NUM_SHARDS:
                continue
            found["metadata_bytes"].append(max(cost.metadata_bytes for cost in costs))
            found["settle_cpu_s"].append(worst[num_shards][-1])
            crowds = [crowd_of(world) for world in worlds]
            found["store_requests_a_rank"].append(max(each.num_requests for each in crowds))
            found["store_bytes_a_rank"].append(max(each.bytes_a_rank for each in crowds))
            found["store_s"].append(max(each.wall_s for each in crowds))
            found["store_cpu_s"].append(max(each.server_cpu_s for each in crowds))
            decided = control_plane.transition(num_ranks)
            found["control_plane_s"].append(decided.cpu_s)
            found["order_bytes"].append(decided.order_bytes)
        print(f"{case}  {num_shards} shards a rank: {min(worst[num_shards]):.3f} CPU s", flush=True)
    doublings = math.log2(GROWTH[-1] / GROWTH[0])
    found["cpu_growth_per_doubling"] = [
        (most / least) ** (1 / doublings)
        for least, most in zip(worst[GROWTH[0]], worst[GROWTH[-1]], strict=True)
    ]
    return [row(case, SYSTEM, metric, found[metric], unit) for metric, unit in UNITS.items()]


def held_to(rows: Sequence[Row]) -> list[str]:
    """The goals: at one size, and of the requests a rank over all sizes."""
    lines = [
        _verdict(one.value, GOALS[one.metric], f"{one.case}, {one.metric}")
        for one in rows
        if one.case == GOAL_CASE and one.metric in GOALS and one.value is not None
    ]
    requests = [
        one.value for one in rows if one.metric == "store_requests_a_rank" and one.value is not None
    ]
    if len(requests) > 1:
        growth = max(requests) / min(requests)
        lines.append(_verdict(growth, SAME_REQUESTS, "store_requests_a_rank, most over least"))
    return lines


def _verdict(value: float, goal: float, what: str) -> str:
    word = "holds " if value <= goal else "misses"
    return f"{word}  {what}: {value:.3g}, goal at most {goal:g}"


if __name__ == "__main__":
    main()
