"""A host falls silent: others probe it. A dead one is lost at once, one that lives is not touched.

The processes of the task know nothing of each other, so nothing but a probe tells of a loss before
`replace_after_s`. The tests run in this order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import network_namespaces
import pytest
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import laid
from unicron.events.node_probe import PORT_FIRST
from unicron.events.spec.job import API_VERSION

NODES = ("h1", "h2", "h3", "h4")
SILENCE_S = 3.0
LOST_S_MAX = 20.0
"""It takes SILENCE_S and half a second; this is for a loaded machine."""
REPLACE_S = 1000.0
TOUCHING = ("StartRank", "StopRank", "IncidentOpened", "TaskPlaced")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-p{os.getpid()}", (BRAIN, *NODES), (MANAGE, TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        policy = {"silence_s_max": SILENCE_S, "replace_after_s": REPLACE_S}
        made = HostsCluster(tmp_path_factory.mktemp("hosts"), network, policy)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def task(cluster: HostsCluster) -> int:
    number = cluster.submit(
        {
            "apiVersion": API_VERSION,
            "name": "probed",
            "slots": {"min": 1, "max": len(NODES)},
            "command": ["sleep", "100000"],
        }
    )
    for rank in range(len(NODES)):
        cluster.wait_told(0, "RankStarted", task=number, rank=rank)
    return number


def test_each_host_is_reached_when_it_has_joined(cluster: HostsCluster) -> None:
    ports = {one.body.node: one.body.probe_port for one in cluster.told(0, "NodeJoined")}
    assert ports == dict.fromkeys(NODES, PORT_FIRST)
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
        silenced = cluster.wait_told(after, "NodeUnreachable", node="h2").seq
        cluster.wait_told(silenced, "NodeProbed", target="h2", reached=True)
        again = cluster.wait_told(silenced, "DeadlineReached", deadline="probe/h2").seq
        cluster.wait_told(again, "NodeProbed", target="h2", reached=True)
    finally:
        if cause == "stopped":
            os.kill(agent, signal.SIGCONT)
        else:
            cluster.network.mend("h2", MANAGE)
    cluster.wait_told(silenced, "NodeReachable", node="h2")
    assert cluster.pids(task) == before
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_a_host_that_nobody_reaches_is_lost(cluster: HostsCluster, task: int, fault: str) -> None:
    """Its packets vanish: no connection is reset."""
    node = {"killed": "h4", "cut": "h3"}[fault]
    after = cluster.seq()
    (theirs,) = cluster.on(task, node)
    began_s = cluster.network.kill(node) if fault == "killed" else cluster.network.cut(node)
    record = cluster.wait_told(after, "IncidentOpened")
    opened = record.body
    assert (opened.severity, opened.node, opened.ranks) == ("SEV1", node, (theirs,)), opened
    assert opened.why.startswith(f"node {node} is silent; neither "), opened
    assert record.at_s - began_s < LOST_S_MAX
    probed = cluster.told(after, "NodeProbed", target=node)
    assert not any(one.body.reached for one in probed)
    # the others' processes start again without it
    recovering = cluster.wait_told(record.seq, "IncidentRecovering")
    started = [one.seq for one in cluster.told(record.seq, "RankStarted", task=task)]
    assert len([seq for seq in started if seq < recovering.seq]) == len(cluster.task(task)["ranks"])
    back = cluster.seq()
    cluster.network.mend(node)
    if fault == "killed":  # the host boots
        cluster.start_agent(node)
        cluster.wait_told(back, "NodeProbed", target=node, reached=True)
    else:
        cluster.wait_told(back, "NodeReachable", node=node)
    cluster.wait(lambda: len(cluster.on(task, node)) == 1 or None, f"{node} is used again")
