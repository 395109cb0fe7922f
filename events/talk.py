"""Talk: a stream for people to read, whose end is not the end of whoever talks."""

from __future__ import annotations

import contextlib
import io
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
