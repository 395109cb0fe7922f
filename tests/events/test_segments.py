"""Segments and snapshots of the log: their chain, and every way in which it can be damaged."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from unicron.events.errors import CorruptLog, Pruned, UsageError
from unicron.events.log import segments
from unicron.events.log.segments import (
    DIGEST_CHARS,
    NO_DIGEST,
    Folder,
    SealedLog,
    Segment,
    Snapshot,
)
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

DEEP = b"\x81\xa4body" + b"\x81\xa1a" * 5000 + b"\xc0"


def record(seq: int, epoch: int = 1) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=float(seq),
        occurred_s=1.0,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=r.NodeLeft(node="n1", incarnation=7, reason=f"number {seq}"),
    )


def records(first: int, last: int, epoch: int = 1) -> list[Record]:
    return [record(seq, epoch) for seq in range(first, last + 1)]


@pytest.fixture(params=["folder", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "folder":
        yield Folder(tmp_path / "log", "c")
        return
    fsspec = pytest.importorskip("fsspec")
    yield Folder("memory://log", "c")
    fsspec.filesystem("memory").store.clear()


def sealed(folder: Folder, *lasts: int) -> list[Segment]:
    made: list[Segment] = []
    for last in lasts:
        first = made[-1].last + 1 if made else 1
        made.append(folder.write(records(first, last), made[-1] if made else None))
    return made


def test_what_is_sealed_is_read(folder: Folder) -> None:
    made = sealed(folder, 10, 25, 40)
    assert folder.chain() == made
    assert folder.chain(made[1].name) == made[:2]
    log = SealedLog(folder)
    assert (log.first, log.last) == (1, 40)
    assert list(log.records()) == records(1, 40)
    assert list(log.records(after=24)) == records(25, 40)
    assert log.read(after=24, num_max=100) == [record(25)]  # to the end of its segment
    assert log.read(after=3, num_max=2) == records(4, 5)
    assert log.read(after=40, num_max=5) == []


def test_an_empty_folder_is_an_empty_log(folder: Folder) -> None:
    log = SealedLog(folder)
    assert (log.first, log.last, list(log.records())) == (1, 0, [])
    assert folder.snapshots() == []


def test_a_segment_that_no_leader_moved_the_head_to_is_passed_over(folder: Folder) -> None:
    """A leader wrote it, and was fenced before it could."""
    first = sealed(folder, 10)[0]
    stray = folder.write(records(11, 15), first)
    other = folder.write(records(11, 18, epoch=2), first)
    assert folder.chain(other.name) == [first, other]
    assert folder.chain() == [first, other]
    assert set(folder.segments()) == {first, stray, other}


def test_missing_records_are_named(folder: Folder) -> None:
    made = sealed(folder, 10, 25, 40)
    folder.remove([made[1]])
    with pytest.raises(CorruptLog, match=r"seq 11: records 11 to 25 are missing from .*: put the "):
        folder.chain()
    folder.remove([made[2]])
    with pytest.raises(CorruptLog, match=f"newest segment, {made[2].name}, is not in"):
        folder.chain(made[2].name)


def test_a_pruned_beginning_is_no_missing_file(folder: Folder) -> None:
    made = sealed(folder, 10, 25, 40, 60)
    snapshots = [folder.write_snapshot(seq, 1, "schema", b"") for seq in (9, 10, 30)]
    old = SealedLog(folder)
    assert folder.prune(made, 11) == [made[0], snapshots[0]]
    assert (folder.chain(), folder.snapshots()) == (made[1:], snapshots[1:])
    log = SealedLog(folder)
    assert (log.first, log.last) == (11, 60)
    assert list(log.records(after=10)) == records(11, 60)
    for read in (log.records, lambda: log.read(after=9, num_max=5)):
        with pytest.raises(Pruned, match="seq 11: the log begins here: records 1 to 10 were prun"):
            next(iter(read()))
    with pytest.raises(CorruptLog, match="records 1 to 10 are missing"):
        old.read(after=0, num_max=5)
    assert folder.prune(made[1:], 41) == [*made[1:3], *snapshots[1:]]
    assert folder.chain() == made[3:]


def test_a_missing_beginning_is_named(folder: Folder) -> None:
    made = sealed(folder, 10, 25, 40)
    folder.remove(made[:1])
    with pytest.raises(CorruptLog, match="seq 1: records 1 to 10 are missing from "):
        folder.chain()
    folder.prune(made, 11)
    assert folder.chain() == made[1:]
    folder.remove(made[1:2])
    with pytest.raises(CorruptLog, match="seq 11: records 11 to 25 are missing from "):
        folder.chain()


def test_an_interrupted_prune_is_finished_by_the_next(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sealed(folder, 10, 25, 40)

    def fails(files: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "remove", fails)
        with pytest.raises(OSError, match="disk"):
            folder.prune(made, 26)
    assert folder.chain() == made[2:]
    assert folder.segments() == made
    assert folder.prune(folder.chain(), 26) == made[:2]
    assert folder.segments() == made[2:]


@pytest.mark.parametrize("damage", ["edited", "cut", "empty", "swapped"])
def test_a_damaged_segment_is_named(tmp_path: Path, damage: str) -> None:
    folder = Folder(tmp_path, "c")
    made = sealed(folder, 10, 25)
    path, other = tmp_path / made[1].name, tmp_path / made[0].name
    data = path.read_bytes()
    path.write_bytes(
        {
            "edited": data[:60] + bytes([data[60] ^ 1]) + data[61:],
            "cut": data[:-1],
            "empty": b"",
            "swapped": other.read_bytes(),
        }[damage]
    )
    log = SealedLog(folder)
    assert log.read(after=0, num_max=10) == records(1, 10)
    with pytest.raises(CorruptLog, match=f"seq 11: {made[1].name} in {tmp_path} is damaged"):
        log.read(after=10, num_max=10)


def test_another_clusters_or_a_later_versions_segment_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sealed(folder, 10)
    with pytest.raises(UsageError, match="is of cluster c, not other"):
        Folder(folder.where, "other").read(made[0])
    monkeypatch.setattr("unicron.events.log.segments.FORMAT_VERSION", 2)
    with pytest.raises(UsageError, match="has format version 1, this reads 2"):
        folder.read(made[0])


def laid(folder: Folder, path: Path, body: bytes, first: int, last: int, prev: str = "") -> Segment:
    """A segment with any body, whose digest matches."""
    header = b'{"kind":"unicron-segment","version":1,"cluster":"c"}\n'
    data = header + body
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]
    segment = Segment(first, last, 1, digest, prev or NO_DIGEST)
    path.mkdir(exist_ok=True)
    (path / segment.name).write_bytes(data)
    return segment


def test_segments_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    """A file may name its own digest as that of the one before, or two each other's."""
    path = tmp_path / "log"
    folder = Folder(path, "c")
    segment = laid(folder, path, b"", 1, 1)
    (path / segment.name).rename(path / segment._replace(prev=segment.digest).name)
    with pytest.raises(CorruptLog, match="missing"):
        folder.chain()
    (path / segment._replace(prev=segment.digest).name).unlink()
    for first, last, digest, prev in ((1, 5, "a", "b"), (6, 9, "b", "a"), (5, 1, "c", "c")):
        (path / Segment(first, last, 1, digest * 16, prev * 16).name).write_bytes(b"")
    with pytest.raises(CorruptLog, match="missing"):
        folder.chain()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (zlib.compress(b""), "other records than its name says"),
        (zlib.compress(b"\0\0\0\x09abc"), "longer than the rest of the file"),
        (zlib.compress(b"\0\0\0\0"), "data was truncated"),
        (zlib.compress(b"\0\0"), "requires a buffer"),
        (zlib.compress((15007).to_bytes(4, "big") + DEEP), "recursion"),
        (zlib.compress(b"\0\0\0\x02\xa1\xff"), "Expected|utf-8"),
        (zlib.compress(b"abc")[:-1], "cut"),
        (zlib.compress(b"abc") + b"d", "more than its end"),
        (b"", "cut"),
        (b"abc", "header check"),
        (zlib.compress(bytes(1 << 20)), "unpacks to more than 65536 bytes"),
    ],
)
def test_any_bytes_of_a_segment_are_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, why: str
) -> None:
    monkeypatch.setattr(segments, "UNPACKED_BYTES_MAX", 1 << 16)
    folder = Folder(tmp_path / "log", "c")
    segment = laid(folder, tmp_path / "log", body, 1, 1)
    with pytest.raises(CorruptLog, match=why):
        folder.read(segment)


def test_the_last_record_of_a_segment_is_whole(tmp_path: Path) -> None:
    """A length beyond the end, with all bytes of the record before it."""
    folder = Folder(tmp_path / "log", "c")
    wire = codec.encode_record(record(1))
    body = zlib.compress((len(wire) + 100).to_bytes(4, "big") + wire)
    with pytest.raises(CorruptLog, match="longer than the rest"):
        folder.read(laid(folder, tmp_path / "log", body, 1, 1))


def test_a_name_of_more_records_than_there_are_takes_no_memory(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "log", "c")
    segment = laid(folder, tmp_path / "log", zlib.compress(b""), 1, 10**15)
    with pytest.raises(CorruptLog, match="other records than its name says"):
        folder.read(segment)


@pytest.mark.parametrize("bound", ["UNPACKED_BYTES_MAX", "FILE_BYTES_MAX"])
def test_a_segment_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(segments, bound, 1 << 8)
    with pytest.raises(UsageError, match="a segment has at most") as raised:
        Folder(tmp_path / "log", "c").write(records(1, 100), None)
    assert "seal_records" in raised.value.hint


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_segment_that_is_no_file_is_an_os_error(tmp_path: Path, kind: str) -> None:
    segment = Segment(1, 1, 1, "a" * DIGEST_CHARS, NO_DIGEST)
    path = tmp_path / segment.name
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        Folder(tmp_path, "c").read(segment)


def test_names_tell_what_a_file_is() -> None:
    segment = Segment(1, 10, 3, "0123456789abcdef", "fedcba9876543210")
    assert Segment.parse(segment.name) == segment
    snapshot = Snapshot(10, 3, "0123456789abcdef")
    assert Snapshot.parse(snapshot.name) == snapshot
    for name in ("", "x.segment", segment.name + ".new", f".{segment.name}"):
        assert Segment.parse(name) is None
        assert Snapshot.parse(name) is None


def test_a_snapshot_keeps_its_state(folder: Folder) -> None:
    folder.write_snapshot(10, 1, "schema", b"ten")
    twenty = folder.write_snapshot(20, 2, "schema", b"twenty")
    assert [one.seq for one in folder.snapshots()] == [10, 20]
    assert folder.read_snapshot(twenty) == ("schema", b"twenty")
    folder.remove([twenty])
    with pytest.raises(CorruptLog, match="record 20 is missing"):
        folder.read_snapshot(twenty)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        sealed(Folder(tmp_path / "file" / "log", "c"), 10)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
