"""Two hosts whose addresses are IPv6: control plane, relay, stores and ranks all use them, at ports
of a range that a firewall can name."""

from __future__ import annotations

import os
from pathlib import Path

import network_namespaces
import pytest
from agent_driver import new_shim
from hosts.cluster import BRAIN, TRAIN, HostsCluster
from hosts.network import laid
from twins import Twins, small
from unicron.events import network_address
from unicron.events.errors import UsageError
from unicron.workers.agent.checkpoint_store import CheckpointStore

NODES = ("h1", "h2")
HOSTS = (BRAIN, *NODES)
PORTS = (21000, 21999)
"""The range that the kernel of each host gives ports from, for a firewall."""


@pytest.mark.thorough
def test_a_task_trains_over_ipv6(tmp_path: Path) -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-v{os.getpid()}", HOSTS, ("manage", TRAIN)) as network,
        network_namespaces.within(network.namespace(BRAIN)),
    ):
        cluster, twins = HostsCluster(tmp_path, network, {}, version=6), Twins(tmp_path)
        try:
            for node in NODES:
                network.set_ports(node, *PORTS)
            client = cluster.start()
            assert client.url == f"http://[{network.address(BRAIN, 'manage', 6)}]:8420"
            spec = small("six", tmp_path / "out", slots=(2, 2), iterations=40, checkpoint_every=20)
            task = cluster.submit(spec)
            assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
            addresses = {node: network.address(node, TRAIN, 6) for node in NODES}
            for record in cluster.told(0, "RankReady", task=task):
                started = cluster.told(0, "RankStarted", rank=record.body.rank)[-1].body
                assert record.body.endpoint.startswith(f"[{addresses[started.node]}]:"), record
            assert cluster.told(0, "MemoryCheckpointStored", task=task)
            for node in NODES:
                listening = network.listening(node)
                assert {address for address, _ in listening} == {addresses[node]}
                assert all(PORTS[0] <= port <= PORTS[1] for _, port in listening), listening
            twins.hold(*twins.start(spec), cluster.losses(task))
        finally:
            twins.stop()
            cluster.stop()


async def test_a_full_range_of_ports_is_one_line(tmp_path: Path) -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-f{os.getpid()}", ("h1",), (TRAIN,)) as network,
        network_namespaces.within(network.namespace("h1")),
    ):
        network.set_ports("h1", 21000, 21001)
        host = network.address("h1", TRAIN)
        taken = [network_address.listen(host) for _ in range(2)]
        shim = new_shim(tmp_path)
        try:
            with pytest.raises(UsageError, match=f"listen at {host}: Address already in use"):
                CheckpointStore(
                    host,
                    b"",
                    {},
                    ("UNICRON_PROCESS", "test"),
                    tmp_path / "log",
                    lambda task, why: None,
                    1,
                    shim,
                )
        finally:
            shim.end()
            for one in taken:
                one.close()


def test_addresses_of_a_host(tmp_path: Path) -> None:
    if why := network_namespaces.why_not():
        pytest.skip(why)
    with (
        laid(f"unicron-a{os.getpid()}", ("h1", "h2"), ("manage", TRAIN)) as network,
        network_namespaces.within(network.namespace("h1")),
    ):
        assert network_address.interfaces() == [
            ("lo", "127.0.0.1"),
            ("manage", network.address("h1", "manage")),
            (TRAIN, network.address("h1", TRAIN)),
            *network_address.interfaces()[3:],
        ]
        network_namespaces.ip("address", "add", "10.99.0.1/24", "dev", TRAIN)  # a second address
        for version in (4, 6):
            mine = network.address("h1", TRAIN, version)
            assert network_address.interface_of(mine) == TRAIN
            assert network_address.own_address(mine, "--advertise") == mine
            peer = network.address("h2", TRAIN, version)
            assert network_address.address_towards(peer, 80) == mine
            with pytest.raises(UsageError, match="no address"):
                network_address.own_address(peer, "--advertise")
        assert network_address.interface_of("10.99.0.1") == TRAIN
        assert network_address.own_address(TRAIN, "--advertise") == network.address("h1", TRAIN)
