"""The sealer: moves the log from the server's memory to segment files, each with a snapshot and
figures."""

import asyncio
from collections.abc import Callable

import structlog

from ...events.detached_thread import aside
from ...events.errors import LogError, Unavailable, UsageError
from ...events.log.redis_streams import RedisLog
from ...events.log.segments import Folder, SealedLog
from ...events.object_storage import reason
from ...events.process_io import Seldom
from ...events.records.codec import encode_record
from ...events.records.envelope import Record
from . import snapshots, usage_files
from .leader import PAGE_RECORDS_MAX, Leader

POLL_S = 1.0
SEGMENT_BYTES_MAX = 64 << 20
"""Records of so many bytes end a segment; readers refuse one that is much larger."""
FAILED_LOG_S = 60.0
_logger = structlog.get_logger("control_plane")


class Sealer:
    """Seals the log of a leader when its policy says so, and its state is what the log has."""

    def __init__(
        self, log: RedisLog, folder: Folder, leader: Leader, state_is_settled: Callable[[], bool]
    ) -> None:
        self._log, self._folder, self._leader = log, folder, leader
        self._is_settled = state_is_settled
        self._failed = Seldom(FAILED_LOG_S)
        self._oldest_s: float | None = None
        """Of the oldest record that is not sealed, once that was read."""
        self._is_snapshot_due = False

    async def run(self) -> None:
        """Seal until cancelled. What fails is tried again: the server keeps the records."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._seal_due()
            except (LogError, UsageError, OSError) as error:
                if self._failed.due():
                    _logger.warning(
                        "cannot seal the log; the server keeps it",
                        why=f"{self._folder.where}: {reason(error)}",
                    )

    async def _seal_due(self) -> None:
        """Seal all that is due, a segment at a time, then write a snapshot."""
        while self._is_settled() and await self._is_due() and self._is_settled():
            state = self._leader.state
            seq, open_orders = state.seq, tuple(state.orders)
            await self._log.seal(
                await self._next_records(seq), epoch=self._leader.epoch, open_orders=open_orders
            )
            self._oldest_s, self._is_snapshot_due = None, True
        if self._is_snapshot_due and self._is_settled():
            state = self._leader.state
            encoded = snapshots.encode(state, self._leader.answers)
            await asyncio.to_thread(snapshots.write, self._folder, state.seq, state.epoch, encoded)
            self._is_snapshot_due = False
            await self._count()

    async def _count(self) -> None:
        """Count what was sealed. Whatever fails there, the leader goes on: figures can be counted
        later."""
        try:
            await aside(lambda: usage_files.of_sealed(SealedLog(self._folder), 0.0))
        except Exception as error:  # noqa: BLE001 - it is told, and no part of the log
            if not isinstance(error, Unavailable) and self._failed.due():  # the next goes on
                _logger.warning("cannot count the sealed log", why=f"{error!r}")

    async def _next_records(self, seq_max: int) -> list[Record]:
        """The records of the next segment, up to `seq_max`: whole reports, each with all of its
        decisions, so that a log that ends with a segment is one that a leader could have
        written. As many as the policy says, or fewer if they are large."""
        num_max = self._leader.state.policy.seal_records
        found, num_whole, num_bytes = list[Record](), 0, 0
        while page := await self._log.read(
            after=self._log.sealed_seq + len(found), num_max=PAGE_RECORDS_MAX
        ):
            for record in page:
                if not record.cause:
                    num_whole = len(found)
                is_full = len(found) >= num_max or num_bytes >= SEGMENT_BYTES_MAX
                if num_whole and is_full:
                    return found[:num_whole]
                if record.seq > seq_max:
                    return found
                found.append(record)
                num_bytes += len(encode_record(record))
        return found

    async def _is_due(self) -> bool:
        """Whether the unsealed records are as many, or as old, as the policy allows."""
        policy, sealed = self._leader.state.policy, self._log.sealed_seq
        num = self._leader.state.seq - sealed
        if num and self._oldest_s is None:
            (oldest,) = await self._log.read(after=sealed, num_max=1)
            self._oldest_s = oldest.at_s
        return num >= policy.seal_records or (
            self._oldest_s is not None and self._leader.now_s() - self._oldest_s >= policy.seal_s
        )
