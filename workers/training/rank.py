"""The process of one training rank: `python -m unicron.workers.training.rank --fd N --pulse M`.

It reads StartRank from the agent's socket N, imports torch and Megatron, builds, reports RankReady,
then carries out orders (member.py). It exits

- with code 0 after RankFinished;
- with code 1 after RankErrored, at any exception that ends one of its own threads;
- with code 3 as soon as the agent's end of the socket is closed;
- with code 4 if its wait cannot be interrupted, or if it has abandoned too many collectives
  (process/control_thread.py);
- on SIGTERM immediately: a rank needs no cleanup, and a checkpoint appears only when complete.

Environment: UNICRON_HOST, the address at which other ranks reach this one (default 127.0.0.1);
UNICRON_TRACE_DIR (process/trace.py); UNICRON_BACKEND (communicators/communicators.py). The agent
sets the interface variables of gloo and NCCL (agent/processes/launcher.py).
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import NoReturn, TextIO, cast

import structlog

from ...events.process_io import LogStream
from ...events.records.orders import StartRank
from ..ipc import rank_variables
from ..ipc.pipe_protocol import Adopted, Frame, Unpacker, pack
from ..ipc.progress_page import ProgressWriter
from .process.control_thread import EXIT_AGENT_GONE, RECEIVE_BYTES, Control
from .process.exit_report import ExitReporter, exit_process
from .process.stack_answer import answer

FLIGHT_ENTRIES_NUM_MAX = 512
"""Entries in torch's flight recorder. At some 500 bytes each, a dump stays well under 1 MB."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="unicron.workers.training.rank")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pulse", type=int, default=-1)
    args = parser.parse_args()
    run_rank(args.fd, args.pulse)


def run_rank(fd: int, pulse: int = -1) -> NoReturn:
    """Run a rank for the agent at socket `fd`. `pulse`: the file of the progress page; -1: none."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, order, exit_reporter = connect_agent(fd)
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LogStream(sys.stdout)))
    )

    preload()
    from .dependencies.known_versions import warn_unknown
    from .member import Member
    from .model.workload import SpecWorkload

    assert order.spec.train is not None, "a command has no rank of ours"
    warn_unknown()
    member = Member(
        control, order, os.environ, ProgressWriter(pulse), SpecWorkload(order.spec.train)
    )
    exit_reporter.member = member
    for _ in member.steps():
        pass
    exit_process(control, 0)


def tell_adopted(fd: int) -> None:
    """Say to the agent at socket `fd` that this process has adopted Unicron, before it connects:
    what it imports and prepares until then may take minutes. Nothing else changes."""
    # If the agent cannot take it now, `adopt` says it again.
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.send(pack(Frame(body=Adopted(pid=0), at_s=time.time())), socket.MSG_DONTWAIT)


def connect_agent(fd: int) -> tuple[Control, StartRank, ExitReporter]:
    """Read the first order from socket `fd` and start the control thread. From then on, if an
    exception in any of the process's own threads ends the process, it is reported first."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    unpacker = Unpacker()
    early_frames = _first(connection, unpacker)
    order = early_frames[0].body
    assert isinstance(order, StartRank), f"{type(order).__name__} before StartRank"
    control = Control(connection, order.rank, unpacker)
    control.start(early_frames)
    answer(os.environ)
    exit_reporter = ExitReporter(control, order)
    sys.excepthook = exit_reporter.report
    threading.excepthook = exit_reporter.report_thread
    _prepare()
    return control, order, exit_reporter


def preload() -> None:
    """Import torch and Megatron. This takes seconds, so a zygote does it before it forks. Raises
    UsageError if a rank cannot train with their versions."""
    ignore_warnings()
    from .dependencies import known_versions
    from .model import cpu_device

    with cpu_device.uncompiled():
        # This imports torch._dynamo too (0.8 s). Otherwise the first optimizer of each process
        # would, also of a rank that is forked while the survivors wait for it.
        known_versions.require_parts()

        from . import member as training_member

    assert training_member


def _first(connection: socket.socket, unpacker: Unpacker) -> list[Frame]:
    """Read the first frame, and those that arrive together with it."""
    while True:
        data = connection.recv(RECEIVE_BYTES)
        if not data:
            os._exit(EXIT_AGENT_GONE)
        frames = unpacker.feed(data)
        if frames:
            return frames


def _prepare() -> None:
    """Set what must be in the environment before torch is imported."""
    for name, value in (rank_variables.NEEDED | rank_variables.STORE).items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES_NUM_MAX))


def ignore_warnings() -> None:
    # Apex and Transformer Engine are optional, and absent.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.distributed")


if __name__ == "__main__":
    main()
