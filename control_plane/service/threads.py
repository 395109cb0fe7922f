"""Calls in a detached daemon thread that the exit of the process does not wait for.

At exit, Python waits for the calls in asyncio's default executor: with limits, at 1,000 tasks on
100,000 slots, a call takes half a minute. Results of these calls are not needed at exit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T]) -> T:
    """Run `call` in a new thread. Return its result or raise its error. A cancel ends only the
    wait, not the thread."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    threading.Thread(target=_Work(call, done).run, name="aside", daemon=True).start()
    return await done


class _Work(Generic[T]):
    def __init__(self, call: Callable[[], T], done: asyncio.Future[T]) -> None:
        self._call, self._done = call, done

    def run(self) -> None:
        with self:
            result = self._call()
            self._post(lambda: self._done.set_result(result))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._post(lambda: self._done.set_exception(error))
        return True

    def _post(self, set_result: Callable[[], None]) -> None:
        """Call `set_result` in the event loop, if the loop runs and the caller still waits."""
        loop = self._done.get_loop()
        try:
            loop.call_soon_threadsafe(lambda: None if self._done.done() else set_result())
        except RuntimeError:
            assert loop.is_closed()
