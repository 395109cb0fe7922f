"""The zygote: a process with torch and Megatron imported, from which an agent forks ranks.

`python -m unicron.workers.training.zygote --fd N --parent PID` sends a ForkReply on socket N when
it is ready, then forks a rank for each ForkRequest; the process PID, the shim, adopts it. It exits
with code 1 if an import has started a thread, and with its agent. docs/decisions/zygote.md.
"""

import argparse
import gc
import os
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec

from ...events.decoding import from_msgpack
from ...events.errors import UsageError
from ..host import linux, rank_cgroups, rank_user
from ..host.rank_user import RankUser
from ..ipc.pipe_protocol import FDS_NUM_MAX, REQUEST_BYTES_MAX, ForkReply, ForkRequest
from . import rank

ADOPTED_S_MAX = 5.0


def main() -> None:
    """Import torch and Megatron, then fork on request until the agent closes the socket."""
    parser = argparse.ArgumentParser(prog="unicron.workers.training.zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--run-as", default="")
    args = parser.parse_args()
    user = rank_user.find(args.run_as)
    connection = socket.socket(fileno=args.fd)
    connection.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rank.preload()
    except UsageError as error:  # a rank that is started by exec reports it
        sys.exit(f"{error} ({error.hint})")
    threads = linux.thread_names()
    if len(threads) > 1:
        sys.exit(f"the imports have started threads: {', '.join(threads[1:])}")
    gc.collect()
    gc.freeze()
    connection.send(msgspec.msgpack.encode(ForkReply()))
    while True:
        data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, FDS_NUM_MAX)
        if not data:
            return
        _fork(connection, args.parent, user, from_msgpack(data, ForkRequest), fds)


def _fork(
    connection: socket.socket,
    parent: int,
    user: RankUser | None,
    request: ForkRequest,
    fds: list[int],
) -> None:
    """The process in between sends the rank's pid and exits."""
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            _run_rank(connection, parent, user, request, fds)
        connection.send(msgspec.msgpack.encode(ForkReply(pid=pid)))
        os._exit(0)
    for fd in fds:
        os.close(fd)
    os.waitpid(between, 0)


def _run_rank(
    connection: socket.socket,
    parent: int,
    user: RankUser | None,
    request: ForkRequest,
    fds: list[int],
) -> NoReturn:
    """Run the rank as if rank.py had been started by exec."""
    os.setsid()
    connection.close()
    log, pipe, *pulse = fds
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((null, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(request.env)
    deadline_s = time.monotonic() + ADOPTED_S_MAX
    while os.getppid() != parent:
        if time.monotonic() > deadline_s:
            os._exit(1)  # the parent is gone, or adopts no orphans
        time.sleep(ADOPTED_S_MAX / 10_000)
    rank_cgroups.contain(request.cgroup)
    rank_user.become(user)
    linux.die_with(parent)  # a change of the user clears it
    linux.set_process_name(f"rank {request.env['UNICRON_RANK']}")
    rank.run_rank(pipe, *pulse)


if __name__ == "__main__":
    main()
