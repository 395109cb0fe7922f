"""Places for real ranks, shared by all lanes of a run of the tests (tests/suite.py).

A test that starts N ranks at the same time is marked `ranks(N)`, or its folder says so. It waits
until N places are free, so that no more ranks run than the cores carry, however many lanes there
are. A place is a lock on a file: it is free again when its process has ended, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

VARIABLE = "UNICRON_RANK_PLACES"
PLACES_NUM = max(6, 4 * (os.cpu_count() or 1))
"""Small ranks that two cores carry: 8."""
POLL_S = 0.05


@contextmanager
def taken(num: int) -> Iterator[None]:
    """Hold `num` places, or all that there are. Without VARIABLE there is no limit."""
    folder = os.environ.get(VARIABLE, "")
    if not folder or not num:
        yield
        return
    with ExitStack() as held:
        # One after another: two tests that have half of their places each would wait for ever.
        with _open(Path(folder) / "queue") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            wanted = min(num, PLACES_NUM)
            free = list(range(PLACES_NUM))
            while wanted:
                for place in free:
                    file = _open(Path(folder) / str(place))
                    if _lock(file):
                        held.enter_context(file)
                        free.remove(place)
                        wanted -= 1
                        break
                    file.close()
                else:
                    time.sleep(POLL_S)
        yield


def _open(path: Path) -> IO[bytes]:
    return path.open("ab")


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
