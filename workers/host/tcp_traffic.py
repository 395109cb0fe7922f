"""What TCP connections have carried so far.

/proc/PID/io counts read() and write(), but neither recv() nor send(), so a download may be in no
count of it.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

_ANSWER_BYTES = 1 << 16
_TIMEOUT_S = 0.2
_SOCK_DIAG, _INFO = 4, 2
"""The netlink protocol that tells of sockets, as `ss` uses it; the attribute that is the kernel's
tcp_info."""
_BY_FAMILY, _DUMP = 20, 0x301
_DONE, _ERROR = 3, 2
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_REQUEST = struct.Struct("=BBBBI48x")
_SOCKET_BYTES, _INODE_AT = 72, 68
_CARRIED, _CARRIED_AT = struct.Struct("=QQ"), 120
"""What a peer has acknowledged and what was received, in tcp_info."""


def sockets_of(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; none without permission to read this."""
    inodes = set[int]()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError, ValueError):  # it was closed meanwhile
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
                if kind == "socket":
                    inodes.add(int(inode[:-1]))
    return inodes


def carried_bytes(inodes: Collection[int]) -> int:
    """What these sockets have sent and received, in bytes; 0 if the kernel does not tell."""
    if not inodes:
        return 0
    with suppress(OSError, struct.error):
        return sum(
            num_bytes
            for family in (socket.AF_INET, socket.AF_INET6)
            for inode, num_bytes in _connections(family)
            if inode in inodes
        )
    return 0


def _connections(family: int) -> Iterator[tuple[int, int]]:
    """Inode and carried bytes of every open connection of this host."""
    states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, states)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_TIMEOUT_S)
        link.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = link.recv(_ANSWER_BYTES)
            while len(data) >= _HEADER.size:
                num, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR):
                    return
                yield _connection(data[_HEADER.size : num])
                data = data[max(num + 3 & ~3, _HEADER.size) :]


def _connection(message: bytes) -> tuple[int, int]:
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    at = _SOCKET_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        num, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO and num >= _ATTRIBUTE.size + _CARRIED_AT + _CARRIED.size:
            return inode, sum(_CARRIED.unpack_from(message, at + _ATTRIBUTE.size + _CARRIED_AT))
        at += max(num + 3 & ~3, _ATTRIBUTE.size)
    return inode, 0
