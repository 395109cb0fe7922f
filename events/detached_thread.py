"""A daemon thread for calls that may take long, or block for ever.

An executor does not fit: the interpreter joins its threads at exit, so a process that is done would
block until an old collective, a hanging driver or a large plan returns.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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
            self._thread = threading.Thread(
                target=_serve, args=(self._calls,), name=self._name, daemon=True
            )
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


async def aside(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own; its result or error. A cancel ends only the wait."""
    return await asyncio.wrap_future(DetachedThread("aside").submit(call))


# --- A call with a time limit, on such a thread ---
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
