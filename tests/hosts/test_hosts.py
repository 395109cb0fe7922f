"""Three hosts train, a fourth has the control plane and the server; cables are cut, a host dies.

The tests run in this order, on one task. Each loses no iteration; the last one compares the task
with its undisturbed twin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import network_namespaces
import pytest
from cluster_story import RATES
from hosts.cluster import BRAIN, MANAGE, TRAIN, HostsCluster
from hosts.network import laid
from twins import Spec, Twins, small
from unicron.cli.screens import cluster as cluster_screen
from unicron.events.log.embedded_server import start_time

NODES = ("h1", "h2", "h3")
NUM = len(NODES)
SILENCE_S, HANG_S_MIN = 3.0, 3.0
REST_S, LATER_NUM = 0.2, 25
"""The sleep of each rank in an iteration, and iterations that last longer than any of the limits.
"""
TOUCHING = ("Quiesce", "Reconfigure", "StartRank", "StopRank", "IncidentOpened")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    made = Twins(tmp_path_factory.mktemp("twins"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-h{os.getpid()}", (BRAIN, *NODES), ("manage", "train")) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        made = HostsCluster(
            tmp_path_factory.mktemp("hosts"),
            network,
            {"silence_s_max": SILENCE_S, "evidence_s_max": 4.0, "hang_s_min": HANG_S_MIN},
        )
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def spec(cluster: HostsCluster) -> Spec:
    # Four times the micro-batches of the other small tasks: the fewer iterations pass during the
    # tests, the less do sums in another order change the parameters.
    return small(
        "three",
        cluster.path / "out",
        slots=(1, NUM),
        checkpoint_every=20,
        rates=RATES,
        batch={"global": 32, "micro": 2},
    )


@pytest.fixture(scope="module")
def task(cluster: HostsCluster, spec: Spec) -> int:
    number = cluster.submit(spec)
    cluster.rest(number, rest_s=REST_S)
    cluster.wait_whole(number, NUM)
    cluster.wait_paced(number, NUM)
    return number


def first_host(cluster: HostsCluster, task: int) -> str:
    """The host of the member that hosts the rendezvous store and reports progress."""
    ranks = cluster.task(task)["ranks"]
    return str(min(ranks, key=lambda rank: int(rank["rank"]))["node"])


def test_status_says_that_it_is_insecure(cluster: HostsCluster) -> None:
    view = cluster.client().get("/v1/state")
    assert view["cluster"]["insecure"] is True
    assert any(
        line.startswith("insecure: ")
        for line in cluster_screen.status(view, cluster="c", now_s=view["cluster"]["at_s"])
    )


def test_every_part_is_at_the_advertised_address(cluster: HostsCluster, task: int) -> None:
    joined = cluster.told(0, "NodeJoined")
    assert {record.body.node: record.body.host for record in joined} == {
        node: cluster.network.address(node, "train") for node in NODES
    }
    for record in joined:
        assert record.body.keeper.startswith(f"{record.body.host}:"), record
    for record in cluster.told(0, "RankReady", task=task):
        started = cluster.told(0, "RankStarted", task=task, rank=record.body.rank)[-1].body
        host = cluster.network.address(started.node, "train")
        assert record.body.endpoint.startswith(f"{host}:"), record
    for node in NODES:  # ranks, their gloo, checkpoint stores
        assert {address for address, _ in cluster.network.listening(node)} == {
            cluster.network.address(node, "train")
        }


def test_an_agent_without_the_control_plane_touches_no_task(
    cluster: HostsCluster, task: int
) -> None:
    network, node = cluster.network, first_host(cluster, task)
    before, generation, after = cluster.pids(task), cluster.task(task)["generation"], cluster.seq()
    network.cut(node, MANAGE)
    cluster.wait_told(after, "NodeUnreachable", node=node)
    line = cluster.traced(task)[-1]
    reached = cluster.wait_traced(task, event="step", iteration=line["iteration"] + LATER_NUM)
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)
    mended = cluster.seq()
    network.mend(node, MANAGE)
    cluster.wait_told(mended, "NodeReachable", node=node)
    cluster.wait(
        lambda: cluster.task(task)["iteration"] >= reached["iteration"] or None,
        "the reports come later",
    )
    cluster.wait_steps(task)
    assert cluster.pids(task) == before
    assert cluster.task(task)["generation"] == generation
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)


@pytest.mark.parametrize(("host", "peer"), [("h2", BRAIN), (BRAIN, "h2")])
def test_a_link_that_is_cut_one_way_touches_no_task(
    cluster: HostsCluster, task: int, host: str, peer: str
) -> None:
    """Either the reports of h2 are lost, or the answers to them."""
    before, after = cluster.pids(task), cluster.seq()
    cluster.network.cut_one_way(host, peer, MANAGE)
    cluster.wait_told(after, "NodeUnreachable", node="h2")
    reached = cluster.traced(task)[-1]["iteration"] + LATER_NUM
    cluster.wait_traced(task, event="step", iteration=reached)
    mended = cluster.seq()
    cluster.network.mend_one_way(host, peer, MANAGE)
    cluster.wait_told(mended, "NodeReachable", node="h2")
    cluster.wait(lambda: cluster.task(task)["iteration"] >= reached or None, "reports come later")
    assert cluster.pids(task) == before
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)


def test_without_the_control_plane_training_goes_on(cluster: HostsCluster, task: int) -> None:
    before, after = cluster.pids(task), cluster.seq()
    cluster.network.cut(BRAIN)
    for node in NODES:
        cluster.wait_told(after, "NodeUnreachable", node=node)
    reached = cluster.traced(task)[-1]["iteration"] + LATER_NUM
    cluster.wait_traced(task, event="step", iteration=reached)
    mended = cluster.seq()
    cluster.network.mend(BRAIN)
    for node in NODES:
        cluster.wait_told(mended, "NodeReachable", node=node)
    cluster.wait(lambda: cluster.task(task)["iteration"] >= reached or None, "reports come later")
    assert cluster.pids(task) == before
    for kind in TOUCHING:
        assert not cluster.told(after, kind), cluster.tail(after)


def test_a_cut_between_ranks_names_the_link_and_no_node(cluster: HostsCluster, task: int) -> None:
    network, node = cluster.network, first_host(cluster, task)
    cluster.wait_paced(task, NUM)
    before, after = cluster.pids(task), cluster.seq()
    network.cut(node, TRAIN)
    opened = cluster.wait_told(after, "IncidentOpened").body
    network.mend(node, TRAIN)
    assert opened.severity == "SEV3", opened
    links = opened.why.partition("; not acknowledged is ")[2].partition("; ")[0].split(", ")
    assert links[0], opened
    for link in links:
        assert node in link.split(" -> "), opened
    cluster.wait_healed(after)
    cluster.wait_steps(task)
    assert cluster.pids(task) == before
    for kind in ("NodeUnreachable", "NodeQuarantined"):
        assert not cluster.told(after, kind), cluster.tail(after)


def test_a_host_without_cables_is_lost_and_its_old_ranks_are_stale(
    cluster: HostsCluster, task: int
) -> None:
    network, node = cluster.network, NODES[-1]
    before, generation, after = cluster.pids(task), cluster.task(task)["generation"], cluster.seq()
    (theirs,) = cluster.on(task, node)
    ours = {rank: pid for rank, pid in before.items() if rank != theirs}
    network.cut(node)
    lost(cluster, after, node, theirs)
    cluster.wait_healed(after)
    cluster.wait_steps(task)
    assert cluster.kept(task, ours) == set(ours)
    assert start_time(before[theirs]), "the host that nobody reaches goes on"

    mended = cluster.seq()
    network.mend(node)
    cluster.wait_told(mended, "NodeReachable", node=node)
    cluster.wait_told(mended, "RankExited", task=task, rank=theirs)
    assert not start_time(before[theirs])
    cluster.wait_whole(task, NUM)
    assert cluster.kept(task, ours) == set(ours)
    stale = {
        record.seq
        for record in cluster.records(mended)
        if record.source.startswith(f"{node}/")
        and getattr(record.body, "generation", 0) == generation
    }
    assert not {record.kind for record in cluster.records(mended) if record.cause in stale} - {
        "StopRank"
    }, cluster.tail(mended)
    assert len(cluster.told(after, "IncidentOpened")) == 1, cluster.tail(after)


def test_a_dead_host_costs_no_iteration(cluster: HostsCluster, task: int) -> None:
    network, node = cluster.network, first_host(cluster, task)
    cluster.wait_paced(task, NUM)  # a stall is told after 60 s where the step time is not known yet
    before, after = cluster.pids(task), cluster.seq()
    (theirs,) = cluster.on(task, node)
    network.kill(node)
    lost(cluster, after, node, theirs)
    cluster.wait_healed(after)
    cluster.wait_steps(task)
    ours = {rank: pid for rank, pid in before.items() if rank != theirs}
    assert cluster.kept(task, ours) == set(ours)

    back = cluster.seq()  # the host boots
    network.mend(node)
    cluster.start_agent(node)
    cluster.wait_told(back, "NodeJoined", node=node)
    cluster.wait_whole(task, NUM)
    assert cluster.kept(task, ours) == set(ours)


def lost(cluster: HostsCluster, after: int, node: str, rank: int) -> Any:
    """The node counts as lost, by two sources."""
    opened = cluster.wait_told(after, "IncidentOpened").body
    assert (opened.severity, opened.node, opened.ranks) == ("SEV1", node, (rank,)), opened
    kinds = {cluster.records()[seq - 1].kind for seq in opened.evidence}
    assert "NodeUnreachable" in kinds, kinds
    assert kinds - {"NodeUnreachable"}, f"evidence from one source only: {opened}"
    return opened


def test_the_task_equals_its_undisturbed_twin(
    cluster: HostsCluster, task: int, spec: Spec, twins: Twins
) -> None:
    twins.compare_and_cancel(cluster, task, spec)
