"""The cases of a host that falls silent: its packets vanish, and no connection is reset."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import network_namespaces
from bench.detection import faults
from bench.detection.faults import Trial
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import Network, laid
from twins import small
from unicron.events.spec.policy import Policy

NO_RESET, AFTER_RECONFIGURATION = "node_lost_no_reset", "node_lost_after_reconfiguration"
CASES = (NO_RESET, AFTER_RECONFIGURATION)
HOSTS = ("h1", "h2", "h3")
VICTIM = "h3"
ITERATION_S = 20.0
ITERATIONS_NUM = 2
"""Iterations of that length before the host is cut."""
ACTING = ("Quiesce", "Reconfigure", "StopRank", "StartRank")


def trials(folder: Path, case: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """Cut the host off `num` times in one cluster. Its time ends with the first order that acts."""
    if why := network_namespaces.why_not():
        return [Trial(case, "unicron", None, why)]
    found: list[Trial] = []
    with (
        laid(f"unicron-b{os.getpid()}", (BRAIN, *HOSTS), (MANAGE, TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        folder.mkdir()
        cluster = HostsCluster(folder, network, {"hang_s_min": Policy().hang_s_min})
        try:
            cluster.start()
            task = _begun(cluster, case)
            while len(found) < num and not faults.never(found):
                found.append(_strike(cluster, task, case))
                took = found[-1].why or f"{found[-1].detect_s:.3f} s"
                say(f"{case} unicron {len(found)} of {num}: {took}")
        except AssertionError as error:  # what was awaited did not come
            found.append(Trial(case, "unicron", None, str(error).partition("\n")[0]))
        finally:
            cluster.stop()
    return found


def _begun(cluster: HostsCluster, case: str) -> int:
    spec = small("silent", cluster.path / "out", slots=(1, len(HOSTS)), checkpoint_every=1000)
    task = cluster.submit(spec)
    for rank in range(len(HOSTS)):
        cluster.wait_told(0, "RankReady", task=task, rank=rank)
    cluster.wait_whole(task, len(HOSTS))
    for node in HOSTS:
        cluster.wait_told(0, "NodeProbed", target=node, reached=True)
    if case == NO_RESET:
        cluster.rest(task, rest_s=ITERATION_S)
    return task


def _strike(cluster: HostsCluster, task: int, case: str) -> Trial:
    if case == NO_RESET:
        cluster.wait_steps(task, ITERATIONS_NUM + 1)
    else:
        _reconfigure(cluster, task)
    after, steps = cluster.seq(), cluster.told(0, "TaskProgressed")[-1].body.step_s
    began_s = _vanish(cluster.network)
    acts = cluster.wait(
        lambda: next((one for kind in ACTING for one in cluster.told(after, kind)), None),
        "no order acts on the loss",
    )
    _mend(cluster.network)
    cluster.wait_told(after, "NodeReachable", node=VICTIM)
    cluster.wait_whole(task, len(HOSTS))
    return Trial(case, "unicron", acts.at_s - began_s, iteration_s=median(steps))


def _reconfigure(cluster: HostsCluster, task: int) -> None:
    """Kill a rank elsewhere; return when the generation without it has told its first iteration."""
    after = cluster.seq()
    (rank,) = cluster.on(task, HOSTS[0])
    os.kill(cluster.pids(task)[rank], signal.SIGKILL)
    resumed = cluster.wait_told(after, "Resume", task=task)
    cluster.wait_told(resumed.seq, "TaskProgressed", generation=resumed.body.generation)


def _vanish(network: Network) -> float:
    """A wrong neighbour entry at both ends of each of the host's links."""
    began_s = 0.0
    for peer in (one for one in network.hosts if one != VICTIM):
        for name in network.networks:
            began_s = began_s or time.time()
            network.cut_one_way(VICTIM, peer, name)
            network.cut_one_way(peer, VICTIM, name)
    return began_s


def _mend(network: Network) -> None:
    for peer in (one for one in network.hosts if one != VICTIM):
        for name in network.networks:
            network.mend_one_way(VICTIM, peer, name, missing_ok=True)
            network.mend_one_way(peer, VICTIM, name, missing_ok=True)
