"""Agents use the server as users of their own, and keep their ranks when it loses these users."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from real_cluster import RealCluster, running

Redis: Any = redis.Redis
USERS = ["unicron:default:", "unicron:default:n1", "unicron:default:n2"]
WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(tmp_path_factory.mktemp("identities")) as made:
        yield made


def master(cluster: RealCluster) -> Any:
    return Redis.from_url(cluster.local.redis_url)


def users(cluster: RealCluster) -> list[str]:
    with master(cluster) as server:
        return sorted(user for user in server.acl_users() if user != "default")


def submit(cluster: RealCluster, end: Path) -> tuple[int, set[int]]:
    """A command on every slot of both nodes that ends when `end` exists; the task and its pids."""
    after = cluster.seq()
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": end.name,
            "slots": {"min": 4, "max": 4},
            "command": [sys.executable, "-c", WAITS, str(end)],
        }
    )
    cluster.wait(
        lambda: len(cluster.told(after, "RankStarted", task=task)) == 4 or None, "all ranks run"
    )
    return task, {record.body.pid for record in cluster.told(after, "RankStarted", task=task)}


def finish(cluster: RealCluster, task: int, pids: set[int], end: Path) -> None:
    """The same processes end on request, and both agents tell so."""
    end.touch()
    assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
    assert {record.body.pid for record in cluster.told(0, "RankExited", task=task)} == pids


def test_each_process_is_its_own_user(own: RealCluster) -> None:
    with master(own) as server:
        names = {client["user"] for client in server.client_list()}
    assert names == {"default", *USERS[1:]}
    password = own.local.redis_url.partition("//:")[2].partition("@")[0]
    secret = (own.state.path / "secret").read_bytes()
    assert len(secret) == 32
    for node in ("n1", "n2"):
        for file in ("environ", "cmdline"):
            assert password.encode() not in Path(f"/proc/{own.agent(node).pid}/{file}").read_bytes()
    for text in own.path.rglob("*.log"):
        assert password not in text.read_text(errors="replace"), text
        assert secret.hex() not in text.read_text(errors="replace"), text


def test_a_restarted_server_gets_the_users_again(own: RealCluster, tmp_path: Path) -> None:
    assert users(own) == USERS
    task, pids = submit(own, tmp_path / "restarted")
    with master(own) as server:
        pid = server.info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)
    again = own.wait(
        lambda: None if Path(f"/proc/{pid}/exe").exists() else own.local.ensure_server(),
        "the server runs again",
    )
    assert again.pid != pid
    own.wait(lambda: users(own) == USERS or None, "the users are there again")
    finish(own, task, pids, tmp_path / "restarted")


def test_a_new_leader_gives_the_users_again(own: RealCluster, tmp_path: Path) -> None:
    task, pids = submit(own, tmp_path / "taken-over")
    own.kill_control_plane()
    with master(own) as server:
        for user in USERS[1:]:
            server.acl_deluser(user)
    own.start_control_plane()
    own.wait(lambda: users(own) == USERS or None, "the users are there again")
    finish(own, task, pids, tmp_path / "taken-over")


def test_a_restarted_agent_replaces_its_user(own: RealCluster) -> None:
    with master(own) as server:
        before = server.acl_getuser(USERS[1])["passwords"]
        own.kill_node("n1")
        own.start_agent("n1")
        own.local.wait_agents(own.client())
        assert server.acl_getuser(USERS[1])["passwords"] != before
        assert len(server.acl_getuser(USERS[1])["passwords"]) == 1
    cluster = json.dumps(own.client().get("/v1/state"))
    assert "password" not in cluster
