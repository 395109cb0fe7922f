"""Ctrl-C, termination and hangup interrupt a program once: its end, which stops what it started and
removes its files, is not interrupted."""

from __future__ import annotations

import signal
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def once() -> None:
    """The first of STOPS raises KeyboardInterrupt, and no other one does. A shell's background
    ignores Ctrl-C, which still interrupts; nohup ignores a hangup, and it stays ignored."""
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def end() -> None:
    """From now on nothing interrupts."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    end()
    raise KeyboardInterrupt
