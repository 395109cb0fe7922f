"""A rank that breaks its contract with its agent: `hostile_rank.py HOW [WORD]`, the program of a
task. `attack.py` tries to leave its task; this one does harm from inside.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import msgspec
from unicron.workers.ipc.pipe_protocol import FD, PULSE, Unpacker
from unicron.workers.ipc.progress_page import PAGE_BYTES, ProgressWriter

DEPTH_NUM = 5_000
KIND_AT, OWN_TIME_AT = 33, 256 + 64 + 32
"""Where the page has a mark's `kind`, and the own time of the first finished iteration."""
STAYS_S = 600.0


def cut_page(word: str) -> None:
    """The agent's look at its mapping would be a SIGBUS."""
    os.ftruncate(int(os.environ[PULSE]), 0)


def wrong_kind(word: str) -> None:
    """A kind of iteration that there is not, in every mark."""
    fd = int(os.environ[PULSE])
    ProgressWriter(os.dup(fd)).begin(1, 1, "usual")
    for place in (0, 128):
        os.pwrite(fd, b"\xc8", place + KIND_AT)


def not_a_number(word: str) -> None:
    """Iterations that took no number of seconds."""
    fd = int(os.environ[PULSE])
    writer, nan = ProgressWriter(os.dup(fd)), struct.pack("<d", float("nan"))
    for iteration in range(200):
        writer.begin(1, iteration, "usual")
        time.sleep(0.02)
        writer.finish()
        for at in range(OWN_TIME_AT, PAGE_BYTES - 8, 64):
            os.pwrite(fd, nan, at)


def deep_frame(word: str) -> None:
    """A report below the limit of a frame, whose body is a map in a map, and so on."""
    encode = msgspec.msgpack.encode
    with socket.socket(fileno=int(os.environ[FD])) as pipe:
        next(iter(Unpacker().feed(pipe.recv(1 << 20))))
        head = {"kind": "RankReady", "v": 1, "seq": 0, "epoch": 0, "at_s": time.time()}
        data = (
            bytes([0x80 + len(head) + 1])
            + b"".join(encode(name) + encode(value) for name, value in head.items())
            + encode("body")
            + b"\x81\xa1a" * DEPTH_NUM
            + b"\xc0"
        )
        pipe.sendall(struct.pack(">I", len(data)) + data)
        time.sleep(STAYS_S)


def chatty(word: str) -> None:
    """Output without end."""
    while True:
        sys.stdout.write("x" * 1_000_000)
        time.sleep(0.005)


def orphan(word: str) -> None:
    """A process that has left parent, session and environment; it sleeps for WORD seconds."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execve("/bin/sleep", ["sleep", word], {})
        os._exit(0)
    time.sleep(STAYS_S)


HOW: dict[str, Callable[[str], None]] = {
    one.__name__: one for one in (cut_page, wrong_kind, not_a_number, deep_frame, chatty, orphan)
}


def main() -> None:
    how, word = (*sys.argv[1:], "")[:2]
    HOW[how](word)
    time.sleep(STAYS_S)


if __name__ == "__main__":
    main()
