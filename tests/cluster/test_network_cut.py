"""A node's link is cut and restored: near ranks continue, the far ones become stale.

Two nodes in network namespaces, two of the task's four ranks on each. No process exits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import network_namespaces
import pytest
from cluster_story import RATES
from network_namespaces import NODES, Agents
from real_cluster import RealCluster
from twins import Twins, small
from unicron.cli.cluster.client import Client
from unicron.cli.cluster.local_cluster import CONTROL_PLANE
from unicron.events.log.embedded_server import start_time

NEAR, FAR = NODES
NUM = 4
HANG_S_MIN = 3.0


class PartedCluster(RealCluster):
    """A cluster whose second node is in the network namespace `far`."""

    def __init__(self, path: Path, far: str, policy: dict[str, float]) -> None:
        super().__init__(path, len(NODES), {**policy, "shared_folders": [str(path)]})
        self.far = far
        self._agents: Agents | None = None

    def start(self) -> Client:
        server = self.local.ensure_server()
        assert server is not None
        self.local.ensure(CONTROL_PLANE)
        client = self.local.wait_control_plane()
        self._agents = Agents(
            self.path, self.far, server, client, num_slots=NUM // 2, trace=self.path / "trace"
        )
        self.wait(
            lambda: len(client.get("/v1/state")["nodes"]) == len(NODES) or None,
            "both agents have joined",
        )
        return client

    def stop(self) -> None:
        if self._agents is not None:
            self._agents.stop()
        super().stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PartedCluster]:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        network_namespaces.namespaces(f"unicron-cut-{os.getpid()}") as (near, far),
        network_namespaces.within(near),
    ):
        made = PartedCluster(
            tmp_path, far, {"silence_s_max": 3.0, "evidence_s_max": 4.0, "hang_s_min": HANG_S_MIN}
        )
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.mark.thorough
def test_a_cut_node_is_lost_and_its_old_ranks_are_stale(
    cluster: PartedCluster, tmp_path: Path, twins: Twins
) -> None:
    spec = small("parted", tmp_path / "out", checkpoint_every=20, rates=RATES)
    task = cluster.submit(spec)
    cluster.wait_whole(task, NUM)
    cluster.wait_paced(task, NUM)
    before, generation, after = cluster.pids(task), cluster.task(task)["generation"], cluster.seq()
    ours, theirs = cluster.on(task, NEAR), cluster.on(task, FAR)
    assert len(ours) == len(theirs) == NUM // 2
    network_namespaces.cut(cluster.far)

    # unreachable first; lost only when the near ranks also report that they wait for the far ones
    silenced = cluster.wait_told(after, "NodeUnreachable", node=FAR)
    opened_record = cluster.wait_told(after, "IncidentOpened")
    opened = opened_record.body
    assert (opened.severity, opened.node, sorted(opened.ranks)) == ("SEV1", FAR, theirs)
    assert opened.status == "lost connection", opened
    kinds = {seq: cluster.records()[seq - 1].kind for seq in opened.evidence}
    assert kinds[silenced.seq] == "NodeUnreachable", kinds
    assert set(kinds.values()) - {"NodeUnreachable"}, f"evidence from one source only: {opened}"
    closed = cluster.wait_healed(after)
    assert closed.pause_s >= HANG_S_MIN, "the pause starts when the near ranks wait"
    cluster.wait_steps(task)
    assert cluster.kept(task, {rank: before[rank] for rank in ours}) == set(ours)
    assert len(cluster.told(after, "Reconfigure")[-1].body.members) == len(ours)
    cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task)
    assert not cluster.told(after, "NodeReachable"), cluster.tail(after)
    assert all(start_time(before[rank]) for rank in theirs), "an unreachable rank was ended"

    # once the node is reachable again its old ranks are ended, and it gets new ones
    mended = cluster.seq()
    network_namespaces.mend(cluster.far)
    heard = cluster.wait_told(mended, "NodeReachable", node=FAR).seq
    for rank in theirs:
        cluster.wait_told(after, "StopRank", task=task, rank=rank, attempt=1)
        cluster.wait_told(heard, "RankExited", task=task, rank=rank, attempt=1)
        cluster.wait(lambda pid=before[rank]: start_time(pid) == "" or None, "the old rank is gone")
    cluster.wait_whole(task, NUM)
    cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task)
    assert cluster.kept(task, before) == set(ours)

    # late reports of the old generation caused nothing but StopRank, and it published nothing
    late = {
        record.seq
        for record in cluster.records(mended)
        if record.source.startswith(f"{FAR}/")
        and getattr(record.body, "generation", 0) == generation
    }
    assert not {record.kind for record in cluster.records(mended) if record.cause in late} - {
        "StopRank"
    }, cluster.tail(mended)
    assert len(cluster.told(0, "IncidentOpened")) == 1, cluster.tail(after)
    published = cluster.told(opened_record.seq, "CheckpointPublished", task=task)
    assert all(
        int(record.body.path.split("/")[0].removeprefix("gen-")) > generation
        for record in published
    ), published

    twins.compare_and_cancel(cluster, task, spec)
