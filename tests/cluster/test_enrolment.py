"""Agents of other hosts exchange a join token for an identity of their own, and lose it."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from real_cluster import LIMIT_S, RealCluster, running
from unicron.events.errors import UsageError
from unicron.workers.agent.delivery.join import NodeRevoked

Redis: Any = redis.Redis
CLOCK = """
import sys, time
now, off_s = time.time, float(sys.argv.pop(1))
time.time = lambda: now() + off_s
from unicron.cli.main import main
main()
"""
"""`unicron` on a host whose clock is off."""


class Hosts:
    """Agents of a cluster, each with a state folder of its own, as on another host."""

    def __init__(self, cluster: RealCluster, path: Path) -> None:
        self.cluster, self.path = cluster, path
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *options: str) -> str:
        """The printed command of a new join token."""
        made = self.cluster.unicron("token", "create", "--join", *options)
        assert made.returncode == 0, made.stderr
        assert "only this machine" in made.stderr
        return made.stdout.strip()

    def start(self, folder: str, command: str, off_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Run the command with this state folder."""
        token, unicron, *words = shlex.split(command)
        assert unicron == "unicron"
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")
        }
        environment |= dict([token.split("=")]) | {"UNICRON_STATE": str(self.path / folder)}
        with self.log(folder).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", CLOCK, str(off_s), *words],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def refused(self, folder: str, command: str, code: int = 2) -> str:
        """The error of a command that ends, and its hint."""
        assert self.start(folder, command).wait(LIMIT_S) == code, self.log(folder).read_text()
        *_, error, hint = self.log(folder).read_text().splitlines()
        assert (error[:7], hint[:6]) == ("error: ", "hint: ")
        return f"{error}\n{hint}"

    def log(self, folder: str) -> Path:
        return self.path / f"{folder}.log"

    def identity(self, node: str) -> Path:
        return self.path / node / "agents" / f"{node}.identity"

    def users(self) -> set[str]:
        with Redis.from_url(self.cluster.local.redis_url) as server:
            return {user.removeprefix("unicron:default:") for user in server.acl_users()}

    def joined(self, node: str, num: int = 1) -> None:
        self.cluster.wait(
            lambda: len(self.cluster.told(0, "NodeJoined", node=node)) == num or None,
            lambda: f"{node} joins\n{self.log(node).read_text()}",
        )

    def run(self, name: str, num_slots: int) -> None:
        """A command runs on this number of slots, to its end."""
        task = self.cluster.submit(
            {
                "apiVersion": "unicron/v1",
                "name": name,
                "command": ["true"],
                "slots": {"min": num_slots, "max": num_slots},
            }
        )
        assert self.cluster.wait_ended(task)["state"] == "finished", self.cluster.endings(task)

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    path = tmp_path_factory.mktemp("enrolment")
    with running(path, num_agents=0) as cluster:
        made = Hosts(cluster, path)
        try:
            yield made
        finally:
            made.stop()


def test_the_printed_command_enrols_a_host_once(hosts: Hosts) -> None:
    command = hosts.command("--node", "h1")
    url = hosts.cluster.client().url
    found = re.fullmatch(
        rf"UNICRON_TOKEN=(unicron_\S{{43}}) unicron agent --url {url} --node h1", command
    )
    assert found, command
    agent = hosts.start("h1", command)
    hosts.joined("h1")
    assert found[1].encode() not in Path(f"/proc/{agent.pid}/environ").read_bytes()
    file = hosts.cluster.wait(
        lambda: hosts.identity("h1") if hosts.identity("h1").exists() else None, "it is enrolled"
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(file.parent.glob("*identity*"))) == 1
    identity = file.read_text()
    for text in (
        *hosts.cluster.state.path.rglob("*.log"),
        hosts.log("h1"),
        hosts.cluster.state.path / "tokens.json",
    ):
        assert identity not in text.read_text()
        assert found[1] not in text.read_text()
    assert "join-h1 is used up\nhint: an admin: unicron token rotate join-h1" in hosts.refused(
        "other", command
    )
    listed = hosts.cluster.unicron("token", "list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [
        ["owner", "admin"],
        ["h1", "node"],
        ["join-h1", "join"],
    ]
    assert listed[-1].endswith("1 of 1")
    agent.terminate()
    agent.wait()
    hosts.start("h1", command.replace(found[1], ""))
    hosts.joined("h1", 2)
    hosts.run("enrolled", 1)


def test_an_identity_survives_control_plane_and_server(hosts: Hosts) -> None:
    hosts.cluster.kill_control_plane()
    with Redis.from_url(hosts.cluster.local.redis_url) as server:
        for user in ("unicron:default:", "unicron:default:h1"):
            server.acl_deluser(user)
    hosts.cluster.start_control_plane()
    hosts.cluster.wait(lambda: hosts.users() >= {"", "h1"} or None, "the users are there again")
    hosts.run("again", 1)


@pytest.mark.parametrize(("node", "off_s"), [("h2", -3_600.0), ("h3", 3_600.0)])
def test_a_clock_that_is_an_hour_off(hosts: Hosts, node: str, off_s: float) -> None:
    """Expiry goes by the control plane's clock, silence by the server's; a signature by none."""
    hosts.start(node, hosts.command("--node", node, "--expires", "5m"), off_s)
    hosts.joined(node)
    hosts.run(f"off-{node}", int(node[1:]))
    (joined,) = hosts.cluster.told(0, "NodeJoined", node=node)
    assert abs(joined.occurred_s - joined.at_s - off_s) < LIMIT_S
    assert not hosts.cluster.told(0, "NodeUnreachable", node=node)


def test_systemd_starts_an_agent_again_unless_its_node_was_revoked() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "unicron-agent.service")
    assert unit["Service"]["Restart"] == "always"
    assert unit["Service"]["RestartPreventExitStatus"].split() == [str(NodeRevoked.exit_code)]
    assert NodeRevoked.exit_code not in (1, UsageError.exit_code), "those may pass"


def test_a_revoked_node_is_out_at_once_and_for_good(hosts: Hosts) -> None:
    agent, cluster = hosts.started[-1], hosts.cluster
    done = cluster.unicron("token", "revoke", "h3", "--reason", "stolen")
    assert done.returncode == 0, done.stderr
    assert hosts.users() == {"default", "", "h1", "h2"}
    assert agent.wait(LIMIT_S) == NodeRevoked.exit_code
    *_, error, hint = hosts.log("h3").read_text().splitlines()
    assert error.endswith("does not accept the token: the identity of h3 was revoked")
    assert hint.startswith("hint: an admin: unicron token create --join --node h3; then remove")
    assert "Traceback" not in hosts.log("h3").read_text()
    (record,) = cluster.told(0, "TokenChanged", act="revoked")
    body: Any = record.body
    assert (body.name, body.token_role, body.who, body.reason) == ("h3", "node", "owner", "stolen")

    command = hosts.command("--node", "h3")
    assert "h3 was revoked" in hosts.refused("h3", command, NodeRevoked.exit_code)
    cluster.kill_control_plane()
    with Redis.from_url(cluster.local.redis_url) as server:
        server.acl_deluser("unicron:default:")
    cluster.start_control_plane()
    cluster.wait(lambda: "" in hosts.users() or None, "the users are there again")
    assert hosts.users() == {"default", "", "h1", "h2"}
    hosts.identity("h3").unlink()
    hosts.start("h3", command)
    hosts.joined("h3", 2)
    hosts.run("back", 3)
    cluster.verify()


@pytest.mark.thorough
def test_a_stopped_agent_first_drains_its_node(hosts: Hosts) -> None:
    """Its ranks leave before it does, also at a second SIGTERM, and the next agent has tasks again
    at once, unless an operator has drained the node."""
    cluster = hosts.cluster
    command = hosts.command("--node", "d1") + " --drain-limit 60"
    first = hosts.start("d1", command)
    hosts.joined("d1")
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "leaves",
            "command": ["sleep", "300"],
            "slots": {"min": 1, "max": 4},
        }
    )
    cluster.wait_told(0, "RankStarted", node="d1", task=task)
    before = cluster.seq()
    for _ in range(2):
        first.terminate()
        cluster.wait_told(before, "NodeDrained", node="d1")
    assert first.wait(LIMIT_S) == 0, hosts.log("d1").read_text()
    assert "another version" not in hosts.log("d1").read_text()
    left = cluster.wait_told(before, "NodeLeft", node="d1")
    told = [one for one in cluster.records(before) if one.seq <= left.seq]
    drained, *_ = (one for one in told if one.kind == "NodeDrained")
    body: Any = drained.body
    assert (body.who, body.role, body.reason) == ("d1", "node", "its agent was told to stop")
    assert any(one.kind == "StopRank" for one in told)
    assert any(one.kind == "RankExited" and one.source.startswith("d1/") for one in told)
    assert not any(one.kind == "IncidentOpened" for one in told)

    again = hosts.start("d1", command)
    hosts.joined("d1", 2)
    undrained = cluster.wait_told(left.seq, "NodeUndrained", node="d1")
    cluster.wait_told(undrained.seq, "RankStarted", node="d1", task=task)
    assert cluster.unicron("drain", "d1", "--reason", "repair").returncode == 0
    again.terminate()
    assert again.wait(LIMIT_S) == 0, hosts.log("d1").read_text()
    before = cluster.seq()
    hosts.start("d1", command)
    hosts.joined("d1", 3)
    node = next(one for one in cluster.client().get("/v1/state")["nodes"] if one["id"] == "d1")
    assert node["drained"], node
    assert not cluster.told(before, "NodeUndrained", node="d1")
    cluster.cancel(task)
    cluster.verify()
