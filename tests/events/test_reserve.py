"""The log goes on when its disk is full, and loses nothing that it has acknowledged."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from unicron.events import file_space
from unicron.events.errors import LogError, ServerError
from unicron.events.log import embedded_server, reserve
from unicron.events.log.embedded_server import Server
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.reserve import FILE_BYTES, LOG_BYTES, MARGIN_BYTES, Reserve
from unicron.events.records.envelope import Record
from unicron.events.records.reports import NodeLeft
from unicron.events.shortage import is_full

FILLS_NUM = int(os.environ.get("UNICRON_FILLS", "3"))
"""More are for a longer run by hand."""
TEXT_CHARS = 40_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 96 << 20) as folder:
        yield folder
        if left := embedded_server.adopt(folder / "server"):
            left.stop(grace_s=1.0)


def record(seq: int, epoch: int) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=NodeLeft(node="n1", incarnation=7, reason="x" * (TEXT_CHARS + 977 * (seq % 41))),
    )


async def append(log: RedisLog, epoch: int, after: int, num_max: int) -> int:
    """Append until the server ends, at most so many; the last seq that it has acknowledged."""
    with suppress(LogError):
        for seq in range(after + 1, after + 1 + num_max):
            one = record(seq, epoch)
            await log.append([one], epoch=epoch, expect=seq - 1, cursor="", acked={"n1/7": seq})
            after = seq
    return after


def start_again(disk: Path) -> Server:
    """As `up` does it: with the reserve if there is not even room for the server's pid."""
    with suppress(ServerError):
        return embedded_server.start(disk / "server")
    with pytest.raises(ServerError, match="no space left on device") as raised:
        embedded_server.start(disk / "server")
    assert is_full(raised.value)
    assert Reserve(disk, disk / "server").give_up()
    return embedded_server.start(disk / "server")


async def test_a_full_disk_does_not_end_the_server(disk: Path) -> None:
    """What is reserved nobody else can take: the log goes on for so much at least."""
    server = embedded_server.start(disk / "server")
    fill(disk)
    log = RedisLog(server.url, "c")
    epoch = await log.start_epoch("x")
    num = (LOG_BYTES - 2 * MARGIN_BYTES) // (TEXT_CHARS + 50_000)
    assert await append(log, epoch, 0, num) == num
    assert server.is_alive
    await log.close()


async def test_what_a_full_disk_ends_loses_nothing_acknowledged(disk: Path) -> None:
    """Each fill ends the server at another place of its file, mostly within a write: an append is
    there as a whole or not at all, and the server starts again on the full disk."""
    server, acked, num_cut = embedded_server.start(disk / "server"), 0, 0
    for number in range(FILLS_NUM):
        log = RedisLog(server.url, "c")
        epoch = await log.start_epoch(f"{number}", lease_s=0.0)
        assert await log.last_seq() >= acked
        Reserve(disk, disk / "server").keep()
        taken = fill(disk, but_bytes=(number + 1) * 7919 * 13)
        acked = await append(log, epoch, await log.last_seq(), 10_000)
        assert not server.is_alive
        num_cut += b"Short write" in (disk / "server/server.log").read_bytes()[-1000:]
        await log.close()

        server = start_again(disk)
        log = RedisLog(server.url, "c")
        found = await log.read(after=0, num_max=100_000)
        assert [one.seq for one in found] == list(range(1, len(found) + 1))
        assert len(found) in (acked, acked + 1), "the last may have been written, and not answered"
        assert await log.acked("n1/7") == len(found), "all of an append, or nothing of it"
        await log.close()
        taken.unlink()
        server.stop()
        shutil.rmtree(disk / "server" / "appendonlydir")
        server, acked = embedded_server.start(disk / "server"), 0
    assert num_cut


def test_the_reserve_is_kept_given_up_and_made_again(disk: Path) -> None:
    server = embedded_server.start(disk / "server")
    one = Reserve(disk, disk / "server")
    free = file_space.free_bytes(disk)
    one.keep()
    assert free - FILE_BYTES - (1 << 16) < file_space.free_bytes(disk) <= free - FILE_BYTES
    taken = fill(disk)
    assert one.give_up()
    assert FILE_BYTES <= file_space.free_bytes(disk) <= FILE_BYTES + (1 << 16)
    assert not one.give_up(), "it is gone"
    one.keep()
    assert not (disk / reserve.FILE).exists(), "there is no room for it"
    taken.unlink()
    one.keep()
    assert (disk / reserve.FILE).stat().st_size == FILE_BYTES
    assert server.is_alive


def test_what_former_files_reserve_is_free_again_before_a_start(disk: Path) -> None:
    """A rewrite that failed for want of room leaves them, each with its reserve."""
    folder = disk / "server" / "appendonlydir"
    server = embedded_server.start(disk / "server")
    free = file_space.free_bytes(disk)
    os.kill(server.pid, signal.SIGKILL)
    while server.is_alive:
        time.sleep(0.01)
    (folder / "appendonly.aof.2.incr.aof").write_bytes(b"")
    with (folder / "appendonly.aof.manifest").open("a") as file:
        file.write("file appendonly.aof.2.incr.aof seq 2 type i\n")
    server = embedded_server.start(disk / "server")
    assert abs(file_space.free_bytes(disk) - free) < 1 << 16
    former, newest = (folder / f"appendonly.aof.{number}.incr.aof" for number in (1, 2))
    assert former.stat().st_blocks == 0
    assert newest.stat().st_blocks * 512 >= LOG_BYTES
    server.stop()
    assert newest.stat().st_blocks == 0, "a stopped server reserves nothing"


def test_a_folder_without_a_server_has_no_reserve(tmp_path: Path) -> None:
    reserve.extend(tmp_path)
    Reserve(tmp_path, tmp_path / "server").keep()
    assert [one.name for one in tmp_path.iterdir()] == [reserve.FILE]
