"""Takeovers: two control planes on one log, and how long nobody leads after the leader's fault."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import network_namespaces
import redis
from hosts.network import Network, laid
from unicron.cli.cluster import local_cluster, processes
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.cli.cluster.processes import Process
from unicron.cli.cluster.state_dir import StateDir, read_json
from unicron.events.log import embedded_server
from unicron.events.secret_environment import REDIS_URL

CLUSTER = "default"
CASES = ("takeover_sigkill", "takeover_sigstop", "takeover_cut")
WAIT_S_MAX = 120.0
POLL_S = 0.02
FOLLOWED_S = 0.5
"""A follower asks for the lease every 0.2 s; one that has not asked for so long is gone."""
SERVER_HOST, NETWORK, SERVER_PORT = "s", "manage", 6379
Server: Any = redis.Redis
T = TypeVar("T")


class Lease:
    """Who leads a log and who follows, as its server has it."""

    def __init__(self, url: str) -> None:
        self._server = Server.from_url(url)
        self._prefix = f"{{unicron:{CLUSTER}}}:"

    def close(self) -> None:
        self._server.close()

    def url(self) -> str:
        """The URL of the leader; "" if none leads."""
        return (self._server.hget(f"{self._prefix}lease", "url") or b"").decode()

    def leader(self) -> str:
        """The URL of the leader, as soon as there is one."""
        return wait(self.url, "a control plane leads")

    def is_followed(self) -> bool:
        """Whether a control plane follows."""
        least_s = time.time() - FOLLOWED_S - 1.0  # whole seconds are noted
        return bool(self._server.zcount(f"{self._prefix}followers", least_s, "+inf"))

    def epoch(self) -> int:
        """The epoch of the newest record."""
        top = self._server.xrevrange(f"{self._prefix}log", "+", "-", 1)
        return int(top[0][0].partition(b"-")[0]) if top else 0

    def wait_later(self, epoch: int) -> float:
        """Wait for a record of a later epoch; returns the time at which it was in the log."""
        key, last = f"{self._prefix}log", f"{epoch}-{1 << 53}"
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not self._server.xread({key: last}, 1, 1000):
            assert time.monotonic() < deadline_s, f"epoch {epoch} has no successor"
        return time.time()


class Pair(Protocol):
    """Two control planes of one log."""

    lease: Lease

    def strike(self, case: str) -> None:
        """Let the leader have the fault of a case."""
        ...

    def mend(self) -> None:
        """The former leader runs again, as a follower soon."""
        ...


def takeovers(case: str, folder: Path, num: int) -> list[float]:
    """The time of each takeover: from the fault of the leader to the first record of the next."""
    times: list[float] = []
    with (hosts_pair if case == "takeover_cut" else local_pair)(folder) as pair:
        for _ in range(num):
            pair.lease.leader()
            wait(pair.lease.is_followed, "one follows")
            epoch, began_s = pair.lease.epoch(), time.time()
            pair.strike(case)
            times.append(pair.lease.wait_later(epoch) - began_s)
            pair.mend()
    return times


def wait(look: Callable[[], T], what: str) -> T:
    """Poll until the result is true."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {WAIT_S_MAX:g} s: {what}"
        time.sleep(POLL_S)
    return found


# --- on one host ----------------------------------------------------------------------------------
class LocalPair:
    """On one state folder, as `up --control-planes 2` runs them; `policy`: a file."""

    def __init__(self, folder: Path, policy: str = "", num_agents: int = 0) -> None:
        self.state = StateDir(folder / "state")
        self.state.create()
        self.local = LocalCluster(
            self.state, ClusterOptions(num_agents=num_agents, num_control_planes=2, policy=policy)
        )
        self.local.choose_port()
        self._struck: Process | None = None

    def start(self) -> None:
        server = self.local.ensure_server()
        assert server is not None
        self.lease = Lease(server.url)
        for name in self.local.names():
            self.local.ensure(name)
        client = self.local.wait_control_plane()
        self.local.wait_agents(client)

    def stop(self) -> None:
        if hasattr(self, "lease"):
            self.lease.close()
        local_cluster.stop_all(self.state, grace=False)

    def leader(self) -> Process:
        """The process of the control plane that leads."""
        url = self.lease.leader()
        pids = [
            file["pid"]
            for path in self.state.control_planes()
            if (file := read_json(path) or {}).get("url") == url
        ]
        return next(
            one
            for name in self.local.control_planes
            if (one := self.local.find(name)) is not None and one.pid in pids
        )

    def revive(self) -> None:
        """Start control planes that have ended again, as `up` does, and print their last words."""
        for name in self.local.control_planes:
            if self.local.find(name) is None:
                print(f"{name} had ended: {processes.last_output(self.state, name)}", flush=True)
                self.local.start(name)

    def strike(self, case: str) -> None:
        self._struck = self.leader()
        os.kill(self._struck.pid, signal.SIGSTOP if case.endswith("sigstop") else signal.SIGKILL)

    def mend(self) -> None:
        """One that was stopped finds that it is fenced, and ends."""
        struck = self._struck
        assert struck is not None
        processes.signal_to(struck, signal.SIGCONT)
        assert processes.wait_gone(struck, WAIT_S_MAX)
        self.local.start(struck.name)


@contextmanager
def local_pair(folder: Path) -> Iterator[LocalPair]:
    pair = LocalPair(folder)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


# --- on hosts of their own ------------------------------------------------------------------------
class HostsPair:
    """Each on a host, and the server on a third one: network namespaces."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._network = folder, network
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._password = secrets.token_hex(16)
        self._struck = ""

    def start(self) -> None:
        socket = self._folder / "server.sock"
        self._running[SERVER_HOST] = self._network.start(
            SERVER_HOST,
            [
                str(embedded_server.find_binary()),
                "--port",
                str(SERVER_PORT),
                "--dir",
                str(self._folder),
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
                "--requirepass",
                self._password,
                "--unixsocket",
                str(socket),
            ],
            self._folder / "server.log",
        )
        wait(socket.exists, "the server listens")
        self.lease = Lease(f"unix://:{self._password}@{socket}")
        first, second = (host for host in self._network.hosts if host != SERVER_HOST)
        self._start(first)
        self.lease.leader()
        for name in ("secret", "token"):
            (self._folder / second).mkdir(mode=0o700, exist_ok=True)
            shutil.copy2(self._folder / first / name, self._folder / second / name)
        self._start(second)

    def stop(self) -> None:
        self._network.close()
        for process in self._running.values():
            process.wait()

    def strike(self, case: str) -> None:
        leader = self.lease.leader()
        self._struck = next(
            host
            for host in self._running
            if host != SERVER_HOST and f"//{self._network.address(host, NETWORK)}:" in leader
        )
        self._network.cut(self._struck)

    def mend(self) -> None:
        self._network.mend(self._struck)
        process = self._running[self._struck]
        process.kill()  # when it reaches the server again it ends itself, as one that was stopped
        process.wait()
        self._start(self._struck)

    def _start(self, host: str) -> None:
        server = self._network.address(SERVER_HOST, NETWORK)
        self._running[host] = self._network.start(
            host,
            [
                sys.executable,
                "-P",
                "-m",
                "unicron.cli.main",
                "control-plane",
                "--state",
                str(self._folder / host),
                "--listen",
                NETWORK,
                "--insecure",
            ],
            self._folder / f"{host}.log",
            {REDIS_URL: f"redis://:{self._password}@{server}:{SERVER_PORT}/0"},
        )


@contextmanager
def hosts_pair(folder: Path) -> Iterator[HostsPair]:
    with laid(f"unicron-l{os.getpid()}", (SERVER_HOST, "a", "b"), (NETWORK,)) as network:
        pair = HostsPair(folder, network)
        try:
            pair.start()
            yield pair
        finally:
            pair.stop()


def why_not(case: str) -> str:
    """Why the case cannot be measured here, or ""."""
    return network_namespaces.why_not() if case == "takeover_cut" else ""
