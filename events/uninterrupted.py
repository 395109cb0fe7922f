"""A stretch in which SIGINT and SIGTERM wait: between a process's start and the note of its pid."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


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
