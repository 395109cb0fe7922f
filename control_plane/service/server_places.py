"""The places of the log's server: how many connections each node has, and which of them end."""

import asyncio
from collections.abc import Callable

import structlog

from ...events.errors import LogError
from ...events.log.redis_streams import RedisLog
from ...events.process_io import Seldom

AGENT_NUM = 4
"""The connections of an agent, but for some short ones."""
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
        self._told = Seldom(LOG_S)

    async def watch(self, num_nodes: Callable[[], int]) -> None:
        """Look again and again. `num_nodes`: how many nodes the cluster has."""
        while True:
            try:
                await self.look(num_nodes())
            except LogError:  # it is away, or forbids this; what else uses it tells that
                pass
            await asyncio.sleep(self._every_s)

    async def look(self, num_nodes: int) -> None:
        """End what nodes have beyond the limit, first what is idle longest, and name them in a
        warning. The server lists its connections only if it has many. Raises LogError."""
        num, places_num = await self._log.num_places()
        if num <= min(AGENT_NUM * num_nodes + self._num_max, places_num // 2):
            return
        held = await self._log.connections()
        excess = {
            node: numbers[: -self._num_max]
            for node, numbers in held.items()
            if len(numbers) > self._num_max
        }
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
