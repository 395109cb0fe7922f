"""Where `unicron` begins: Ctrl-C ends it in order while the face is still being loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130


def main() -> None:
    """Load the face, run the command, end with its exit code."""
    open_streams()
    taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    try:
        if taken:  # no exception: it would surface in whatever is being loaded
            signal.signal(signal.SIGINT, _end)
        from .main import run_command

        if taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is done is done
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def open_streams() -> None:
    """Where a standard stream is closed (`>&-`, a bare cron), have it be /dev/null: what is opened
    next would else take its number, and be read or written in its stead."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # those that it starts are no better off
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)
