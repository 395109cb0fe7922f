"""The sockets of this process: which are a generation's, and how to wake who sleeps on them."""

from __future__ import annotations

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
    """Open sockets of this process: inode -> descriptor."""
    found: dict[Inode, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found


def watch(connects: Callable[[Inode], None]) -> None:
    """From now on, for ever, call this for every connection that Python code is about to make.

    torch, gloo and NCCL make theirs in C++, which Python never hears of: what is told here is of
    none of them. In the thread that connects; encrypted later, it stays the same socket.
    Source: Python's audit event `socket.connect`.
    """
    def hear(event: str, details: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            with suppress(OSError):
                connects(os.fstat(details[0].fileno()).st_ino)

    sys.addaudithook(hear)


def shut_down(mine: Iterable[Inode], server_port: int) -> int:
    """Shut down every connection but `mine` and those that our own store serves; how many.

    A shut connection wakes both ends at once, unlike everything that gloo offers. It is never
    done to a listening socket, which would abort the process.
    """
    num_shut = 0
    for connection in _others(mine, server_port):
        with suppress(OSError):
            if not _listens(connection):
                connection.shutdown(socket.SHUT_RDWR)
                num_shut += 1
    return num_shut


def knock(mine: Iterable[Inode], server_port: int, num: int) -> None:
    """Have every listener but `mine` and our own store's find `num` peers that are gone at once.

    A gloo pair that waits to be connected to has no socket that could be shut, and waits for five
    times its group's timeout. Whoever connects says which pair it means, by a number from 0 on.
    Source: gloo/transport/tcp, Pair::waitUntilConnected and Device::connectAsInitiator.
    """
    for listener in _others(mine, server_port):
        for number in range(num if _listens(listener) else 0):
            with suppress(OSError), socket.create_connection(
                    listener.getsockname()[:2], KNOCK_S_MAX) as peer:
                peer.sendall(struct.pack("=q", number))


def _others(mine: Iterable[Inode], server_port: int) -> Iterator[socket.socket]:
    """Each TCP socket but `mine` and our own store's, as a duplicate that is closed afterwards.

    The inode is looked at again after the descriptor has been duplicated: by then it may have
    become another's.
    """
    spared = frozenset(mine)
    for inode, descriptor in inodes().items():
        if inode in spared:
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            continue
        with suppress(OSError), socket.socket(fileno=copy) as found:
            if (found.family in (socket.AF_INET, socket.AF_INET6)
                    and found.getsockname()[1] != server_port):
                yield found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def interface_of(host: str) -> str:
    """The network interface that has this IPv4 address; "" when it cannot be told.

    Source: netdevice(7), SIOCGIFADDR.
    """
    import fcntl

    siocgifaddr = 0x8915
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
