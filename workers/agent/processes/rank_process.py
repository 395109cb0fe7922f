"""One attempt of a rank, as its agent sees it."""

from __future__ import annotations

import asyncio
import signal

from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored
from .oom_kills import Group
from .pipe import Pipe
from .process import Exit, Process


class Attempt:
    """It waits for its slot, lives, is ended and reaped."""

    def __init__(self, order: StartRank, seq: int, epoch: int) -> None:
        self.order = order
        self.seq = seq
        self.epoch = epoch
        self.process: Process | None = None
        self.pipe: Pipe | None = None
        self.generation = 0
        self.never = False
        """Stopped before it could start."""
        self.stop_at: float | None = None
        """Loop time at which patience ends, once it is told to stop."""
        self.stop = asyncio.Event()
        self.going_on: asyncio.TimerHandle | None = None
        """Set while it is stopped on purpose, and for how long was said."""
        self.is_suspended = False
        """As last told."""
        self.memory: Group | None = None
        self.said: RankErrored | None = None
        """Its own last words."""
        self.fault = ""
        """Why the agent ended it, where nobody had asked for that."""

    async def until_end(self) -> Exit:
        """Until its process has ended; killed when patience with it ends."""
        process, loop = self.process, asyncio.get_running_loop()
        assert process is not None
        ending = asyncio.ensure_future(process.wait())
        try:
            while not ending.done():
                left_s = None
                if self.stop_at is not None:
                    left_s = self.stop_at - loop.time()
                    if left_s <= 0:
                        process.signal_group(signal.SIGKILL)
                        left_s = None
                self.stop.clear()
                told = asyncio.ensure_future(self.stop.wait())
                await asyncio.wait((ending, told), timeout=left_s,
                                   return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
            return ending.result()
        finally:
            ending.cancel()
