"""Finds the sockets of a generation and interrupts the threads that wait on them."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

Inode = int
KNOCK_S_MAX = 0.1


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


def watch_connections(on_connect: Callable[[Inode], None]) -> None:
    """From now on, call `on_connect` before every connection that Python code makes, in the
    connecting thread. Those of torch, gloo and NCCL are made in C++ and are not reported. A socket
    that is encrypted later keeps its inode."""

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            with suppress(OSError):
                on_connect(os.fstat(details[0].fileno()).st_ino)

    sys.addaudithook(hook)


def shut_down(excluded: Iterable[Inode], server_port: int) -> None:
    """Shut down all connections except `excluded` and those of our own store. This wakes both ends
    immediately. To shut a listening socket down would abort the process."""
    for connection in _others(excluded, server_port):
        with suppress(OSError):
            if not _listens(connection):
                connection.shutdown(socket.SHUT_RDWR)


def connect_to_listeners(excluded: Iterable[Inode], server_port: int, num: int) -> None:
    """Connect `num` peers, which disconnect immediately, to every listener except `excluded` and
    that of our own store: a gloo pair that waits for a connection has no socket to shut down. A
    peer that connects sends the number of the pair, counted from 0. Source: gloo/transport/tcp,
    Pair::waitUntilConnected and Device::connectAsInitiator."""
    for listener in _others(excluded, server_port):
        for number in range(num if _listens(listener) else 0):
            with (
                suppress(OSError),
                socket.create_connection(listener.getsockname()[:2], KNOCK_S_MAX) as peer,
            ):
                peer.sendall(struct.pack("=q", number))


def _others(excluded: Iterable[Inode], server_port: int) -> Iterator[socket.socket]:
    """Yield each TCP socket except `excluded` and those of our own store, as a duplicate that is
    closed afterwards. The inode is checked again after the duplication: meanwhile the descriptor
    may have been reused."""
    excluded = frozenset(excluded)
    for inode, descriptor in inodes().items():
        if inode in excluded:
            continue
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            continue
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            continue
        with suppress(OSError), socket.socket(fileno=duplicate) as other:
            if (
                other.family in (socket.AF_INET, socket.AF_INET6)
                and other.getsockname()[1] != server_port
            ):
                yield other


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
