"""A rank of a real task is killed, and the task heals: control plane, agent, ranks.

With one GPU there is one rank: NCCL lets no two ranks use a GPU, and gloo has no coalesced
all-reduce of CUDA tensors, which Megatron uses. One rank continues from the in-memory checkpoint
of iteration 2.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row
from gpu import driver
from gpu.result import CUDA, of
from nursery import Nursery
from rank_twin import Twin
from real_cluster import RealCluster, running
from twins import small
from unicron.events.spec.job import parse

STRUCK, COPY_EVERY, ITERATIONS = 3, 2, 60


def check(folder: Path, device: str) -> list[Row]:
    """Kill a rank in a backward, wait for the end of the healing, and compare with the reference
    run."""
    visible = dict(os.environ)
    num, words = prepare(device)
    victim = num - 1
    spec = small("killed", folder, slots=(num, num), iterations=ITERATIONS, copy_every=COPY_EVERY)
    with running(folder / "cluster", num_agents=1, num_slots=num) as cluster:
        task = cluster.submit(spec)
        after = cluster.seq()
        cluster.hold(task, victim, event="backward", iteration=STRUCK)
        cluster.wait_whole(task, num)
        held = cluster.wait_held(task, victim, 0.0)
        pids = cluster.pids(task)
        cluster.hold(task, victim, event="forward", iteration=-1)
        killed_s = time.time()
        os.kill(held["pid"], signal.SIGKILL)
        closed: Any = cluster.wait_told(after, "IncidentClosed").body
        ended = cluster.wait_ended(task)
        assert ended["state"] == "finished", (ended, cluster.endings(task))
        stepped_s = _stepped_s(cluster, task, killed_s)
        assert closed.iterations_lost <= (0 if num > 1 else STRUCK), cluster.tail(0)
        assert not closed.ckpt_read, cluster.tail(0)
        survivors = {line["pid"] for line in cluster.traced(task) if line["rank"] != victim}
        assert survivors == {pids[rank] for rank in range(victim)}, "a survivor has restarted"
    os.environ.clear()
    os.environ.update(visible)
    nursery = Nursery(folder / "zygote.log")
    try:
        twin = Twin(parse(spec), folder / "twin", nursery)
    finally:
        nursery.close()
    final = (Path(spec["train"]["output"]) / "latest").resolve()
    assert twin.is_equal(final), f"{twin.difference(final)}, noise {twin.noise}"
    return [
        of("killed", "fault_to_step_s", [stepped_s - killed_s], "s", words),
        of("killed", "iterations_lost", [float(closed.iterations_lost)], ""),
        of("killed", "loss_gap", [twin.difference(final).loss_rel], "relative"),
    ]


def prepare(device: str) -> tuple[int, str]:
    """Set what the agent needs to give each rank a GPU; returns the number of ranks, and in words
    what they use."""
    if device != CUDA:
        return 2, "2 ranks, gloo"
    here = driver.devices()[:2]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(here)
    return len(here), f"{len(here)} rank{'s' * (len(here) > 1)}, NCCL"


def _stepped_s(cluster: RealCluster, task: int, killed_s: float) -> float:
    """When a rank has stepped the iteration that the fault struck."""
    return next(
        float(line["t"])
        for line in cluster.traced(task)
        if line["event"] == "done" and line["iteration"] == STRUCK and line["t"] > killed_s
    )
