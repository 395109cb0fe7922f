"""Ends the connections of a generation, which are told apart by the addresses of their ends.

The process has connections of its own, too: to an object store, to a metrics service, between
processes of the user. Who opened a socket, and when, does not say whose it is; a storage driver
may connect in any thread, and in C. But each connection of a generation has an end that the
generation's store names: gloo publishes there the address on which each member listens, and one
end of each of its connections is such an address. Source: gloo/transport/tcp/context.cc.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Any, NamedTuple

import torch.distributed as dist

from ..dependencies import private_torch

Inode = int
End = tuple[str, int]
"""An IP address and a port. An IPv4 address that a socket of IPv6 shows is written as IPv4."""
CONNECT_S_MAX = 0.1
SYN_SENT_CODE = 2
"""A TCP socket that is connecting. Source: include/net/tcp_states.h of Linux."""
TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


class Ends:
    """The named ends of one generation. Any thread may add one, or ask."""

    def __init__(self) -> None:
        self.listeners = set[End]()
        """Where gloo listens in this process."""
        self.peers = set[End]()
        """Where gloo listens in the other members, and the generation's store."""

    def add_store(self, host: str, port: int) -> None:
        """The store, at all addresses of its host. Raises OSError if it has none."""
        for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self.peers.add(_end(address))

    def has(self, local: End, remote: End) -> bool:
        """Whether a connection between these is of the generation."""
        return remote in self.peers or remote in self.listeners or local in self.listeners


class NamingStore(dist.Store):
    """The store of a generation, as gloo uses it: what gloo publishes in it, and reads, names ends.

    gloo asks from its own threads. Each method is that of the store beneath.
    """

    def __init__(self, store: Any, ends: Ends) -> None:
        super().__init__()
        self._store, self._ends = store, ends

    def set(self, key: str, value: Any) -> None:
        if address := private_torch.gloo_address(key, bytes(value)):
            self._ends.listeners.add(_end(address))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._named(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        return [self._named(key, value) for key, value in zip(keys, values, strict=True)]

    def _named(self, key: str, value: bytes) -> bytes:
        if address := private_torch.gloo_address(key, value):
            self._ends.peers.add(_end(address))
        return value

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        value: bytes = self._store.compare_set(key, expected_value, desired_value)
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # as torch's C++ asks for them

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._store.wait(keys, *(() if timeout is None else (timeout,)))

    def append(self, key: str, value: Any) -> None:
        self._store.append(key, value)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())


def shut_down(ends: Ends) -> None:
    """Shut down all connections of a generation. This wakes both ends immediately. To shut a
    listening socket down would abort the process."""
    connecting: dict[Inode, End] | None = None
    for inode, own in _tcp_sockets():
        with suppress(OSError):
            try:
                remote = _end(own.getpeername())
            except OSError:  # it listens, is closed, or waits for an answer of its peer
                if own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != SYN_SENT_CODE:
                    continue
                connecting = _connecting() if connecting is None else connecting
                remote = connecting.get(inode, ("", 0))
            if ends.has(_end(own.getsockname()), remote):
                own.shutdown(socket.SHUT_RDWR)


def connect_to_listeners(ends: Ends, num: int) -> None:
    """Connect `num` peers, which disconnect immediately, to each of the generation's listeners in
    this process: a gloo pair that waits for a connection has no socket to shut down. A peer that
    connects sends the number of the pair, counted from 0. Source: gloo/transport/tcp,
    Pair::waitUntilConnected and Device::connectAsInitiator."""
    for _, listener in _tcp_sockets():
        if not _listens(listener) or _end(listener.getsockname()) not in ends.listeners:
            continue
        for number in range(num):
            with suppress(OSError), socket.socket(listener.family) as peer:
                peer.settimeout(CONNECT_S_MAX)
                peer.connect(listener.getsockname())
                peer.sendall(struct.pack("=q", number))


def inodes() -> dict[Inode, int]:
    """The open sockets of this process: inode -> descriptor."""
    descriptors: dict[Inode, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            descriptors[status.st_ino] = int(name)
    return descriptors


class _Open(NamedTuple):
    inode: Inode
    socket: socket.socket


def _tcp_sockets() -> Iterator[_Open]:
    """Yield each TCP socket of this process as a duplicate, which is closed afterwards. The inode
    is checked again after the duplication: meanwhile the descriptor may have been reused."""
    for inode, descriptor in inodes().items():
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            continue
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            continue
        with suppress(OSError), socket.socket(fileno=duplicate) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                yield _Open(inode, own)


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _end(address: tuple[Any, ...]) -> End:
    """The end that the system, or gloo, names by this address."""
    host, port = str(address[0]).partition("%")[0], int(address[1])
    if ":" in host:
        plain = IPv6Address(host)
        host = str(plain.ipv4_mapped or plain)
    return host, port


def _connecting() -> dict[Inode, End]:
    """To where each connecting socket of this network connects, by inode: the system tells the
    process of its own socket only once the peer has answered. Source: proc_net_tcp in Linux."""
    targets: dict[Inode, End] = {}
    for path in TABLES:
        with suppress(OSError), open(path) as table:
            next(table, None)
            for line in table:
                fields = line.split()
                if int(fields[3], 16) == SYN_SENT_CODE:
                    targets[int(fields[9])] = _end_in_table(fields[2])
    return targets


def _end_in_table(text: str) -> End:
    """`0100007F:1F90` of such a table: words in the machine's order of bytes."""
    words, port = text.split(":")
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return _end((socket.inet_ntop(family, raw), int(port, 16)))
