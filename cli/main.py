"""Entry point of `unicron`: handles Ctrl-C also while the CLI is being imported."""

import os
import signal
import sys
from types import FrameType

from .terminal.console import open_streams

EXIT_INTERRUPTED = 130


def main() -> None:
    """Import the CLI, run the command, exit with its code."""
    open_streams()
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if handled:  # no KeyboardInterrupt in the middle of an import
            signal.signal(signal.SIGINT, _end)
        from .app import run_command

        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over: ignore a late Ctrl-C
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
