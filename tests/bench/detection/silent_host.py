"""The cases of a host that falls silent: its packets vanish, and no connection is reset."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import network_namespaces
from bench.detection import faults
from bench.detection.faults import Trial
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import Network, laid
from twins import small
from unicron.events.records.envelope import Record
from unicron.events.spec.policy import Policy

NO_RESET, AFTER_RECONFIGURATION = "node_lost_no_reset", "node_lost_after_reconfiguration"
CASES = (NO_RESET, AFTER_RECONFIGURATION)
HOSTS = ("h1", "h2", "h3")
VICTIM = "h3"
ITERATION_S = 20.0
ITERATIONS_NUM = 2
"""Iterations of that length before the host is cut."""
BATCH = {"global": 32, "micro": 2}
RATES = {1: 1.0, 2: 1.9, 3: 2.7}
"""TFLOP/s by slots: the task wants a slot of each host."""
INCIDENTS = ("IncidentOpened", "IncidentEscalated")
ACTING = ("Quiesce", "Reconfigure", "StopRank", "StartRank")


def trials(folder: Path, case: str, num: int, say: Callable[[str], None]) -> list[Trial]:
    """`num` times, cut the host of a new cluster off. The time ends with the first order that
    acts."""
    if why := network_namespaces.why_not():
        return [Trial(case, "unicron", None, why)]
    found: list[Trial] = []
    while len(found) < num and not faults.never(found):
        found.append(_trial(folder / str(len(found)), case))
        took = found[-1].why or f"{found[-1].detect_s:.3f} s"
        say(f"{case} unicron {len(found)} of {num}: {took}")
    return found


def _trial(folder: Path, case: str) -> Trial:
    with (
        laid(f"unicron-b{os.getpid()}", (BRAIN, *HOSTS), (MANAGE, TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        folder.mkdir(parents=True)
        cluster = HostsCluster(folder, network, {"hang_s_min": Policy().hang_s_min})
        try:
            cluster.start()
            return _strike(cluster, _begun(cluster, case), case)
        except AssertionError as error:  # what was awaited did not come
            return Trial(case, "unicron", None, str(error).partition("\n")[0])
        finally:
            cluster.stop()


def _begun(cluster: HostsCluster, case: str) -> int:
    spec = small(
        "silent",
        cluster.path / "out",
        slots=(1, len(HOSTS)),
        rates=RATES,
        checkpoint_every=1000,
        batch=BATCH,
    )
    task = cluster.submit(spec)
    cluster.wait_whole(task, len(HOSTS))
    for node in HOSTS:
        cluster.wait_told(0, "NodeProbed", target=node, reached=True)
    cluster.rest(task, rest_s=ITERATION_S)
    cluster.wait_steps(task, ITERATIONS_NUM + 1)
    return task


def _strike(cluster: HostsCluster, task: int, case: str) -> Trial:
    if case == AFTER_RECONFIGURATION:
        _reconfigure(cluster, task)
    after, steps = cluster.seq(), cluster.told(0, "TaskProgressed")[-1].body.step_s
    began_s = _vanish(cluster.network)
    lost = _wait_first(cluster, after, INCIDENTS, node=VICTIM)
    acts = _wait_first(cluster, lost.seq, ACTING)
    return Trial(case, "unicron", acts.at_s - began_s, iteration_s=median(steps))


def _wait_first(
    cluster: HostsCluster, after: int, kinds: Sequence[str], **wanted: object
) -> Record:
    """The first record of one of these kinds."""

    def look() -> Record | None:
        told = [one for kind in kinds for one in cluster.told(after, kind, **wanted)]
        return min(told, key=lambda one: one.seq, default=None)

    return cluster.wait(look, f"none of {', '.join(kinds)}")


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
