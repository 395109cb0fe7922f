"""The throughput of a real command is measured from the Megatron progress lines that it prints."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from msgspec import convert
from real_cluster import RealCluster
from unicron.control_plane.throughput.flops import iteration_flops
from unicron.events.spec.model import MegatronModel

TRAINS = """
import os, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
file, done = sys.argv[1], 0
if os.path.exists(file):
    done = int(open(file).read())
while done < 100_000:
    began = time.perf_counter()
    time.sleep(0.2 / size)
    done += 1
    if rank < size - 1:
        continue
    ms = 1000 * (time.perf_counter() - began)
    print(f" [2026-11-22 03:00:00] iteration {done:8d}/  100000 | consumed samples: {8 * done:8d} |"
          f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 |"
          f" global batch size: {8:5d} | lm loss: {10 / done:.6E} | loss scale: 1.0 |"
          " number of skipped iterations:   0 | number of nan iterations:   0 |", flush=True)
    if done % 10 == 0:
        with open(file + ".new", "w") as new:
            new.write(str(done))
        os.replace(file + ".new", file)
"""
MODEL: dict[str, Any] = {
    "gpu": "A100-80",
    "num_layers": 2,
    "hidden": 64,
    "num_heads": 2,
    "sequence": 64,
    "vocabulary": 128,
    "global_batch": 8,
}


def wait_logged(cluster: RealCluster, task: int, after: int, iteration: int) -> Any:
    """The first report after seq `after` of this iteration or a later one."""

    def look() -> Any:
        return next(
            (
                record
                for record in cluster.told(after, "IterationsLogged", task=task)
                if record.body.iteration >= iteration
            ),
            None,
        )  # type: ignore[attr-defined]

    return cluster.wait(look, f"iteration {iteration} of task {task}")


def test_printed_progress_gives_a_measured_throughput(cluster: RealCluster, tmp_path: Path) -> None:
    job = {
        "apiVersion": "unicron/v1",
        "name": "gpt",
        "slots": {"min": 2, "max": 4},
        "command": [sys.executable, "-c", TRAINS, str(tmp_path / "done")],
        "model": MODEL,
    }
    task = cluster.submit(job)
    first = cluster.wait_told(0, "IterationsLogged", task=task)
    assert first.body.num_iterations == 0  # type: ignore[attr-defined]
    assert cluster.task(task)["throughput"]["origin"] == "modelled"
    before = cluster.client().get("/v1/state")["cluster"]["input"]

    measured: Any = cluster.wait_told(0, "ThroughputSet", task=task, origin="measured").body
    after = cluster.client().get("/v1/state")["cluster"]["input"]
    assert after != before, "the measured throughput makes earlier plans stale"
    shown, size = cluster.task(task), len(cluster.task(task)["ranks"])
    rate = measured.rates_flops[measured.sizes.index(size)]
    reports: list[Any] = [x.body for x in cluster.told(0, "IterationsLogged", task=task)]
    steps_s = [body.step_s for body in reports if body.num_iterations]
    flops = iteration_flops(convert(MODEL, MegatronModel))
    assert flops / max(steps_s) <= 1.000001 * rate, "the rate is below the slowest iteration's"
    assert flops / min(steps_s) >= 0.999999 * rate
    assert shown["iterations"] == 100_000
    assert shown["loss"] > 0

    page = cluster.unicron("status", "gpt").stdout
    assert " of 100,000, loss " in page
    assert "; measured" in page
    assert "/100,000 " in cluster.unicron("status").stdout
    assert "gpt" in cluster.unicron("plan").stdout
    assert "IterationsLogged" in cluster.unicron("tail", "--task", "gpt").stdout

    wait_logged(cluster, task, 0, 20)
    seq, rank = cluster.seq(), cluster.task(task)["ranks"][0]
    done = cluster.task(task)["iteration"]
    os.kill(rank["pid"], signal.SIGKILL)
    closed = cluster.wait_told(seq, "IncidentClosed").body
    assert closed.outcome == ("set back" if closed.iterations_lost else "healed")
    restarted: Any = cluster.wait(
        lambda: next(
            (
                record
                for record in cluster.told(seq, "IterationsLogged", task=task, num_iterations=0)
            ),
            None,
        ),
        "the first line of the new round",
    )
    assert restarted.body.iteration > 10, "the command resumed from its own checkpoint"
    assert restarted.body.attempt == 2
    wait_logged(cluster, task, restarted.seq, done + 1)
    cluster.verify()
