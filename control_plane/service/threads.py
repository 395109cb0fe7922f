"""Calls in a detached daemon thread that the exit of the process does not wait for.

At exit, Python waits for the calls in asyncio's default executor: with limits, at 1,000 tasks on
100,000 slots, a call takes half a minute. Results of these calls are not needed at exit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T]) -> T:
    """Run `call` in a new thread; its result or error. A cancel ends only the wait."""
    done = Future[T]()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await asyncio.wrap_future(done)
