"""Reads of a sealed log: replay from the segments, the start of a leader, a past moment."""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median

from bench.log.sealed import SealedCluster
from unicron import __version__
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.client import DRY_RUN_S_MAX, Client
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.server import steady_clock
from unicron.control_plane.service import usage_files
from unicron.control_plane.service.leader import Leader
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.log.segments import Folder, SealedLog
from unicron.events.spec.policy import Policy

Found = dict[str, float]
NUM_STARTS, NUM_MOMENTS = 5, 200


def replay(folder: Folder) -> Found:
    """Fold all segments of a folder into a state; also the CPU time of reading alone."""
    began_s, cpu_s, state = time.perf_counter(), time.process_time(), ClusterState()
    for record in SealedLog(folder).records():
        fold(state, record)
    lasted_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    read_s = time.process_time()
    for _ in SealedLog(folder).records():
        pass
    return {
        "records_per_s": state.seq / lasted_s,
        "cpu_us": 1e6 * cpu_s / state.seq,
        "read_cpu_us": 1e6 * (time.process_time() - read_s) / state.seq,
    }


def start_s(cluster: SealedCluster) -> float:
    """From a leader's first call to its EpochStarted in the log; the median of several starts."""
    times = [asyncio.run(_start(cluster, f"start-{number}")) for number in range(NUM_STARTS)]
    return median(times)


async def _start(cluster: SealedCluster, nonce: str) -> float:
    async with cluster.log() as log:
        leader = Leader(
            log,
            clock=steady_clock(),
            nonce=nonce,
            code=__version__,
            policy=Policy(),
            folder=cluster.folder,
        )
        began_s = time.perf_counter()
        await leader.take_over()
        await leader.recover()
        lasted_s = time.perf_counter() - began_s
        assert leader.state.nonce == nonce
        await leader.release("")
        return lasted_s


def history(cluster: SealedCluster) -> Found:
    """A year's history: with the first count, then of a new control plane by their file."""
    began_s = time.perf_counter()
    usage_files.of_sealed(SealedLog(cluster.folder))
    first_s = time.perf_counter() - began_s
    files = cluster.folder.snapshots("usage")
    found = {
        "first_s": first_s,
        "file_mb": (cluster.state.path / "log" / files[-1].name).stat().st_size / 1e6,
    }
    with control_plane(cluster) as client:
        for metric in ("answer_s", "again_s"):
            began_s = time.perf_counter()
            answer = client.get("/v1/history", DRY_RUN_S_MAX)
            found[metric] = time.perf_counter() - began_s
            assert answer["total"]["used_slot_s"] > 0
    return found | {"days": float(len(answer["days"]))}


def moments_s(cluster: SealedCluster, last: int, num: int = NUM_MOMENTS) -> list[float]:
    """The time of each answer of a real control plane to `status --at`, half of them asked by seq,
    half by time: drawn from the whole log, each one new."""
    with control_plane(cluster) as client:
        first_s, last_s = (client.get("/v1/state", at=seq)["cluster"]["at_s"] for seq in (1, last))
        times: list[float] = []
        for number in range(num):
            seq, at_s = random.randint(1, last), random.uniform(first_s, last_s)
            at = str(seq) if number % 2 else datetime.fromtimestamp(at_s, UTC).isoformat()
            began_s = time.perf_counter()
            view = client.get("/v1/state", DRY_RUN_S_MAX, at=at)
            times.append(time.perf_counter() - began_s)
            assert not number % 2 or view["cluster"]["seq"] == seq
        return times


def typed(cluster: SealedCluster) -> Found:
    """Wall and CPU time of the commands that a person types in an incident, asked of a new control
    plane; `again`: the second time."""
    with control_plane(cluster) as client:
        view = client.state()
        task = next(one["name"] for one in view["tasks"] if one["state"] == "running")
        number = str(view["incidents"][-2]["id"])
        found: Found = {}
        for what, words in (
            ("status", ["status"]),
            ("status_task", ["status", task]),
            ("incident", ["incident", number]),
            ("incident_all", ["incident", "--all"]),
            ("status_task_again", ["status", task]),
            ("incident_again", ["incident", number]),
        ):
            found |= _timed(what, [*words, "--state", str(cluster.state.path)])
        return found


def _timed(what: str, words: list[str]) -> Found:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-P", "-m", "unicron.cli.main", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lasted_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {f"{what}_s": lasted_s, f"{what}_cpu_s": cpu_s}


@contextmanager
def control_plane(cluster: SealedCluster) -> Iterator[Client]:
    """A client of a new control plane on the cluster's log."""
    local = LocalCluster(cluster.state, ClusterOptions(num_agents=0))
    local.ensure_server()
    local.choose_port()
    local.start(local_cluster.CONTROL_PLANE)
    try:
        yield local.wait_control_plane()
    finally:
        local_cluster.stop_all(cluster.state, grace=False)
