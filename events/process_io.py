"""Standard streams and signals of every process of ours."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


class Talk(io.TextIOBase):
    """`stream`, for a logger; what cannot be written (a full disk, a closed terminal) is dropped.

    Without it the first line that does not fit would end a control plane, an agent with all its
    ranks, or a rank.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


# --- A stretch in which SIGINT and SIGTERM wait: between a process's start and the note of its pid.
# ---


@contextmanager
def uninterrupted() -> Generator[None]:
    """What comes meanwhile is met at the end. A blocked mask would be inherited; this is not."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    met = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    for number in met:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in met:
            signal.signal(number, before[number])
        for late in came:
            os.kill(os.getpid(), late)
