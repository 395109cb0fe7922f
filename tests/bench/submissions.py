"""`make bench-submissions`: four clients submit 200 tasks of one shape to a real cluster at once.

The time of each answer, over all clients, and how many plans the tasks shared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.recovery.rows import finish, row
from real_cluster import RealCluster, running

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, TASKS = 4, 200
CASE = f"submissions_{TASKS}"


def submissions() -> dict[str, float]:
    """The metrics of one cluster: two agents of two slots, so that most tasks wait."""
    with (
        tempfile.TemporaryDirectory(prefix="submissions-") as folder,
        running(Path(folder)) as cluster,
    ):
        begin = cluster.seq()
        times_s: list[float] = []
        threads = [
            threading.Thread(target=_submit, args=(cluster, number, times_s))
            for number in range(CLIENTS)
        ]
        begin_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        all_s = time.monotonic() - begin_s
        assert len(times_s) == TASKS
        cluster.wait(lambda: not _is_plan_due(cluster) or None, "all tasks are planned")
        plans = cluster.told(begin, "PlanChosen")
    ordered = sorted(1e3 * took_s for took_s in times_s)
    return {
        "answer_p50_ms": statistics.median(ordered),
        "answer_p95_ms": ordered[int(0.95 * TASKS) - 1],
        "answer_max_ms": ordered[-1],
        "plans": float(len(plans)),
        "all_s": all_s,
    }


def _submit(cluster: RealCluster, number: int, times_s: list[float]) -> None:
    client = cluster.client()
    for task in range(number, TASKS, CLIENTS):
        spec: dict[str, Any] = {
            "apiVersion": "unicron/v1",
            "name": f"storm-{task}",
            "command": ["sleep", "600"],
        }
        begin_s = time.monotonic()
        client.post("/v1/tasks", spec)
        times_s.append(time.monotonic() - begin_s)


def _is_plan_due(cluster: RealCluster) -> bool:
    deadlines = cluster.client().get("/v1/state")["deadlines"]
    return any(deadline["id"] == "plan" for deadline in deadlines)


def main() -> None:
    """Run `n` clusters, one after the other; print the medians, and write the rows."""
    parser = argparse.ArgumentParser(prog="make bench-submissions")
    parser.add_argument("-n", type=int, default=3, help="clusters")
    options = parser.parse_args()
    began_s = time.monotonic()
    runs = [submissions() for _ in range(options.n)]
    rows = [
        row(CASE, "unicron", metric, [run[metric] for run in runs], unit_of(metric))
        for metric in runs[0]
    ]
    finish(rows, ROOT / "build" / "bench" / "submissions.json", began_s, ())


def unit_of(metric: str) -> str:
    """The last word of a metric's name is its unit."""
    return metric.rpartition("_")[2]


if __name__ == "__main__":
    main()
