"""Detached threads: results are returned, and the process does not wait for them at its exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from unicron.events.detached_thread import aside
from unicron.events.errors import UsageError

ENDS = """
import asyncio, threading, time
from unicron.events.detached_thread import aside
begun = threading.Event()

def long():
    begun.set()
    time.sleep(3600)

async def main():
    task = asyncio.create_task(aside(long))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))

asyncio.run(main())
print("over")
"""


def test_results_and_errors_of_another_thread_are_returned() -> None:
    def refuse() -> None:
        raise UsageError("no", "a hint")

    async def main() -> None:
        assert await aside(threading.get_ident) != threading.get_ident()
        with pytest.raises(UsageError, match="no"):
            await aside(refuse)

    asyncio.run(main())


def test_a_process_exits_while_a_thread_still_works() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("over\n", "")


def test_a_result_after_the_loop_is_closed_is_dropped() -> None:
    release, threads = threading.Event(), set(threading.enumerate())

    async def main() -> None:
        task = asyncio.create_task(aside(release.wait))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    asyncio.run(main())
    release.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
