"""Output streams: data on stdout, messages on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable


def open_streams() -> None:
    """Open each closed standard stream (`>&-`, cron) on /dev/null, before a file takes its
    number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # child processes need the stream too
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class PipeClosed(Exception):
    """The reader of stdout has closed the pipe, as in `unicron tail | head`."""


def out(text: str = "") -> None:
    """Print one line on stdout and flush it for readers of a pipe. Raises PipeClosed."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosed from None


def lines(texts: Iterable[str]) -> None:
    """Print each text on a line of stdout. Raises PipeClosed."""
    for text in texts:
        out(text)


def show(data: object, screen: Iterable[str], *, as_json: bool) -> None:
    """Print the screen, or with `as_json` the data as one JSON object. Raises PipeClosed."""
    lines([json.dumps(data)] if as_json else screen)


def talk(text: str) -> None:
    """Print one line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def error(message: str, hint: str = "") -> None:
    """Print an error line and a hint on stderr."""
    talk("error: " + " ".join(message.split()))
    if hint:
        talk("hint: " + " ".join(hint.split()))
