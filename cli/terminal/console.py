"""Where words go: stdout is data, stderr is talk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


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


class ReaderGone(Exception):
    """Whoever read our answer has seen enough: `unicron tail | head`."""


def out(text: str = "") -> None:
    """One line of the answer, flushed: somebody may be following. Raises ReaderGone."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def lines(texts: Iterable[str]) -> None:
    """The answer, a line each. Raises ReaderGone."""
    for text in texts:
        out(text)


def talk(text: str) -> None:
    """One line beside the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def error(message: str, hint: str = "") -> None:
    """One line, then what to type."""
    talk("error: " + " ".join(message.split()))
    if hint:
        talk("hint: " + " ".join(hint.split()))
