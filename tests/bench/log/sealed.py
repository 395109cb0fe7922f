"""A log of many records on a real server and in segments, written as a leader writes it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.log.records import Life
from msgspec import Struct, field
from unicron.cli.cluster.state_dir import StateDir
from unicron.control_plane.service import snapshots
from unicron.events.log import embedded_server
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.segments import Folder
from unicron.events.private_files import write_private
from unicron.events.records.envelope import Record
from unicron.events.spec.policy import Policy

CLUSTER = "default"
BATCH_RECORDS_NUM = 256
"""Records of an append: as many as a leader takes reports at once (service/coordinator.py)."""


class Written(Struct):
    """What writing a log has cost. `memory_mb`: of the server, by the number of records. `cpu_s`:
    of the appends, here, and of the server."""

    append_s: list[float] = field(default_factory=list[float])
    cpu_s: float = 0.0
    num_records: int = 0
    memory_mb: dict[int, float] = field(default_factory=dict[int, float])


class SealedCluster:
    """A state folder with secret and segments, and its running server; no control plane."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder)
        self.state.create()
        write_private(folder / "secret", os.urandom(SECRET_BYTES))
        self.identities = Identities((folder / "secret").read_bytes(), CLUSTER)
        self.folder = Folder(folder / "log", CLUSTER)
        self.server: Server = embedded_server.start(self.state.server)

    def stop(self) -> None:
        self.server.stop()

    @asynccontextmanager
    async def log(self) -> AsyncIterator[RedisLog]:
        """The log as a leader has it."""
        log = RedisLog(
            self.server.url, CLUSTER, self.identities.key, self.identities, folder=self.folder
        )
        try:
            await log.check()
            yield log
        finally:
            await log.close()

    async def write(
        self,
        num_sealed: int,
        num_rest: int,
        memory_at: Sequence[int] = (),
        life: Life | None = None,
    ) -> Written:
        """Append `num_sealed` records, or a few more, and seal them with a snapshot every
        `seal_records`, as the leader does; then append `num_rest` more."""
        life, written, due = life or Life(), Written(), list[Record]()
        async with self.log() as log:
            assert await log.start_epoch("bench") == 1
            await log.open_segments()
            turns, server_cpu_s = life.turns(), self._server_cpu_s()
            while written.num_records < num_sealed + num_rest:
                batch: list[Record] = []
                while len(batch) < BATCH_RECORDS_NUM:
                    batch += next(turns)
                await self._append(log, batch, written)
                due += batch
                left = num_sealed - written.num_records
                if len(due) >= Policy().seal_records if left > 0 else len(due) + left > 0:
                    await log.seal(due, epoch=1, open_orders=tuple(life.state.orders))
                    snapshots.write(
                        self.folder, life.state.seq, 1, snapshots.encode(life.state, {})
                    )
                    due.clear()
                for num in memory_at:
                    if num <= written.num_records and num not in written.memory_mb:
                        written.memory_mb[num] = self.memory_mb()
        written.cpu_s += self._server_cpu_s() - server_cpu_s
        return written

    async def _append(self, log: RedisLog, batch: Sequence[Record], written: Written) -> None:
        acked = {one.source: one.source_seq for one in batch if "/" in one.source}
        began_s, cpu_s = time.perf_counter(), time.process_time()
        await log.append(batch, epoch=1, expect=batch[0].seq - 1, cursor="", acked=acked)
        written.append_s.append(time.perf_counter() - began_s)
        written.cpu_s += time.process_time() - cpu_s
        written.num_records += len(batch)

    def memory_mb(self) -> float:
        """Resident memory of the server, in MB."""
        pages = int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _server_cpu_s(self) -> float:
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
