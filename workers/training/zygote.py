"""A process with torch and Megatron loaded, from which ranks are forked: `... --fd N --agent PID`.

It imports what a rank imports, says Ready on socket N, and then forks one rank for each Wanted that
comes with its files. A fork of a process that has threads, an event loop or a CUDA context is
broken, so it makes sure that it has none, and ends with exit code 1 where an import has started a
thread: ranks are then started by exec as well as ever, only slower.

The rank is no child of the zygote: it is forked twice, and so adopted by the agent, which watches,
signals and reaps it as any process that it has started itself. Ends with its agent.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec

from ..host import linux
from ..ipc.fork_protocol import FDS_NUM_MAX, REQUEST_BYTES_MAX, Told, Wanted
from . import rank

ADOPTED_S_MAX = 5.0


def main() -> None:
    """Load, then fork on request, until the agent's end of the socket is closed."""
    parser = argparse.ArgumentParser(prog="unicron.workers.training.zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    asked = parser.parse_args()
    connection = socket.socket(fileno=asked.fd)
    connection.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank.load()
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        sys.exit(f"{num_threads} threads after the imports: nothing can be forked from here")
    gc.collect()
    gc.freeze()
    connection.send(msgspec.msgpack.encode(Told()))
    while True:
        data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, FDS_NUM_MAX)
        if not data:
            return
        _fork(connection, asked.agent, msgspec.msgpack.decode(data, type=Wanted), fds)


def _fork(connection: socket.socket, agent: int, wanted: Wanted, fds: list[int]) -> None:
    """Fork twice; the one between tells the rank's pid and ends."""
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            _be_rank(connection, agent, wanted, fds)
        connection.send(msgspec.msgpack.encode(Told(pid=pid)))
        os._exit(0)
    for fd in fds:
        os.close(fd)
    os.waitpid(between, 0)


def _be_rank(connection: socket.socket, agent: int, wanted: Wanted, fds: list[int]) -> NoReturn:
    """Become what `rank.py` is when it is started by itself."""
    os.setsid()
    connection.close()
    log, pipe, *pulse = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(wanted.env)
    last_s = time.monotonic() + ADOPTED_S_MAX
    while os.getppid() != agent:
        if time.monotonic() > last_s:
            os._exit(1)  # the agent is gone, or adopts nobody
        time.sleep(ADOPTED_S_MAX / 10_000)
    linux.die_with(agent)
    linux.call_oneself(f"rank {wanted.env['UNICRON_RANK']}")
    rank.be(pipe, *pulse)


if __name__ == "__main__":
    main()
