"""A rank of a real task is killed, and the task heals: control plane, agent, two ranks.

On a machine with one GPU both ranks use it: over NCCL if it allows that, else over gloo.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row
from gpu import driver, groups
from gpu.result import CUDA, of
from nursery import Nursery
from rank_twin import Twin
from real_cluster import RealCluster, running
from twins import small
from unicron.events.spec.job import parse

STRUCK, VICTIM, ITERATIONS = 3, 1, 60


def check(folder: Path, device: str) -> list[Row]:
    """Kill a rank in a backward, wait for the end of the healing, and compare with the reference
    run."""
    backend = _prepare(folder, device)
    spec = small("killed", folder, slots=(2, 2), iterations=ITERATIONS)
    with running(folder / "cluster", num_agents=1) as cluster:
        task = cluster.submit(spec)
        after = cluster.seq()
        cluster.hold(task, VICTIM, event="backward", iteration=STRUCK)
        held = cluster.wait_held(task, VICTIM, 0.0)
        pids = cluster.pids(task)
        cluster.hold(task, VICTIM, event="forward", iteration=-1)
        killed_s = time.time()
        os.kill(held["pid"], signal.SIGKILL)
        healed = cluster.wait_told(after, "IncidentClosed").body
        ended = cluster.wait_ended(task)
        assert ended["state"] == "finished", (ended, cluster.endings(task))
        stepped_s = _stepped_s(cluster, task, killed_s)
        _is_healed(cluster, task, healed, pids)
    nursery = Nursery(folder / "zygote.log")
    try:
        twin = Twin(parse(spec), folder / "twin", nursery)
    finally:
        nursery.close()
    final = (Path(spec["train"]["output"]) / "latest").resolve()
    assert twin.is_equal(final), f"{twin.difference(final)}, noise {twin.noise}"
    return [of("killed", "fault_to_step_s", [stepped_s - killed_s], "s", f"2 ranks, {backend}"),
            of("killed", "iterations_lost", [float(healed.iterations_lost)], ""),  # type: ignore[attr-defined]
            of("killed", "loss_gap", [twin.difference(final).loss_rel], "relative")]


def _prepare(folder: Path, device: str) -> str:
    """Set what the agent needs to give each rank a GPU; returns the backend."""
    if device != CUDA:
        return "gloo"
    here = driver.devices()
    backend = "nccl"
    if len(here) == 1 and groups.shares_one_gpu(folder / "shares"):
        os.environ.update(groups.ONE_GPU)
        backend = "nccl on one GPU"
    elif len(here) == 1:
        os.environ["UNICRON_BACKEND"] = "gloo"
        backend = "gloo on one GPU"
    # Last: torch in this process accepts no device twice.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((here * 2)[:2])
    return backend


def _is_healed(cluster: RealCluster, task: int, closed: Any, before: dict[int, int]) -> None:
    assert closed.outcome in ("healed", "ended"), cluster.tail(0)
    assert (closed.iterations_lost, closed.ckpt_read) == (0, False), cluster.tail(0)
    lines = [line for line in cluster.traced(task) if line["rank"] != VICTIM]
    assert {line["pid"] for line in lines} == {before[1 - VICTIM]}, "the survivor has restarted"


def _stepped_s(cluster: RealCluster, task: int, killed_s: float) -> float:
    """When the survivor has stepped the iteration that the fault struck."""
    return next(float(line["t"]) for line in cluster.traced(task)
                if line["event"] == "done" and line["iteration"] == STRUCK
                and line["t"] > killed_s)
