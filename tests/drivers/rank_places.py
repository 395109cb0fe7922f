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
        with _locked(Path(folder) / "queue"):
            wanted = min(num, PLACES_NUM)
            free = list(range(PLACES_NUM))
            while wanted:
                for place in free:
                    try:
                        held.enter_context(_locked(Path(folder) / str(place), fcntl.LOCK_NB))
                    except BlockingIOError:
                        continue
                    free.remove(place)
                    wanted -= 1
                    break
                else:
                    time.sleep(POLL_S)
        yield


@contextmanager
def _locked(path: Path, option: int = 0) -> Iterator[None]:
    """Raises BlockingIOError with the option LOCK_NB if another has the lock."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | option)
        try:
            yield
        finally:
            # Not only closed: a process that the test forked has the file too.
            fcntl.flock(file, fcntl.LOCK_UN)
