"""The leader seals its log: the server's memory is bounded, a start needs only the newest part."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.service import sealer, snapshots, usage_files
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.limits import Limits
from unicron.control_plane.state.cluster import ClusterState, state_hash
from unicron.events.errors import CorruptLog, Pruned, Unavailable
from unicron.events.log import segments
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.segments import Folder, SealedLog
from unicron.events.object_storage import PathStore
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec.policy import Policy

FEW = Policy(seal_records=20, seal_s=3600.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealer, "POLL_S", 0.01)


@asynccontextmanager
async def leading(log: RedisLog, folder: Folder, nonce: str = "a") -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(
        log, clock=time.time, nonce=nonce, code="test", policy=FEW, folder=folder
    )
    task = asyncio.create_task(coordinator.run())
    try:
        settled = asyncio.create_task(coordinator.settled())
        await asyncio.wait((settled, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            settled.cancel()
            task.result()
        await settled
        yield coordinator
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def write(coordinator: Coordinator, first: int, num: int) -> None:
    for number in range(first, first + num):
        await coordinator.write(f"w{number}", r.HealingFrozen(reason=f"{number}"))


async def until_sealed(log: RedisLog, seq: int) -> None:
    async with asyncio.timeout(20.0):
        while log.sealed_seq < seq:
            await asyncio.sleep(0.01)


async def until_snapshot(folder: Folder, num: int = 1) -> None:
    async with asyncio.timeout(20.0):
        while len(folder.snapshots()) < num:
            await asyncio.sleep(0.01)


async def whole(log: RedisLog) -> ClusterState:
    """The state, folded from record 1."""
    state = ClusterState()
    while page := await log.read(after=state.seq, num_max=7):
        for record in page:
            fold(state, record)
    return state


async def until(coordinator: Coordinator, last: int) -> AsyncIterator[Sequence[Record]]:
    """What a follower of the whole log gets."""
    async for page in coordinator.tail.follow(0):
        yield page
        if page[-1].seq >= last:
            return


def stream_length(redis_log: Any) -> int:
    with redis.Redis.from_url(redis_log.url) as server:
        return int(server.xlen(f"{{unicron:{redis_log.name}}}:log"))


async def test_the_server_keeps_the_newest_segment_and_readers_have_all(
    redis_log: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 100)
        await until_sealed(log, 100)
        state = await coordinator.settled()
        assert [one.last - one.first + 1 for one in folder.chain()] == [20] * 5
        assert stream_length(redis_log) == state.seq - 80
        assert state_hash(await whole(log)) == state_hash(state)
        followed = [page async for page in until(coordinator, state.seq)]
        assert [record.seq for page in followed for record in page] == [*range(1, state.seq + 1)]


async def test_large_records_are_sealed_in_segments_that_can_be_read(
    redis_log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may report a megabyte at a time: 10,000 such records are in no segment."""
    monkeypatch.setattr(segments, "UNPACKED_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(sealer, "SEGMENT_BYTES_MAX", 1 << 18, raising=False)
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        for number in range(30):
            await coordinator.write(f"w{number}", r.HealingFrozen(reason="x" * (100 << 10)))
        await until_sealed(log, 12)
        assert state_hash(await whole(log)) == state_hash(await coordinator.settled())
    assert [one.last - one.first + 1 for one in folder.chain()][:2] == [5, 3]


async def test_a_follower_without_the_segments_ends_and_one_with_them_takes_over(
    redis_log: Any, tmp_path: Path
) -> None:
    folder, elsewhere = (Folder(tmp_path / name, redis_log.name) for name in ("a", "b"))

    def follower(log: RedisLog, folder: Folder) -> Coordinator:
        return Coordinator(
            log,
            clock=time.time,
            nonce=folder.where,
            code="test",
            policy=FEW,
            folder=folder,
            limits=Limits(segments_s=0.1),
        )

    async with redis_log(folder=folder) as log, redis_log(folder=folder) as beside:
        next_one = follower(beside, folder)
        async with leading(log, folder) as leader:
            following = asyncio.create_task(next_one.run("http://next"))
            await write(leader, 0, 50)
            await until_sealed(log, 40)
            async with redis_log(folder=elsewhere) as other:
                with pytest.raises(CorruptLog, match="need the same --segments"):
                    await asyncio.wait_for(follower(other, elsewhere).run("http://other"), 20.0)
            seq = leader.seq
        async with asyncio.timeout(20.0):
            while not next_one.leading:
                await asyncio.sleep(0.01)
        await write(next_one, 50, 50)
        await until_sealed(beside, seq + 40)
        assert state_hash(await whole(beside)) == state_hash(await next_one.settled())
        next_one.stop()
        await following


async def test_a_start_continues_from_the_newest_snapshot(
    redis_log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 50)
        await until_sealed(log, 40)
        await until_snapshot(folder)
        last = (await coordinator.settled()).seq
    folded: list[int] = []
    async with redis_log(folder=folder) as log:
        with monkeypatch.context() as patch:
            patch.setattr(
                "unicron.control_plane.service.leader.fold",
                lambda state, record: (folded.append(record.seq), fold(state, record)),
            )
            async with leading(log, folder, nonce="b") as second:
                state = await second.settled()
                assert folded == [*range(last + 1 - len(folded), last + 1)]
                assert len(folded) <= last - 20, "it began at a snapshot"
                assert second.answer("w3") is not None, "old requests are still recognised"
                assert state_hash(await whole(log)) == state_hash(state)


async def test_what_is_sealed_is_counted_and_a_failed_count_ends_nothing(
    redis_log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(usage_files, "_between", lambda *args: 1 / 0)
            await write(coordinator, 0, 25)
            await until_snapshot(folder)
            async with asyncio.timeout(20.0):
                while not logs:
                    await asyncio.sleep(0.01)
        assert [one["event"] for one in logs] == ["cannot count the sealed log"]
        assert folder.snapshots("usage") == []
        await write(coordinator, 25, 40)
        async with asyncio.timeout(20.0):
            while not (files := folder.snapshots("usage")) or files[-1].seq < 60:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("damage", ["damaged", "another shape"])
async def test_a_bad_snapshot_falls_back_to_the_one_before(
    redis_log: Any, tmp_path: Path, damage: str
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 30)
        await until_sealed(log, 20)
        state = await coordinator.settled()
        await until_snapshot(folder)
    if damage == "damaged":
        path = tmp_path / folder.snapshots()[-1].name
        path.write_bytes(path.read_bytes()[:-1])
    else:
        folder.write_snapshot(state.seq, state.epoch, "unicron-state-0", b"?")
    with capture_logs() as logs:
        async with redis_log(folder=folder) as log, leading(log, folder, nonce="b") as second:
            assert state_hash(await whole(log)) == state_hash(await second.settled())
    assert [one["event"] for one in logs].count("passed over a snapshot") == (damage == "damaged")


async def test_a_server_that_lost_acknowledged_records_is_refused(
    redis_log: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 30)
        await until_sealed(log, 20)
    key = f"{{unicron:{redis_log.name}}}:log"
    with redis.Redis.from_url(redis_log.url) as server:
        kept: Any = server.xrange(key)
        server.delete(key)
        for entry, fields in kept[:5]:
            server.xadd(key, fields, id=entry)
    last = int(kept[4][0].decode().partition("-")[2])
    async with redis_log(folder=folder) as log:
        with pytest.raises(
            CorruptLog,
            match=f"the server has lost records {last + 1} to "
            rf"\d+.*unicron log restore",
        ):
            async with leading(log, folder, nonce="b"):
                pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
async def test_a_full_or_read_only_disk_seals_later_and_leads_on(
    redis_log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder = Folder(tmp_path / "log", redis_log.name)
    with monkeypatch.context() as patch:

        def refuse(*args: Any) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(PathStore, "write", refuse)
        with capture_logs() as logs:
            async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
                await write(coordinator, 0, 30)
                await asyncio.sleep(0.1)
                assert log.sealed_seq == 0
                patch.undo()
                await until_sealed(log, 20)
    assert [
        one["why"] for one in logs if one["event"] == ("cannot seal the log; the server keeps it")
    ] == [f"{tmp_path / 'log'}: {os.strerror(code)}"]


async def test_a_segment_that_cannot_be_read_now_is_tried_again(
    redis_log: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 30)
        await until_sealed(log, 20)
    path = tmp_path / folder.chain()[0].name
    path.rename(tmp_path / "kept")
    path.mkdir()
    async with redis_log(folder=folder) as log:
        await log.open_segments()
        with pytest.raises(Unavailable, match=f"{tmp_path}: Is a directory"):
            await log.read(after=0, num_max=10)
        path.rmdir()
        (tmp_path / "kept").rename(path)
        assert [record.seq for record in await log.read(after=0, num_max=10)] == [*range(1, 11)]


async def test_a_leader_goes_on_while_its_log_is_pruned(redis_log: Any, tmp_path: Path) -> None:
    """Its readers learn where the log begins, and the next start needs nothing of what is gone."""
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 70)
        await until_sealed(log, 60)
        assert len(await log.read(after=0, num_max=5)) == 5
        sealed = SealedLog(folder)
        snapshots.write_at(folder, sealed, 40)
        folder.prune(sealed.chain, 41)
        assert folder.snapshots()[0].seq == 40
        with pytest.raises(Pruned, match="seq 41: the log begins here"):
            await log.read(after=20, num_max=5)
        assert log.first_seq == 41
        await write(coordinator, 70, 30)
        await until_sealed(log, 80)
        async with asyncio.timeout(20.0):
            while folder.snapshots()[-1].seq < 80:  # a thread writes it
                await asyncio.sleep(0.05)
        shown = state_hash(await coordinator.settled())
    for one in [one for one in folder.snapshots() if one.seq > 40]:  # even with that one alone
        (tmp_path / one.name).unlink()
    async with redis_log(folder=folder) as log, leading(log, folder, nonce="b") as second:
        async with asyncio.timeout(20.0):
            while not second.leading:
                await asyncio.sleep(0.05)
        state = await second.settled()
        assert second.answer("w3") is not None, "old requests are still recognised"
        after, _ = snapshots.newest(folder, 40)
        while page := await log.read(after=after.seq, num_max=7):
            for record in page:
                fold(after, record)
        assert state_hash(after) == state_hash(state) != shown
    for one in folder.snapshots():
        (tmp_path / one.name).unlink()
    async with redis_log(folder=folder) as log:
        with pytest.raises(
            CorruptLog,
            match=r"seq 41: the records before it were pruned, and .* "
            r"has no good snapshot of unicron-state-9: put one",
        ):
            async with leading(log, folder, nonce="c"):
                pass


async def test_no_snapshot_is_no_reason_to_prune(redis_log: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        await write(coordinator, 0, 50)
        await until_sealed(log, 40)
        state = await whole(log)
    # A thread may still write a snapshot.
    await asyncio.get_running_loop().shutdown_default_executor()
    sealed = SealedLog(folder)
    folder.remove(folder.snapshots())
    snapshots.write_at(folder, sealed, 20)
    then, answers = snapshots.newest(folder)
    assert (then.seq, then.epoch, len(answers)) == (20, state.epoch, 18)
    path = tmp_path / sealed.chain[1].name
    path.write_bytes(path.read_bytes()[:-1])
    folder.remove(folder.snapshots())
    with pytest.raises(CorruptLog, match="is damaged"):
        snapshots.write_at(folder, SealedLog(folder), 40)
    assert folder.snapshots() == []


async def test_a_snapshot_is_found_by_its_moment(redis_log: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path, redis_log.name)
    async with redis_log(folder=folder) as log, leading(log, folder) as coordinator:
        for number in range(2):
            await write(coordinator, 30 * number, 30)
            await until_snapshot(folder, number + 1)  # a later one would be skipped meanwhile
    seqs = [one.seq for one in folder.snapshots()]
    assert len(seqs) >= 2
    state, _ = snapshots.newest(folder, seqs[1] - 1)
    assert state.seq == seqs[0]
    state, _ = snapshots.newest(folder, seqs[0] - 1)
    assert state.seq == 0
