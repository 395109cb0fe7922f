"""Hosts on one machine: network namespaces, joined by networks whose cables can be cut.

Each network is a bridge in a namespace of its own, so nothing is visible on the machine's network.
On every host, each network is an interface of the same name, with an IPv4 and an IPv6 address.
Needs root, or the rights to create namespaces, and `ip`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from network_namespaces import IP_S_MAX, ip
from unicron.events.network_address import split_endpoint

NOWHERE = "02:00:00:00:00:99"
"""A link address that no host has: what is sent to it is lost."""
KILL_S_MAX = 10.0
POLL_S = 0.02


class Network:
    """Namespaces `MARK-HOST` and `MARK-switch`, from `hosts` on until `close`."""

    def __init__(self, mark: str, hosts: Sequence[str], networks: Sequence[str]) -> None:
        """`networks`: the names of the networks, and of each host's interfaces."""
        self.hosts, self.networks = tuple(hosts), tuple(networks)
        self._mark, self._switch = mark, f"{mark}-switch"

    def lay(self) -> None:
        """Create the namespaces and connect them."""
        ip("netns", "add", self._switch)
        for name in self.networks:
            ip("-n", self._switch, "link", "add", name, "type", "bridge")
            ip("-n", self._switch, "link", "set", name, "up")
        for host in self.hosts:
            inside = self.namespace(host)
            ip("netns", "add", inside)
            ip("-n", inside, "link", "set", "lo", "up")
            for name in self.networks:
                port = self._port(host, name)
                ip(
                    "-n",
                    self._switch,
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    name,
                    "netns",
                    inside,
                )
                ip("-n", self._switch, "link", "set", port, "master", name, "up")
                ip("-n", inside, "link", "set", name, "up")
                ip("-n", inside, "address", "add", f"{self.address(host, name)}/24", "dev", name)
                ip(
                    "-n",
                    inside,
                    "address",
                    "add",
                    f"{self.address(host, name, 6)}/64",
                    "dev",
                    name,
                    "nodad",
                )

    def close(self) -> None:
        """Kill what runs on the hosts, and remove the namespaces."""
        for host in self.hosts:
            with suppress(FileNotFoundError):
                self._kill(host)
        for name in (*map(self.namespace, self.hosts), self._switch):
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True, timeout=IP_S_MAX
            )

    def namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def address(self, host: str, network: str, version: int = 4) -> str:
        """The host's address in a network."""
        number, own = self.networks.index(network) + 1, self.hosts.index(host) + 1
        return f"10.77.{number}.{own}" if version == 4 else f"fd77:{number}::{own}"

    def start(
        self, host: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host."""
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *argv],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    # --- faults ---
    def cut(self, host: str, *networks: str) -> float:
        """Pull the host's cables of these networks, or of all; returns the time."""
        at_s = time.time()
        for name in networks or self.networks:
            ip("-n", self._switch, "link", "set", self._port(host, name), "down")
        return at_s

    def mend(self, host: str, *networks: str) -> None:
        """Put them back."""
        for name in networks or self.networks:
            ip("-n", self._switch, "link", "set", self._port(host, name), "up")

    def cut_one_way(self, host: str, peer: str, network: str) -> None:
        """From now on, what `host` sends to `peer` is lost; the other direction works."""
        for version in (4, 6):
            ip(
                "-n",
                self.namespace(host),
                "neighbour",
                "replace",
                self.address(peer, network, version),
                "lladdr",
                NOWHERE,
                "nud",
                "permanent",
                "dev",
                network,
            )

    def mend_one_way(self, host: str, peer: str, network: str, *, missing_ok: bool = False) -> None:
        for version in (4, 6):
            if missing_ok and not self._is_cut_one_way(host, peer, network, version):
                continue
            ip(
                "-n",
                self.namespace(host),
                "neighbour",
                "del",
                self.address(peer, network, version),
                "dev",
                network,
            )

    def _is_cut_one_way(self, host: str, peer: str, network: str, version: int) -> bool:
        shown = subprocess.run(
            [
                "ip",
                "-n",
                self.namespace(host),
                "neighbour",
                "show",
                self.address(peer, network, version),
                "dev",
                network,
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=IP_S_MAX,
        ).stdout
        return NOWHERE in shown

    def kill(self, host: str) -> float:
        """Power off: the host is silent from one moment to the next. Returns the time."""
        at_s = self.cut(host)
        self._kill(host)
        return at_s

    def pids(self, host: str) -> list[int]:
        """The processes that run on a host, except this one."""
        wanted = (Path("/run/netns") / self.namespace(host)).stat()
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                of = (folder / "ns/net").stat()
                if (of.st_dev, of.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(folder.name))
        return [pid for pid in found if pid != os.getpid()]

    def set_ports(self, host: str, first: int, last: int) -> None:
        """The range from which the kernel of a host takes the ports that nobody names."""
        subprocess.run(
            [
                "ip",
                "netns",
                "exec",
                self.namespace(host),
                "sh",
                "-c",
                f"echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range",
            ],
            check=True,
            capture_output=True,
            timeout=IP_S_MAX,
        )

    def listening(self, host: str) -> list[tuple[str, int]]:
        """The addresses and ports at which processes of a host listen."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self.namespace(host), "ss", "-Hltn"],
            check=True,
            capture_output=True,
            text=True,
            timeout=IP_S_MAX,
        ).stdout
        return [split_endpoint(line.split()[3]) for line in shown.splitlines()]

    def _kill(self, host: str) -> None:
        deadline_s = time.monotonic() + KILL_S_MAX
        while pids := self.pids(host):  # again: a process may have started another one
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline_s, f"{pids} on {host} survive SIGKILL"
            time.sleep(POLL_S)

    def _port(self, host: str, network: str) -> str:
        return f"p{self.hosts.index(host)}-{self.networks.index(network)}"


@contextmanager
def laid(mark: str, hosts: Sequence[str], networks: Sequence[str]) -> Iterator[Network]:
    """A network, removed at the end."""
    made = Network(mark, hosts, networks)
    try:
        made.lay()
        yield made
    finally:
        made.close()
