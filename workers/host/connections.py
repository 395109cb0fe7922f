"""TCP connections of a process on which what it has sent is not acknowledged."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

PEERS_NUM_MAX = 16


def silent_peers(pid: int) -> tuple[str, ...]:
    """The addresses that did not acknowledge what was sent twice; empty if /proc does not tell."""
    found, own = set[str](), set[str]()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, _, peer, _, queues, _, retries, _, _, inode = line.split()[:10]
                # While this host's own interface is down, the retries stay at 1.
                if f"socket:[{inode}]" in own and int(retries, 16) and (
                        int(queues.partition(":")[0], 16)):
                    found.add(_address(peer.partition(":")[0]))
    except (OSError, ValueError):  # the process has ended
        return ()
    return tuple(sorted(found)[:PEERS_NUM_MAX])


def _address(text: str) -> str:
    """The address of its hex digits: words of four bytes, each in the machine's order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")
