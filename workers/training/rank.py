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
import traceback
import warnings
from types import TracebackType
from typing import NoReturn, TextIO, cast

import structlog

from ...events.errors import UsageError
from ...events.orders import StartRank
from ...events.reports import RankErrored
from ...events.talk import Talk
from ..pulse import Pulse
from ..wire import Frame, Unpacker
from .control import EXIT_AGENT_GONE, RECEIVE_BYTES, Control

OURS = ("control", "wake", "reports", "collective", "left behind", "checkpoint", "copies")
"""How the names of the threads begin that a rank starts: without one of them it is not whole."""
EXPENDABLE = ("flight recorder",)
"""Those without which it is whole all the same: their error is a line in the log."""
TEXT_CHARS_MAX = 4000
"""Characters of an error that are told; its end, where the cause is."""
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

    Marks are written to the page of file `pulse` (workers/pulse.py), or nowhere.
    """
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unpacker = Unpacker()
    order, early = _first(connection, unpacker)
    control = Control(connection, order.rank, unpacker)
    control.start(early)
    last_words = LastWords(control, order)
    sys.excepthook = last_words.say
    threading.excepthook = last_words.say_of_thread
    _prepare(os.environ.get("UNICRON_HOST", "127.0.0.1"))
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Talk(sys.stdout))))

    load()
    from .member import Member

    member = Member(control, order, os.environ, Pulse(pulse))
    last_words.member = member
    member.live()
    _end(control, 0)


def load() -> None:
    """Import torch and Megatron, once: it takes seconds, and a zygote has done it before."""
    quiet()
    from . import cpu

    with cpu.uncompiled():
        from . import member

    assert member


class LastWords:
    """Says RankErrored for whatever ends the process, and ends it."""

    def __init__(self, control: Control, order: StartRank) -> None:
        self._control = control
        self._order = order
        self.member: object | None = None

    def say(self, kind: type[BaseException], error: BaseException,
            trace: TracebackType | None) -> None:
        """As sys.excepthook."""
        lines = traceback.format_exception(kind, error, trace)
        if isinstance(error, UsageError):
            text = f"{error} ({error.hint})"
        else:
            text = "".join(lines)
        Talk(sys.stderr).write(text if text.endswith("\n") else text + "\n")
        self._control.tell(RankErrored(
            task=self._order.task, rank=self._order.rank, attempt=self._order.attempt,
            generation=getattr(self.member, "generation", 0),
            iteration=max(getattr(self.member, "step_version", 0), 0),
            error=kind.__name__, text=text[-TEXT_CHARS_MAX:],
        ))
        _end(self._control, 1)

    def say_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """As threading.excepthook: what one of OURS did not expect is no smaller a fault.

        A thread of a library's is none of the training: its error is a line in the log.
        """
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else ""
        error = args.exc_value or args.exc_type()
        if name.startswith(OURS):
            self.say(args.exc_type, error, args.exc_traceback)
        trace = "".join(traceback.format_exception(args.exc_type, error, args.exc_traceback))
        Talk(sys.stderr).write(f"thread {name} has ended, training goes on: {trace}")


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
    from .sockets import interface_of

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


def _end(control: Control, code: int) -> NoReturn:
    """End, all told, without torch's own tidying, which waits for peers."""
    control.flush()
    Talk(sys.stdout).flush()
    Talk(sys.stderr).flush()
    os._exit(code)


if __name__ == "__main__":
    main()
