"""Two hosts train through a control plane with TLS, to the end: agents trust the digest of its
authority, the log passes through the relay over TLS, and nothing is sent to it in plain."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import certificates
import network_namespaces
import pytest
from certificates import Pair
from hosts.cluster import BRAIN, HostsCluster
from hosts.network import laid
from twins import Twins, small
from unicron.cli.cluster.state_dir import StateDir

NODES = ("h1", "h2")


def test_a_task_trains_over_tls(tmp_path: Path) -> None:
    if why := network_namespaces.why_not() or certificates.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-t{os.getpid()}", (BRAIN, *NODES), ("manage", "train")) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        address = network.address(BRAIN, "manage")
        pair = Pair(tmp_path / "certs", address)
        cluster, twins = HostsCluster(tmp_path, network, {}, pair=pair), Twins(tmp_path)
        try:
            client = cluster.start()
            assert client.url == f"https://{address}:8420"
            assert client.get("/v1/state")["cluster"]["insecure"] is False
            for port in (8420, 8421):  # neither answers what is not TLS
                with socket.create_connection((address, port), timeout=10) as link:
                    link.sendall(b"PING\r\n\r\n")
                    said = link.recv(99)
                    assert not re.search(b"PONG|HTTP", said), said
            spec = small(
                "secret", tmp_path / "out", slots=(2, 2), iterations=40, checkpoint_every=20
            )
            task = cluster.submit(spec)
            assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
            twins.hold(*twins.start(spec), cluster.losses(task))
            # An agent that starts again has kept the authority.
            kept = StateDir(tmp_path / "h2").ca.read_text()
            assert kept == pair.ca.read_text()
            after = cluster.seq()
            for pid in network.pids("h2"):
                os.kill(pid, 9)
            cluster.start_agent("h2", again=True)
            cluster.wait_told(after, "NodeJoined", node="h2")
        finally:
            twins.stop()
            cluster.stop()
