"""The places of the log's server: how many connections each node has, and which of them end."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from ...events.errors import LogError
from ...events.log.redis_streams import RedisLog
from ...events.process_io import Seldom

LOG_S = 10.0
_logger = structlog.get_logger("control_plane")


class ServerPlaces:
    """A server takes a number of connections, from whomever. A node has at most `num_max` of them,
    so that it takes neither those of other nodes nor that of the next control plane."""

    def __init__(
        self,
        log: RedisLog,
        num_max: int = 64,
        ended: Callable[[int], None] = lambda num: None,
        every_s: float = 1.0,
    ) -> None:
        """`ended` is told how many connections were ended."""
        self._log, self._num_max, self._ended, self._every_s = log, num_max, ended, every_s
        self._seen_num = 0
        """How many there were when they were listed, or fewer since then."""
        self._told = Seldom(LOG_S)

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            with suppress(LogError):  # it is away, or forbids this; others that use it tell that
                await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """End what nodes have beyond the limit, first what is idle longest, and name them in a
        warning. Raises LogError."""
        num, places_num = await self._log.num_places()
        self._seen_num = min(self._seen_num, num)
        # A list of all costs the server time: only when there are more, or when few are left.
        if num - self._seen_num <= self._num_max and num <= places_num - self._num_max:
            return
        held = await self._log.connections()
        excess = {
            node: numbers[: -self._num_max]
            for node, numbers in held.items()
            if len(numbers) > self._num_max
        }
        self._seen_num = num
        if not excess:
            return
        numbers = [number for of_node in excess.values() for number in of_node]
        await self._log.end_connections(numbers)
        self._ended(len(numbers))
        if self._told.due():
            _logger.warning(
                "nodes with too many connections to the log's server lose the rest",
                nodes=sorted(excess, key=lambda node: -len(excess[node]))[:8],
                num_ended=len(numbers),
                num_max=self._num_max,
                of=num,
            )
