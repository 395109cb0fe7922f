"""A cluster of `unicron up` on a folder of a test's own, used as from a second terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import in_process
from unicron.cli.cluster import local_cluster, processes
from unicron.cli.cluster.local_cluster import CONTROL_PLANE, UP, agent_name
from unicron.cli.cluster.processes import Process
from unicron.cli.cluster.state_dir import StateDir
from unicron.events.log import embedded_server

LIMIT_S = 90
ALL = (UP, CONTROL_PLANE, agent_name("n1"))


class Cluster:
    """Runs commands on one state folder, as a second terminal does: `up` in its own process."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if arguments[0] != "up":
            return in_process(arguments, None, self.environment())
        return subprocess.run(
            self.argv(*arguments),
            text=True,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env=self.environment(),
        )

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "unicron.cli.main", *arguments]

    def environment(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
        return {**clean, "UNICRON_STATE": str(self.state.path)}

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self("up", "--detach", "--agents", "1", "--slots", "1", *options)

    def pids(self) -> dict[str, int]:
        """Name -> pid of the running processes, including the server."""
        found = {
            name: process.pid
            for name in ALL
            if (process := processes.find(self.state, name)) is not None
        }
        server = embedded_server.adopt(self.state.server)
        return found if server is None else {**found, "server": server.pid}

    def process(self, name: str) -> Process:
        found = processes.find(self.state, name)
        assert found is not None, name
        return found

    def kill(self, name: str) -> None:
        """SIGKILL the process and wait until it is gone."""
        process = self.process(name)
        os.kill(process.pid, signal.SIGKILL)
        assert processes.wait_gone(process, 10.0)

    def end(self) -> None:
        """End all processes, whatever is left of them."""
        if (watching := processes.find(self.state, UP)) is not None:
            processes.stop_together(self.state, [watching], 0.0)
        local_cluster.stop_all(self.state, grace=False)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self("tail", "-o", "jsonl").stdout.splitlines()]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "state")
    yield made
    made.end()


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, f"the condition did not hold within {limit_s} s"
        time.sleep(0.1)
