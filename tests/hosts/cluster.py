"""A cluster on several hosts: a control plane with its server on one, an agent on each other one.

Its control plane is reached over the network `manage`. The ranks reach each other over `train`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from certificates import Pair
from hosts.network import Network
from real_cluster import RealCluster
from unicron.cli.cluster.client import Client

MANAGE, TRAIN = "manage", "train"
BRAIN = "c"
"""The host of the control plane and the log's server. The tests run here too."""
PROGRAM = (sys.executable, "-P", "-m", "unicron.cli.main")


class HostsCluster(RealCluster):
    """The test's thread must be in the namespace of BRAIN."""

    def __init__(
        self,
        path: Path,
        network: Network,
        policy: Mapping[str, object],
        *,
        num_slots: int = 1,
        version: int = 4,
        pair: Pair | None = None,
    ) -> None:
        """`version`: of the addresses, 4 or 6. `pair`: the certificate; without it, in plain."""
        super().__init__(path, 0, {**policy, "shared_folders": [str(path)]})
        self.network, self.version, self._num_slots = network, version, num_slots
        self.nodes = [host for host in network.hosts if host != BRAIN]
        self._started: list[subprocess.Popen[bytes]] = []
        self.pair = pair

    def start(self) -> Client:
        listen = MANAGE if self.version == 4 else self.network.address(BRAIN, MANAGE, 6)
        self._run(
            BRAIN,
            "control-plane",
            "--state",
            str(self.state.path),
            "--listen",
            listen,
            *(
                ("--insecure",)
                if self.pair is None
                else ("--tls-cert", str(self.pair.certificate), "--tls-key", str(self.pair.key))
            ),
            "--policy",
            str(self.path / "policy.yaml"),
        )
        self.wait(lambda: self.state.control_planes() or None, "the control plane listens")
        client = self.local.wait_control_plane()
        for node in self.nodes:
            self.start_agent(node)
        self.wait(
            lambda: len(client.get("/v1/state")["nodes"]) == len(self.nodes) or None,
            "the agents have joined",
        )
        return client

    def start_agent(self, node: str, *, again: bool = False) -> None:
        """Start the agent of a host; the first one enrols it. `again`: with the authority that it
        has kept."""
        client, token = self.client(), ""
        if not (self.path / node / "agents" / f"{node}.identity").exists():
            token = client.post(
                "/v1/tokens", {"name": f"join-{node}", "role": "join", "node": node}
            )["token"]
        trust = ("--insecure",) if self.pair is None else ("--ca", self.pair.digest)
        self._run(
            node,
            "agent",
            "--node",
            node,
            "--slots",
            str(self._num_slots),
            "--state",
            str(self.path / node),
            "--url",
            client.url,
            *(() if again else trust),
            "--advertise",
            self.network.address(node, TRAIN, self.version),
            env={"UNICRON_TOKEN": token, "UNICRON_TRACE_DIR": str(self.path / "trace")},
        )

    def _run(self, host: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._started.append(
            self.network.start(host, [*PROGRAM, *words], self.path / f"{host}.log", env)
        )

    def log(self, host: str) -> str:
        """What the control plane or agent of a host has logged."""
        return (self.path / f"{host}.log").read_text()

    def stop(self) -> None:
        """Kill all that runs on the hosts."""
        self.network.close()
        for process in self._started:
            process.wait()
