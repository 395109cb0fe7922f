"""The process of one training rank: `python -m unicron.workers.training.rank --fd N --pulse M`.

Life: read StartRank from the agent's socket N; listen on it from a thread of its own; import torch
and Megatron; build model, data and optimizer alone; say RankReady; then do what orders say, for as
long as the agent lives (member.py). It ends

- with exit code 0 after RankFinished;
- with exit code 1 after RankErrored, whatever was raised, in whichever of its own threads;
- with exit code 3 as soon as the agent's end of the socket is closed;
- with exit code 4 when it was told to stop and what it waits in cannot be ended, or when it has
  left too much behind (control.py);
- by SIGTERM at once: nothing of a rank needs tidying, and a checkpoint appears only when whole.

Environment: UNICRON_HOST, the address at which other ranks reach this one (default 127.0.0.1);
UNICRON_TRACE_DIR (trace.py).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import warnings
from typing import NoReturn, TextIO, cast

import structlog

from ...events.process_io import Talk
from ...events.records.orders import StartRank
from ..ipc.pipe_protocol import Frame, Unpacker
from ..ipc.progress_page import Pulse
from .process.control_thread import EXIT_AGENT_GONE, RECEIVE_BYTES, Control
from .process.exit_report import LastWords, end

FLIGHT_ENTRIES_NUM_MAX = 512
"""What torch's flight recorder keeps: at some 500 bytes each, a dump stays well under 1 MB."""


def main() -> None:
    """Be a rank until there is nothing left to do."""
    parser = argparse.ArgumentParser(prog="unicron.workers.training.rank")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pulse", type=int, default=-1)
    asked = parser.parse_args()
    be(asked.fd, asked.pulse)


def be(fd: int, pulse: int = -1) -> NoReturn:
    """Be the rank at the other end of socket `fd`, in this process. Never returns.

    Marks are written to the page of file `pulse` (workers/ipc/progress_page.py), or nowhere.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, order, last_words = meet_agent(fd)
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Talk(sys.stdout))))

    load()
    from .member import Member
    from .model.workload import House

    assert order.spec.train is not None, "a command has no rank of ours"
    member = Member(control, order, os.environ, Pulse(pulse), House(order.spec.train))
    last_words.member = member
    member.live()
    end(control, 0)


def meet_agent(fd: int) -> tuple[Control, StartRank, LastWords]:
    """Read the first order from socket `fd`, and listen from now on; what ends this process, in
    whichever thread, is told first."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    unpacker = Unpacker()
    order, early = _first(connection, unpacker)
    control = Control(connection, order.rank, unpacker)
    control.start(early)
    last_words = LastWords(control, order)
    sys.excepthook = last_words.say
    threading.excepthook = last_words.say_of_thread
    _prepare(os.environ.get("UNICRON_HOST", "127.0.0.1"))
    return control, order, last_words


def load() -> None:
    """Import torch and Megatron, once: it takes seconds, and a zygote has done it before."""
    quiet()
    from .model import cpu_device

    with cpu_device.uncompiled():
        # Else the first optimizer of each process does: measured, 0.8 of the 1.0 s that the CPU
        # took for a rank out of a zygote, while the survivors change their layout beside it.
        import torch._dynamo

        from . import member as training_member

    assert training_member
    assert torch._dynamo


def _first(connection: socket.socket, unpacker: Unpacker) -> tuple[StartRank, list[Frame]]:
    """StartRank, and what came with it."""
    while True:
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            os._exit(EXIT_AGENT_GONE)
        frames = unpacker.feed(data)
        if frames:
            order = frames[0].body
            assert isinstance(order, StartRank), f"{type(order).__name__} before StartRank"
            return order, frames[1:]


def _prepare(host: str) -> None:
    """What must be in the environment before torch is imported."""
    from .communicators.sockets import interface_of

    interface = interface_of(host)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # torch must not end the process, nor hold it, on an NCCL error: the rank reports and holds.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES_NUM_MAX))


def quiet() -> None:
    """Leave out warnings that are of no use here."""
    # Said once per rank and never of use: Apex and Transformer Engine are optional, and absent.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.distributed")


if __name__ == "__main__":
    main()
