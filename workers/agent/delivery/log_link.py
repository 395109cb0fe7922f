"""Calls to the log with time limits and retries; logs when the log becomes (un)reachable."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from ....events.errors import Ambiguous, LogError, Unavailable, UsageError
from ....events.timing import LOG_RETRY_S_MAX

T = TypeVar("T")
CALL_S_MAX = 10.0
"""A call without an answer after this long counts as Ambiguous."""
BACKOFF_S_MIN = 0.05

_log = structlog.get_logger("agent")


def backoff_s(num_tries: int, s_max: float = LOG_RETRY_S_MAX) -> float:
    """The wait before retry `num_tries` + 1: exponential backoff with jitter (50 to 100 %)."""
    full = min(s_max, BACKOFF_S_MIN * 2.0 ** min(num_tries, 16))
    return full * random.uniform(0.5, 1.0)


class LogLink:
    """All calls of one agent to its log go through here."""

    def __init__(self) -> None:
        self._up = True
        self._down_s = 0.0

    @property
    def unreachable_s(self) -> float:
        """How long the log has been unreachable; 0 while it is reachable."""
        return 0.0 if self._up else time.monotonic() - self._down_s

    async def call(self, make: Callable[[], Awaitable[T]], s_max: float = CALL_S_MAX) -> T:
        """Call once. Raises Unavailable, or Ambiguous (also after `s_max`)."""
        try:
            async with asyncio.timeout(s_max):
                value = await make()
        except TimeoutError:
            self._log_change(False, f"no answer within {s_max:g} s")
            raise Ambiguous(f"no answer within {s_max:g} s") from None
        except (Unavailable, Ambiguous) as error:
            self._log_change(False, str(error))
            raise
        except (LogError, UsageError) as error:
            # A server that refuses (changed password, damaged stream) must not stop a rank either.
            self._log_change(False, str(error))
            raise Unavailable(str(error)) from None
        self._log_change(True, "")
        return value

    async def retry(self, make: Callable[[], Awaitable[T]], s_max: float = CALL_S_MAX) -> T:
        """Retry without limit, backoff at most LOG_RETRY_S_MAX; for idempotent calls only."""
        num_tries = 0
        while True:
            try:
                return await self.call(make, s_max)
            except (Unavailable, Ambiguous):
                await asyncio.sleep(backoff_s(num_tries))
                num_tries += 1

    def _log_change(self, up: bool, why: str) -> None:
        if up != self._up:
            self._up, self._down_s = up, time.monotonic()
            if up:
                _log.info("the log is reachable again")
            else:
                _log.warning("the log is unreachable; ranks continue, reports are spooled", why=why)
