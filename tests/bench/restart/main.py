"""`make bench-restart`: a task whose processes start again, from memory and from disk.

The same loop on two processes cannot be healed in place (its gradients are scaled by the number of
replicas). It stores its state every other iteration: in the nodes' checkpoint stores, or on disk.
One process is killed. Metrics: `fault_to_step_s`, from the kill to the end of the first iteration
after it, with the time in which processes start; `iterations_lost`, those trained again;
`iteration_s`, the median time between the ends of two iterations before the kill, which includes
the disk's writes. The loop's own wait of STEP_S is left out. Rows: build/bench/restart.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import restarts
from bench.recovery.rows import Row, finish, row
from real_cluster import running

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 256
"""Of the model: 3.2 million parameters, whose state has 38 MB in each process."""
CASE = restarts.Case(
    "gradients scaled by the number of replicas",
    "loop.py",
    [
        ("calculate_per_token_loss=True", "calculate_per_token_loss=False"),
        ("hidden_size=32", f"hidden_size={WIDTH}"),
    ],
)
SYSTEMS = {
    "memory": {"copy_every": restarts.EVERY, "checkpoint_every": 0},
    "disk": {"copy_every": 0, "checkpoint_every": restarts.EVERY},
}


def main() -> None:
    """Run each system `n` times, in turn; write the rows and the stamp."""
    parser = argparse.ArgumentParser(prog="make bench-restart")
    parser.add_argument("-n", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "restart.json")
    options = parser.parse_args()
    began_s = time.monotonic()
    trials: dict[str, list[restarts.Restart]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "cluster") as cluster:
        for number in range(options.n):
            for name, loop in SYSTEMS.items():
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                script = restarts.script_of(place, CASE)
                trials[name].append(restarts.struck(cluster, script, place, loop))
                print(f"{name} {number}: {trials[name][-1].fault_to_step_s:.1f} s", flush=True)
    finish(
        [one for name, found in trials.items() for one in _rows(name, found)],
        options.out,
        began_s,
        (),
    )


def _rows(system: str, trials: list[restarts.Restart]) -> list[Row]:
    case = f"width {WIDTH}"
    return [
        row(case, system, "fault_to_step_s", [one.fault_to_step_s for one in trials], "s"),
        row(case, system, "iterations_lost", [float(one.iterations_lost) for one in trials], ""),
        row(case, system, "iteration_s", [_iteration_s(one) for one in trials], "s"),
    ]


def _iteration_s(trial: restarts.Restart) -> float:
    ends = [line["at"] for line in trial.lines if line["pid"] == trial.lines[0]["pid"]]
    return median(end - begin for begin, end in pairwise(ends)) - restarts.STEP_S


if __name__ == "__main__":
    main()
