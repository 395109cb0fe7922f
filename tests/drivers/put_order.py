"""Puts one order into a log, for tests of its server."""

from __future__ import annotations

from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import Record
from unicron.events.records.orders import Resume


def order(seq: int, epoch: int) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=Resume(nodes=("n1",), task=1, generation=seq, progress_from=0),
    )


async def put(log: RedisLog, seq: int, epoch: int) -> None:
    await log.append(
        [order(seq, epoch)], epoch=epoch, expect=seq - 1, cursor=f"0-{seq}", acked={"n1/7": seq}
    )
