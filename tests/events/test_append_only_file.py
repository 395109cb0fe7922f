"""The log in a server's append-only files, read without a server."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import redis
from unicron.events.errors import CorruptLog, UsageError
from unicron.events.log import append_only_file
from unicron.events.log.append_only_file import FOLDER, Unsealed
from unicron.events.log.embedded_server import Server
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import reports
from unicron.events.records.codec import encode_record
from unicron.events.records.envelope import Record

CLUSTER = "c"
MANIFEST = b"file appendonly.aof.1.incr.aof seq 1 type i\n"
Redis: Any = redis.Redis


def record(seq: int, epoch: int) -> Record:
    body = reports.NodeLeft(node="n1", incarnation=7, reason="\r\n*1\r\n$4\r\nEXEC\r\n" * 3)
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1.0,
        occurred_s=1.0,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=body,
    )


async def fill(server: Server, first: int, last: int, nonce: str = "a") -> list[Record]:
    log = RedisLog(server.url, CLUSTER)
    try:
        await log.check()
        epoch = await log.start_epoch(nonce)
        made = [record(seq, epoch) for seq in range(first, last + 1)]
        await log.append(made, epoch=epoch, expect=first - 1, cursor="1-1", acked={"n1/7": last})
        await log.beat("n1", 7)
        return made
    finally:
        await log.close()


def rewrite(server: Server, snapshot: str = "") -> None:
    """Let the server rewrite its files; `snapshot`: with the setting of older versions."""
    with Redis.from_url(server.url) as client:
        if snapshot:
            client.config_set("aof-use-rdb-preamble", snapshot)
        client.bgrewriteaof()
        deadline_s = time.monotonic() + 30.0
        while (
            client.info("persistence")["aof_rewrite_in_progress"]
            or client.info("persistence")["aof_rewrite_scheduled"]
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def folder_of(server: Server) -> Path:
    return Path(server.directory)


def read(folder: Path, after: int = 0) -> Unsealed:
    return append_only_file.read(folder, CLUSTER, after)


async def test_it_has_what_the_server_has(own_server: Server) -> None:
    """Of a server that runs, that was killed, after a rewrite, and after another one."""
    made = await fill(own_server, 1, 5)
    assert read(folder_of(own_server)) == (made, "", "")
    for nonce in ("b", "c"):
        rewrite(own_server)
        made += await fill(own_server, len(made) + 1, len(made) + 5, nonce)
        assert read(folder_of(own_server)) == (made, "", "")
    own_server.stop(grace_s=0.0)
    assert read(folder_of(own_server)) == (made, "", "")
    assert read(folder_of(own_server), after=12).records == made[12:]
    assert read(folder_of(own_server), after=15).records == []
    assert append_only_file.read(folder_of(own_server), "other", 0).records == []
    assert read(folder_of(own_server).parent) == ([], "", "")


async def test_a_cut_end_costs_only_what_was_not_acknowledged(own_server: Server) -> None:
    made = await fill(own_server, 1, 3)
    path = next((folder_of(own_server) / FOLDER).glob("*.incr.aof"))
    whole = path.stat().st_size
    made += await fill(own_server, 4, 6, "b")
    own_server.stop(grace_s=1.0)
    data = path.read_bytes()
    ends = {len(read(folder_of(own_server)).records)}
    for end in range(whole, len(data)):
        path.write_bytes(data[:end])
        found = read(folder_of(own_server))
        assert found.records == made[: len(found.records)]
        assert found.cut == path.name or data[end : end + 1] == b"*", end
        ends.add(len(found.records))
    assert ends == {3, 6}, "an append is there as a whole"


async def test_a_snapshot_of_an_older_version_is_told(own_server: Server, tmp_path: Path) -> None:
    made = await fill(own_server, 1, 5)
    rewrite(own_server, snapshot="yes")
    unread = read(folder_of(own_server), after=5)
    assert (unread.records, unread.snapshot) == ([], "appendonly.aof.2.base.rdb")
    made += await fill(own_server, 6, 8, "b")
    assert read(folder_of(own_server), after=5).records == made[5:]
    with pytest.raises(UsageError, match=r"records 3 to 5 are in .*base\.rdb, which only a server"):
        read(folder_of(own_server), after=2)
    rewrite(own_server, snapshot="no")
    assert read(folder_of(own_server)) == (made, "", "")


@pytest.mark.parametrize(
    ("manifest", "commands", "why"),
    [
        (
            MANIFEST,
            b"*3\r\n$6\r\nMODULE\r\n$4\r\nLOAD\r\n$6\r\n./x.so\r\n",
            "has the command MODULE",
        ),
        (
            MANIFEST,
            b"*1\r\n$5\r\nMULTI\r\n*2\r\n$4\r\neval\r\n$1\r\nx\r\n*1\r\n$4\r\nEXEC\r\n",
            "has the command EVAL",
        ),
        (MANIFEST, b"*1\r\n$3\r\nACL\r\n", "has the command ACL"),
        (MANIFEST, b"*1\r\n$9\r\nSOMETHING\r\n", "has the command SOMETHING"),
        (MANIFEST, b"*1\r\n$2\r\n\x1b[\r\n", r"has the command \?"),
        (MANIFEST, b"VALKEY080\xff" + bytes(8) + b"*1\r\n$3\r\nACL\r\n", "has the command ACL"),
        (MANIFEST, b"MODULE LOAD ./x.so\r\n", "is not an append-only file"),
        (MANIFEST, b"*1\r\n*1\r\n", "is not an append-only file"),
        (MANIFEST, b"$1\r\n", "is not an append-only file"),
        (MANIFEST, b"*1\r\n$999999999\r\nx", ""),
        (MANIFEST, b"*999999999\r\n", ""),
        (MANIFEST, b"*9" * 99, "is not an append-only file"),
        (MANIFEST, os.urandom(999) + b"\n", "is"),
        (MANIFEST, b"*3\r\n$4\r\nXADD\r\n$15\r\n{unicron:c}:log\r\n$1\r\n*\r\n", "is no record"),
        (
            MANIFEST,
            b"*5\r\n$4\r\nXADD\r\n$15\r\n{unicron:c}:log\r\n$3\r\n1-1\r\n$1\r\nr\r\n$1\r\nx\r\n",
            "is not a record",
        ),
        (MANIFEST, b"VALKEY080\xfa\xff\xff", ""),
        (MANIFEST, b"REDIS", ""),
        (b"file ../../secret seq 1 type i\n", b"", "is not a manifest"),
        (b"file link seq 1 type i\n", b"", "is no file of the log: a symbolic link"),
        (b"file fifo seq 1 type i\n", b"", "is no file of the log: a fifo"),
        (MANIFEST * 2, b"", "appendonly.aof.manifest names appendonly.aof.1.incr.aof twice"),
        (MANIFEST + b"file linked seq 2 type i\n", b"", "manifest names linked twice"),
        (MANIFEST + b"file h seq 1 type h\n" * 4000, b"", "is not a manifest"),
        (b"", b"", ""),
        (b"\xff\n", b"", "is not a manifest"),
    ],
)
def test_any_files_are_read_or_refused(
    tmp_path: Path, manifest: bytes, commands: bytes, why: str
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "appendonly.aof.manifest").write_bytes(manifest)
    (folder / "appendonly.aof.1.incr.aof").write_bytes(commands)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "linked").hardlink_to(folder / "appendonly.aof.1.incr.aof")
    if why:
        with pytest.raises((UsageError, CorruptLog, OSError), match=why):
            read(tmp_path)
    else:
        assert read(tmp_path).records == []


def added(seq: int, wire: bytes) -> bytes:
    words = (b"XADD", b"{unicron:c}:log", b"1-%d" % seq, b"r", wire)
    return b"*5\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def test_what_is_no_record_takes_no_memory_whatever_its_size(tmp_path: Path) -> None:
    """A command of 20 words of 64 MiB, all of them holes, and one of a million words."""
    folder, made = tmp_path / FOLDER, [record(1, 1), record(2, 1)]
    folder.mkdir()
    (folder / append_only_file.MANIFEST).write_bytes(MANIFEST)
    with (folder / "appendonly.aof.1.incr.aof").open("wb") as file:
        file.write(added(1, encode_record(made[0])) + b"*21\r\n$3\r\nSET\r\n")
        for _ in range(20):
            file.write(b"$%d\r\n" % (64 << 20))
            file.seek(64 << 20, os.SEEK_CUR)
            file.write(b"\r\n")
        file.write(b"*1000001\r\n$5\r\nRPUSH\r\n" + b"$0\r\n\r\n" * 1_000_000)
        file.write(added(2, encode_record(made[1])))
    tracemalloc.start()
    try:
        assert read(tmp_path) == (made, "", "")
        assert append_only_file.check(tmp_path) == ""
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_records_are_held_up_to_a_bound(tmp_path: Path) -> None:
    """Also those of a transaction; the entries that are sealed do not count."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / append_only_file.MANIFEST).write_bytes(MANIFEST)
    with (folder / "appendonly.aof.1.incr.aof").open("wb") as file:
        file.write(b"*1\r\n$5\r\nMULTI\r\n")
        for seq in range(1, 7):
            head, _, tail = added(seq, b"?").rpartition(b"$1\r\n?")
            file.write(b"%b$%d\r\n" % (head, 50 << 20))
            file.seek(50 << 20, os.SEEK_CUR)
            file.write(tail)
    with pytest.raises(UsageError, match="has more than 256 MiB of records that are not sealed"):
        read(tmp_path)
    assert read(tmp_path, after=6) == ([], "", "appendonly.aof.1.incr.aof")
