"""A host falls silent: others probe it. A dead one is lost at once, one that lives is not touched.

The tests run in this order, on one task. No rank is ever called hung, so nothing but a probe, or a
connection that is reset, tells of a loss; and packets vanish, so nothing is reset.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import network_namespaces
import pytest
from cluster_story import RATES
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import laid
from twins import small

NODES = ("h1", "h2", "h3", "h4")
NUM = len(NODES)
SILENCE_S = 3.0
LOST_S_MAX = 15.0
"""It takes SILENCE_S and half a second; this is for a loaded machine."""
LONG_S = 30.0
LATER_NUM = 10
TOUCHING = ("Quiesce", "Reconfigure", "StartRank", "StopRank", "IncidentOpened")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-p{os.getpid()}", (BRAIN, *NODES), (MANAGE, TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        made = HostsCluster(tmp_path_factory.mktemp("hosts"), network, {"silence_s_max": SILENCE_S})
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def task(cluster: HostsCluster) -> int:
    spec = small(
        "probed",
        cluster.path / "out",
        slots=(1, NUM),
        checkpoint_every=1000,
        iterations=100_000,
        rates=RATES,
    )
    number = cluster.submit(spec)
    cluster.rest(number, rest_s=0.2)
    cluster.wait_whole(number, NUM)
    return number


def test_each_host_is_reached_when_it_has_joined(cluster: HostsCluster) -> None:
    ports = {one.body.node: one.body.probe_port for one in cluster.told(0, "NodeJoined")}
    assert ports == dict.fromkeys(NODES, 8430)
    for node in NODES:
        cluster.wait_told(0, "NodeProbed", target=node, reached=True)


@pytest.mark.parametrize("cause", ["stopped", "cut"])
def test_an_agent_that_is_not_heard_on_a_host_that_lives_touches_no_task(
    cluster: HostsCluster, task: int, cause: str
) -> None:
    before, after = cluster.pids(task), cluster.seq()
    agent = cluster.told(0, "NodeJoined", node="h2")[-1].body.pid
    if cause == "stopped":
        os.kill(agent, signal.SIGSTOP)
    else:
        cluster.network.cut("h2", MANAGE)
    try:
        silenced = cluster.wait_told(after, "NodeUnreachable", node="h2")
        cluster.wait_told(silenced.seq, "NodeProbed", target="h2", reached=True)
        reached = cluster.traced(task)[-1]["iteration"] + LATER_NUM
        cluster.wait_traced(task, event="step", iteration=reached)
    finally:
        if cause == "stopped":
            os.kill(agent, signal.SIGCONT)
        else:
            cluster.network.mend("h2", MANAGE)
    cluster.wait_told(silenced.seq, "NodeReachable", node="h2")
    cluster.wait_steps(task)
    assert cluster.pids(task) == before
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)


def power_off(cluster: HostsCluster, task: int, node: str) -> None:
    """The node is lost by a probe, in time, and the others go on with the same processes."""
    before, after = cluster.pids(task), cluster.seq()
    (theirs,) = cluster.on(task, node)
    began_s = cluster.network.kill(node)
    record = cluster.wait_told(after, "IncidentOpened")
    opened = record.body
    assert (opened.severity, opened.node, opened.ranks) == ("SEV1", node, (theirs,)), opened
    assert opened.why.endswith("reaches it"), opened
    assert record.at_s - began_s < LOST_S_MAX
    cluster.wait_healed(after)
    ours = {rank: pid for rank, pid in before.items() if rank != theirs}
    assert cluster.kept(task, ours) == set(ours)


def test_a_host_that_is_switched_off_one_iteration_after_a_reconfiguration_is_lost(
    cluster: HostsCluster, task: int
) -> None:
    """No rank knows yet how long an iteration takes: as a stall it is told after a minute."""
    after = cluster.seq()
    (victim,) = cluster.on(task, "h1")
    os.kill(cluster.pids(task)[victim], signal.SIGKILL)
    cluster.wait_told(after, "IncidentClosed")
    power_off(cluster, task, "h4")

    back = cluster.seq()  # the host boots
    cluster.network.mend("h4")
    cluster.start_agent("h4")
    cluster.wait_told(back, "NodeProbed", target="h4", reached=True)
    cluster.wait_whole(task, NUM)


def test_a_host_that_is_switched_off_in_a_long_iteration_is_lost_before_it_ends(
    cluster: HostsCluster, task: int
) -> None:
    cluster.rest(task, rest_s=LONG_S)
    cluster.wait(
        lambda: time.time() - cluster.traced(task)[-1]["t"] > 1.0 or None,
        "all ranks sleep",
    )
    power_off(cluster, task, "h3")
