"""A daemon thread for calls that may block for ever.

An executor does not fit: the interpreter joins its threads at exit, so a process that is done would
block until an old collective or a hanging driver returns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Calls = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class DetachedThread:
    """Runs calls one by one in a daemon thread, until nothing refers to this object any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls = SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """A future of the result of `call`, or of its exception. It cannot be cancelled."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name=self._name,
                                            daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((call, future))
        return future


def _serve(calls: _Calls) -> None:
    while (found := calls.get()) is not None:
        _run(*found)
        del found  # otherwise its result or exception lives until the next call


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
        future.set_exception(error)
        del future  # its exception holds this frame
    else:
        future.set_result(result)
