"""The newest records in memory are bounded by their bytes, too."""

from __future__ import annotations

import time
import tracemalloc

from memory_log import MemoryLog
from unicron.control_plane.service.tail import KEPT_BYTES_MAX, Tail
from unicron.events.records import reports
from unicron.events.records.envelope import Record

MEGABYTE = 1 << 20


def large(seq: int) -> Record:
    return Record(
        seq=seq,
        epoch=1,
        at_s=1.0,
        occurred_s=1.0,
        source="n1/1",
        source_seq=seq,
        cause=0,
        incident=0,
        body=reports.NodeLeft(node="n1", incarnation=1, reason="x" * MEGABYTE),
    )


async def test_large_records_take_bounded_memory() -> None:
    tail = Tail(MemoryLog(time.monotonic), kept_num_max=4_096, idle_s=1.0)
    tracemalloc.start()
    try:
        for seq in range(1, 101):
            tail.add([large(seq)])
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < KEPT_BYTES_MAX + 4 * MEGABYTE
    async for page in tail.follow(98):
        assert [record.seq for record in page] == [99, 100]
        break
