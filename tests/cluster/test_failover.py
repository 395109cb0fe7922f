"""The log's server fails over under a training task: processes find the new primary, and ranks do
not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import replicated_servers
from real_cluster import RealCluster, running
from twins import small
from unicron.cli.cluster import local_cluster
from unicron.events.errors import UnicronError
from unicron.events.spec.policy import Policy


def submitted(cluster: RealCluster) -> int | None:
    try:
        return cluster.submit(
            {
                "apiVersion": "unicron/v1",
                "name": "waits",
                "command": ["true"],
                "slots": {"min": 4, "max": 4},
                "weight": 1e-6,
            }
        )
    except UnicronError:  # nothing is acknowledged yet
        return None


@pytest.mark.thorough
def test_all_processes_find_the_new_primary(tmp_path: Path) -> None:
    with (
        replicated_servers.replicated(tmp_path) as (primary, replica),
        replicated_servers.watched(tmp_path, primary) as (url, _),
        running(tmp_path / "cluster", num_control_planes=2, redis_url=url) as cluster,
    ):
        task = cluster.submit(small("led", tmp_path / "out"))
        cluster.wait_whole(task, 4)
        pids, begun = cluster.pids(task), cluster.seq()
        settings = local_cluster.check_redis(url, "default", cluster.state, Policy())
        assert settings["role"] == "master"
        primary.process.kill()
        cluster.wait(lambda: replica.role == "master" or None, "the replica is promoted")
        other = cluster.wait(lambda: submitted(cluster), "a request is answered")
        cluster.cancel(other)
        cluster.wait(lambda: cluster.told(begun, "TaskProgressed") or None, "reports arrive")
        cluster.wait_steps(task)
        assert cluster.pids(task) == pids
        assert cluster.task(task)["generation"] == 1
        for kind in (
            "IncidentOpened",
            "NodeJoined",
            "Quiesce",
            "ReportsLost",
            "RankExited",
            "StopRank",
        ):
            assert not cluster.told(begun, kind), cluster.tail(begun)
        assert replica.client.acl_whoami() == "default"
        assert {f"unicron:default:{node}" for node in ("n1", "n2")} <= set(
            replica.client.acl_users()
        )
