"""Work aside: in a thread of its own, which nobody waits for when the process is to end.

The executor of asyncio is waited for, however long what it runs takes: at 1,000 tasks on 100,000
slots under limits that is half a minute. Nothing that is done here is needed once nobody asks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T]) -> T:
    """What it returns or raises. Cancelled, it goes on for nobody."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    threading.Thread(target=_Work(call, done).run, name="aside", daemon=True).start()
    return await done


class _Work(Generic[T]):
    def __init__(self, call: Callable[[], T], done: asyncio.Future[T]) -> None:
        self._call, self._done = call, done

    def run(self) -> None:
        with self:
            result = self._call()
            self._tell(lambda: self._done.set_result(result))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._tell(lambda: self._done.set_exception(error))
        return True

    def _tell(self, tell: Callable[[], None]) -> None:
        """In the loop, if it still runs and somebody waits."""
        loop = self._done.get_loop()
        try:
            loop.call_soon_threadsafe(lambda: None if self._done.done() else tell())
        except RuntimeError:
            assert loop.is_closed()
