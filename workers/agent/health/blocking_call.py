"""Makes a call that may block for ever in a daemon thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Late(Exception):
    """The call has not returned within its limit; its thread still waits for it."""


class DetachedThread(Generic[T]):
    """Makes one call at a time. While a call hangs no other begins: threads cannot pile up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: asyncio.Future[T] | None = None

    async def call(self, function: Callable[[], T], s_max: float) -> T:
        """Return what `function` returns. Raises its OSError, ValueError or LookupError.

        Raises Late after `s_max`; then the next `call` waits for the same thread.
        """
        if self._pending is None:
            self._pending = _begin(function, self._name)
        pending = self._pending
        done, _ = await asyncio.wait((pending,), timeout=s_max)
        if not done:
            raise Late
        self._pending = None
        return pending.result()


def _begin(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            post(partial(_settle, future, function()))
        except (OSError, ValueError, LookupError) as error:
            post(partial(_fail, future, error))
        except BaseException as bug:
            post(partial(_fail, future, bug))
            raise

    def post(outcome: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent has stopped
            loop.call_soon_threadsafe(outcome)

    # A daemon thread: a hanging driver must not keep the agent from exiting.
    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.cancelled():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
