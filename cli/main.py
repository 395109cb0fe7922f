"""Where `unicron` begins: Ctrl-C ends it in order while the face is still being loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from .terminal.console import open_streams

EXIT_INTERRUPTED = 130


def main() -> None:
    """Load the face, run the command, end with its exit code."""
    open_streams()
    taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    try:
        if taken:  # no exception: it would surface in whatever is being loaded
            signal.signal(signal.SIGINT, _end)
        from .app import run_command

        if taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is done is done
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
