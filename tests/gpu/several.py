"""What only two or more GPUs show: tasks over NCCL that are hurt, each with what is expected.

`make gpu-check CHECKS=several` runs these checks; main.py prints what is expected beside each. On
the CPU the same code runs over gloo, which tests the code and nothing of NCCL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from bench.recovery.rows import Row
from gpu import driver
from gpu.result import CUDA, NotPossible, of
from loop_driver import FLAGS, SAMPLE, Changes, changed_example
from real_cluster import RealCluster, running

RANKS_NUM_MAX, CPU_RANKS_NUM = 8, 4
ITERATIONS, STRUCK, HUNG, COPY_EVERY, KILLS_NUM = 40, 6, 30, 2, 20
"""HUNG: by then the usual time of an iteration is known."""
HANG_S_MIN = 5.0
LOSS_GAP_MAX = 0.02
"""Relative, of the last losses: bf16 and the order of sums on a GPU."""
BY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
"""Then NCCL's ranks of one node reach each other by TCP, so that there is a link to cut."""
USUAL = ("overlapped gather", "bf16")
LOCAL_LAYERS = "get_gpt_layer_local_spec"
TE_LAYERS: Changes = [
    (f"import {LOCAL_LAYERS}", "import get_gpt_layer_with_transformer_engine_spec"),
    (f"{LOCAL_LAYERS}(config.num_moe_experts)", "get_gpt_layer_with_transformer_engine_spec()"),
]
TELLS = """
import os
local = int(os.environ["LOCAL_RANK"])
try:
    import torch
    torch.cuda.set_device(local)
    own = "GPU-" + str(torch.cuda.get_device_properties(local).uuid)
except Exception as error:
    own = str(error)
with open(os.environ["OUT"] + os.environ["RANK"], "w") as file:
    file.write(own)
"""


class Struck(NamedTuple):
    """What a fault came to."""

    closed: Any
    kept: set[int]
    """The ranks that had one process in the whole run."""
    losses: list[float]
    fault_to_step_s: float


def num_ranks(device: str) -> int:
    """Set what an agent needs to give each rank a GPU; an even number of ranks."""
    if device != CUDA:
        return CPU_RANKS_NUM
    here = driver.devices()[:RANKS_NUM_MAX]
    if len(here) < 2:
        raise NotPossible("this machine has one GPU")
    here = here[: len(here) - len(here) % 2]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(here)
    return len(here)


def layers(device: str) -> Changes:
    """Transformer Engine's layers where it is installed; Megatron then takes FusedAdam, too."""
    return TE_LAYERS if device == CUDA and util.find_spec("transformer_engine") else []


def job(folder: Path, num: int, changes: Changes, *words: str, **parallel: Any) -> dict[str, Any]:
    """The example loop with these changes, as a task of `num` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    script = changed_example(folder, changes)
    return {
        "apiVersion": "unicron/v1",
        "name": folder.name.replace("_", "-"),
        "slots": {"min": 1, "max": num},
        "command": [
            sys.executable,
            str(script),
            "--iterations",
            str(ITERATIONS),
            "--micro-batches",
            str(2 * num),
            "--losses",
            str(folder / "losses"),
            *words,
        ],
        "heal": "in-memory",
        "loop": {
            "micro_batches": 2 * num,
            "iterations": ITERATIONS,
            "copy_every": COPY_EVERY,
            "output": str(folder / "out"),
            "parallel": parallel,
        },
    }


def losses(spec: dict[str, Any]) -> list[float]:
    """The loss of each iteration, as last written."""
    lines = Path(spec["loop"]["output"]).with_name("losses").read_text().splitlines()
    found = {line["iteration"]: line["loss"] for line in map(json.loads, lines)}
    return [found[iteration] for iteration in sorted(found)]


@contextmanager
def cluster_of(folder: Path, num: int) -> Iterator[RealCluster]:
    policy = {"hang_s_min": HANG_S_MIN}
    with running(folder / "cluster", num_agents=1, num_slots=num, policy=policy) as cluster:
        yield cluster


def strike(
    cluster: RealCluster, spec: dict[str, Any], num: int, then: str, at: int = STRUCK
) -> Struck:
    """Hurt the last rank in a backward of iteration `at`: it is killed, or does `then`."""
    victim = num - 1
    after = cluster.seq()
    task = cluster.submit(spec)
    asked = {"then": then} if then else {}
    cluster.hold(task, victim, event="backward", iteration=at, **asked)
    if then == "cut":  # it goes on by itself
        cluster.wait_traced(task, event="backward", iteration=at, rank=victim)
    else:
        held = cluster.wait_held(task, victim, 0.0)
        if not then:
            cluster.hold(task, victim, event="forward", iteration=-1)
            os.kill(held["pid"], signal.SIGKILL)
    fault_s = time.time()
    cluster.wait_traced(task, event="done", iteration=at + 1)
    closed: Any = cluster.wait_told(after, "IncidentClosed").body
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    pids: dict[int, set[int]] = {}
    for line in cluster.traced(task):
        pids.setdefault(line["rank"], set()).add(line["pid"])
    kept = {rank for rank, own in pids.items() if len(own) == 1}
    stepped_s = min(
        float(line["t"])
        for line in cluster.traced(task)
        if line["event"] == "done" and line["iteration"] >= at and line["t"] > fault_s
    )
    return Struck(closed, kept, losses(spec), stepped_s - fault_s)


def command(name: str, size: int, *words: str) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": size, "max": size},
        "command": list(words),
    }


def check_devices(folder: Path, device: str) -> list[Row]:
    """A task beside another one, which has the first slot: no rank has its neighbour's GPU."""
    num = num_ranks(device)
    folder.mkdir(parents=True, exist_ok=True)
    with cluster_of(folder, num) as cluster:
        first = cluster.submit(command("first", 1, "sleep", "600"))
        cluster.wait_told(0, "RankStarted", task=first)
        tells = ("env", f"OUT={folder}/own-", sys.executable, "-c", TELLS)
        ended = cluster.wait_ended(task := cluster.submit(command("second", num - 1, *tells)))
        assert ended["state"] == "finished", cluster.endings(task)
        cluster.cancel(first)
        told = sorted(path.read_text() for path in folder.glob("own-*"))
    assert len(told) == num - 1
    if device == CUDA:
        assert len({*told}) == num - 1, f"two ranks have one GPU: {told}"
        assert all(one.startswith("GPU-") for one in told), told
    return [of("devices", "own", [float(len({*told}))], "", f"{num - 1} ranks")]


def check_usual_job(folder: Path, device: str) -> list[Row]:
    """Megatron's usual job: distributed optimizer, both overlaps, bf16, TP 2; a killed rank."""
    num = num_ranks(device)
    changes = [*layers(device), *(change for flag in USUAL for change in FLAGS[flag])]
    parallel = {"tensor": [2], "optimizer": "sharded"}
    with cluster_of(folder, num) as cluster:
        calm = job(folder / "calm", num, changes, "--sharded", **parallel)
        ended = cluster.wait_ended(cluster.submit(calm))
        assert ended["state"] == "finished", ended
        spec = job(folder / "struck", num, changes, "--sharded", **parallel)
        struck = strike(cluster, spec, num, "")
    assert struck.kept >= {*range(num - 1)}, f"survivors have restarted: {struck.kept}"
    assert struck.closed.iterations_lost <= COPY_EVERY, struck.closed
    pairs = zip(struck.losses[-3:], losses(calm)[-3:], strict=True)
    gap = max(abs(mine - other) / other for mine, other in pairs)
    assert gap < LOSS_GAP_MAX, (struck.losses, losses(calm))
    note = f"{num} ranks, TP 2{', Transformer Engine' * bool(layers(device))}"
    return [
        of("usual_job", "fault_to_step_s", [struck.fault_to_step_s], "s", note),
        of("usual_job", "iterations_lost", [float(struck.closed.iterations_lost)], ""),
        of("usual_job", "loss_gap", [gap], "relative"),
    ]


def check_hang(folder: Path, device: str) -> list[Row]:
    """A rank sleeps for ever in a backward: nothing of NCCL fails, and nobody ends."""
    num = num_ranks(device)
    with cluster_of(folder, num) as cluster:
        spec = job(folder / "hang", num, layers(device))
        struck = strike(cluster, spec, num, "sleep", HUNG)
        opened: Any = cluster.told(0, "IncidentOpened")[-1].body
    assert opened.ranks == (num - 1,), opened
    assert struck.kept >= {*range(num - 1)}, f"survivors have restarted: {struck.kept}"
    return [of("hang", "fault_to_step_s", [struck.fault_to_step_s], "s", f"{num} ranks")]


def check_link_cut(folder: Path, device: str) -> list[Row]:
    """All connections of a rank are cut in a backward; its process, and NCCL in it, live on."""
    num = num_ranks(device)
    os.environ.update(BY_SOCKETS)
    with cluster_of(folder, num) as cluster:
        spec = job(folder / "link_cut", num, layers(device))
        struck = strike(cluster, spec, num, "cut")
    assert struck.kept == {*range(num)}, f"a process has restarted: {struck.kept}"
    assert struck.closed.iterations_lost == 0, struck.closed
    return [of("link_cut", "fault_to_step_s", [struck.fault_to_step_s], "s", f"{num} ranks")]


def check_connections(folder: Path, device: str) -> list[Row]:
    """Ranks are killed in turn, all but the first, which keeps a connection of every kind."""
    try:
        import kept_connections
    except ImportError as error:
        raise NotPossible(
            f"{error.name} is not installed: pip install boto3 'moto[s3]' flask flask-cors"
        ) from error

    num = num_ranks(device)
    with (
        kept_connections.services(folder / "servers") as services,
        cluster_of(folder, num) as cluster,
    ):
        used = f"    use()\n{SAMPLE}"
        changes = [(SAMPLE, used), ("\nVOCABULARY", f"{services.script}\nVOCABULARY")]
        spec = job(folder / "connections", num, [*layers(device), *changes])
        spec["loop"]["iterations"] = 100_000
        spec["command"][3] = "100000"
        task = cluster.submit(spec)
        cluster.wait_whole(task, num)
        first = cluster.pids(task)[0]
        for kill in range(KILLS_NUM if device == CUDA else 2):
            cluster.wait_steps(task, 12)
            os.kill(cluster.pids(task)[1 + kill % (num - 1)], signal.SIGKILL)
            cluster.wait_steps(task, 1)
            cluster.wait_whole(task, num)
        assert cluster.pids(task)[0] == first, "the first rank has restarted"
        cluster.wait_steps(task, 3)
        counted = services.num_connections(first)
        cluster.cancel(task)
    assert set(counted.values()) == {1}, counted
    return [of("connections", "kept", [float(len(counted) + 1)], "", f"{num} ranks")]
