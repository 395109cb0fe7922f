"""A call that may block for ever, with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ...host.detached_thread import DetachedThread

T = TypeVar("T")


class Late(Exception):
    """The call has not returned within its limit; its thread still waits for it."""


class BlockingCalls(Generic[T]):
    """Makes one call at a time. No other call begins while one hangs, so threads do not pile up."""

    def __init__(self, name: str) -> None:
        self._thread = DetachedThread(name)
        self._pending: Future[T] | None = None

    async def call(self, function: Callable[[], T], s_max: float) -> T:
        """The function's result or exception. Raises Late after `s_max`; the next call waits on."""
        if self._pending is None:
            self._pending = self._thread.submit(function)
        waiting = asyncio.wrap_future(self._pending)
        try:
            done, _ = await asyncio.wait((waiting,), timeout=s_max)
        finally:
            waiting.cancel()  # only the wait: the loop may be closed when a late call returns
        if not done:
            raise Late
        self._pending = None
        return waiting.result()
