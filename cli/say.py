"""Where words go: stdout is data, stderr is talk."""

from __future__ import annotations

import sys
from collections.abc import Iterable


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
