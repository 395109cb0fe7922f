"""Whether the log can be reached: limits and retries for calls to it, said on change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from ....events.errors import Ambiguous, LogError, Unavailable, UsageError

T = TypeVar("T")
CALL_S_MAX = 10.0
"""A call that has not answered by then counts as Unavailable."""
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 2.0

_log = structlog.get_logger("agent")


def backoff_s(num_tries: int, s_max: float = BACKOFF_S_MAX) -> float:
    """How long to wait before try `num_tries` + 1: doubled each time, half of it by chance."""
    full = min(s_max, BACKOFF_S_MIN * 2.0 ** min(num_tries, 16))
    return full * random.uniform(0.5, 1.0)


class Link:
    """All calls of one agent to its log go through here."""

    def __init__(self) -> None:
        self._up = True

    async def call(self, make: Callable[[], Awaitable[T]], s_max: float = CALL_S_MAX) -> T:
        """One try. Raises Unavailable or Ambiguous, also when the limit `s_max` passes."""
        try:
            async with asyncio.timeout(s_max):
                value = await make()
        except TimeoutError:
            self._say(False, f"no answer within {s_max:g} s")
            raise Ambiguous(f"no answer within {s_max:g} s") from None
        except (Unavailable, Ambiguous) as error:
            self._say(False, str(error))
            raise
        except (LogError, UsageError) as error:
            # A server that refuses (a password changed, a stream damaged) stops no rank either.
            self._say(False, str(error))
            raise Unavailable(str(error)) from None
        self._say(True, "")
        return value

    async def insist(self, make: Callable[[], Awaitable[T]], s_max: float = CALL_S_MAX) -> T:
        """Try for ever, with a backoff of at most BACKOFF_S_MAX; for calls safe to repeat."""
        num_tries = 0
        while True:
            try:
                return await self.call(make, s_max)
            except (Unavailable, Ambiguous):
                await asyncio.sleep(backoff_s(num_tries))
                num_tries += 1

    def _say(self, up: bool, why: str) -> None:
        if up != self._up:
            self._up = up
            if up:
                _log.info("the log is reached again")
            else:
                _log.warning("the log cannot be reached; ranks go on, reports are kept", why=why)
