"""A thread to wait in for others, which may have to be left behind.

An executor's would do, but that the interpreter waits for those before it ends: a script that has
trained all it had to would stand for as long as a collective of long ago.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Apart:
    """Does one call after the other."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The future has what `call` returns, or raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._asked,), name="collective",
                                            daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._asked.put((call, future))
        return future

    def leave(self) -> None:
        """Nobody asks any more: the thread ends with what it does now."""
        self._asked.put(None)


def _serve(asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (found := asked.get()) is not None:
        _do(*found)
        del found  # or what it returned, or raised, would be kept until the next


def _do(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
        future.set_exception(error)
        del future  # whose error has this frame
    else:
        future.set_result(result)
