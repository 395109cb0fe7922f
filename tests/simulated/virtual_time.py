"""An asyncio event loop whose clock advances only when no callback is ready to run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Every task waits for another and no timer runs: in real time this would hang."""


class _Instant(selectors.SelectSelector):
    """Advances its clock where a real selector would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("every task waits and no timer runs")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs hours in milliseconds and deterministically; no sockets, threads or processes."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._instant.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time. Raises Stalled where real time would hang."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
