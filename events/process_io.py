"""Standard streams, log lines and signals of every Unicron process."""

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


class Seldom:
    """Says at most once in `every_s` that a line may be logged; counts the others."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next_s, self._num = every_s, 0.0, 0

    def due(self) -> int:
        """The number of events since the last line, with this one; 0: log nothing now."""
        self._num += 1
        if time.monotonic() < self._next_s:
            return 0
        num, self._num, self._next_s = self._num, 0, time.monotonic() + self._every_s
        return num


class LogStream(io.TextIOBase):
    """Wraps `stream` for a logger; drops output on a write error (full disk, closed terminal),
    which would otherwise end the process. When it can write again, a line tells how many lines
    could not be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_dropped = 0

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
            if num := self._num_dropped:
                line = {"event": "lines of this log could not be written", "num_lines": num}
                self._stream.write(json.dumps(line) + "\n")
                self._stream.flush()
                self._num_dropped = 0
        except OSError:
            self._num_dropped += 1

    def isatty(self) -> bool:
        return self._stream.isatty()


# --- Deferred signals, so that a child's pid is always written down ---


@contextmanager
def defer_signals() -> Generator[None]:
    """Defer SIGINT and SIGTERM to the end of the block. Child processes do not defer them."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    deferred = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    for number in deferred:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in deferred:
            signal.signal(number, before[number])
        for late in received:
            os.kill(os.getpid(), late)
