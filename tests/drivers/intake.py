"""What a test takes from the intake: the reports of a batch."""

from __future__ import annotations

from unicron.events.log.port import Batch
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import Report


def reports_of(log: RedisLog, batch: Batch) -> tuple[Report, ...]:
    """The reports of the batch, without what is none."""
    return tuple(one for sent in batch.entries if isinstance(one := log.read_report(sent), Report))


async def take(
    log: RedisLog, after: str = "0-0", num_max: int = 99, wait_s: float = 0.0
) -> tuple[Report, ...]:
    """The reports behind a cursor."""
    return reports_of(log, await log.take(after=after, num_max=num_max, wait_s=wait_s))
