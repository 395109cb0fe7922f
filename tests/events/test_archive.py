"""An exported log reads back unchanged, and any change of the file is reported with its seq."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unicron.events.errors import CorruptLog, UsageError
from unicron.events.log import archive
from unicron.events.records import codec, reports
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import Record
from unicron.events.records.types import Body
from unicron.events.spec.job import parse

NUM = 9
FIRST_LINE = 1  # index of the first record's line: line 0 is the header


def record(seq: int, body: Body | None = None) -> Record:
    return Record(
        seq=seq,
        epoch=1,
        at_s=1700000000.0 + seq / 3,
        occurred_s=1.25,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=body or reports.NodeLeft(node="n1", incarnation=7, reason="ü\n\u2028"),
    )


def submitted(seq: int) -> Record:
    spec = parse(
        {
            "apiVersion": "unicron/v1",
            "name": "a",
            "command": ["true"],
            "slots": {"min": 1, "max": 4},
            "throughput": {1: 0.1, 2: 1e22, 4: 3.0},
        }
    )
    return record(seq, reports.TaskSubmitted(spec=spec))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    records = [submitted(1), *(record(seq) for seq in range(2, NUM + 1))]
    assert archive.write(path, iter(records), cluster="c", code="1.0") == NUM
    assert list(archive.read(path)) == records
    return path


def read_all(path: Path) -> tuple[int, CorruptLog | None]:
    """(number of good records, the error after them)."""
    num = 0
    try:
        for _ in archive.read(path):
            num += 1
    except CorruptLog as error:
        return num, error
    return num, None


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        archive.header(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        next(archive.read(tmp_path / "pipe"))


def test_round_trip_with_header_and_no_other_file(exported: Path) -> None:
    head = archive.header(exported)
    assert (head.cluster, head.code, head.first_seq) == ("c", "1.0", 1)
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    first = json.loads(exported.read_text().splitlines()[FIRST_LINE])
    assert first["kind"] == "TaskSubmitted", "a record is one line of JSON"


def test_an_empty_log_and_one_that_starts_later(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert archive.write(path, [], cluster="c", code="1.0") == 0
    assert list(archive.read(path)) == []
    archive.write(path, [record(41), record(42)], cluster="c", code="1.0", first_seq=41)
    assert [r.seq for r in archive.read(path)] == [41, 42]


def test_a_kind_of_a_newer_version_is_kept(tmp_path: Path) -> None:
    _, _, raw = codec.encode_body(reports.NodeLeft(node="n", incarnation=1, reason=""))
    newer = record(1, UnknownBody(kind="GpuMelted", version=3, raw=raw))
    archive.write(tmp_path / "log", [newer], cluster="c", code="9")
    (back,) = archive.read(tmp_path / "log")
    assert back == newer


def edit(old: bytes, new: bytes) -> Callable[[list[bytes]], None]:
    def change(lines: list[bytes]) -> None:
        assert old in lines[4]
        lines[4] = lines[4].replace(old, new)

    return change


def put(where: slice, *new: bytes) -> Callable[[list[bytes]], None]:
    return lambda lines: lines.__setitem__(where, list(new))


TAMPERED: dict[str, Callable[[list[bytes]], None]] = {
    "time": edit(b"1.25", b"1.26"),
    "kind": edit(b"NodeLeft", b"NodeHear"),
    "seq": edit(b'"seq":4', b'"seq":40'),
    "cause": edit(b'"cause":0', b'"cause":3'),
    "checksum": edit(b'"chain":"', b'"chain":"0'),
    "no checksum": edit(b'"chain"', b'"c"'),
    "no field": edit(b'"source_seq":4,', b""),
    "dropped": put(slice(4, 5)),
    "truncated": put(slice(4, None)),
    "cut before the footer": put(slice(4, -1)),
    "blank line": put(slice(4, 4), b"\n"),
    "garbage": put(slice(4, 5), b"\xff\xfe garbage\n"),
    "a number": put(slice(4, 5), b"4\n"),
    "swapped": lambda lines: lines.insert(4, lines.pop(5)),
    "doubled": lambda lines: lines.insert(4, lines[3]),
    "cut within a line": lambda lines: lines.__setitem__(slice(4, None), [lines[4][:50]]),
}
"""How the line of record 4, or the lines after it, are changed."""


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_tampering_names_the_first_seq_that_differs(
    exported: Path, change: Callable[[list[bytes]], None]
) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    change(lines)
    exported.write_bytes(b"".join(lines))
    num_good, told = read_all(exported)
    assert told is not None
    assert (told.seq, num_good) == (4, 3), "the records before seq 4 are valid"


def test_a_missing_first_or_last_record_is_found(exported: Path) -> None:
    whole = exported.read_bytes().splitlines(keepends=True)
    for place, seq in ((FIRST_LINE, 1), (NUM, NUM)):
        exported.write_bytes(b"".join(whole[:place] + whole[place + 1 :]))
        _, told = read_all(exported)
        assert told is not None
        assert told.seq == seq


@pytest.mark.parametrize("num_lines", range(1, NUM + 1))
def test_a_cut_file_is_reported_with_its_length(exported: Path, num_lines: int) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)[:num_lines]
    exported.write_bytes(b"".join(lines))
    num_good, told = read_all(exported)
    assert told is not None
    assert (told.seq, num_good) == (num_lines, num_lines - 1)
    assert f"truncated after {num_lines - 1} records" in str(told)


def test_a_record_of_another_log_is_found(exported: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    archive.write(
        other,
        [submitted(1), *(record(seq) for seq in range(2, NUM + 1))],
        cluster="another",
        code="1.0",
    )
    lines = exported.read_bytes().splitlines(keepends=True)
    lines[6] = other.read_bytes().splitlines(keepends=True)[6]
    exported.write_bytes(b"".join(lines))
    _, told = read_all(exported)
    assert told is not None
    assert told.seq == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"c"', b'"d"'),
        (b'"first_seq":1', b'"first_seq":2'),
        (b'"first_seq":1', b'"first_seq":"x"'),
    ],
)
def test_an_edited_header_or_footer_is_found(exported: Path, old: bytes, new: bytes) -> None:
    text = exported.read_bytes()
    exported.write_bytes(text.replace(old, new, 1))
    assert read_all(exported)[1] is not None
    end = text.replace(b'"num_records":9', b'"num_records":8')
    exported.write_bytes(end)
    assert "its footer says 8" in str(read_all(exported)[1])
    exported.write_bytes(text + b"{}\n")
    assert "follows the footer" in str(read_all(exported)[1])


@pytest.mark.parametrize(
    "change",
    [
        {"source_seq": 10**30},
        {"v": 10**30},
        {"body": {"node": "n", "incarnation": 10**30}},
        {"kind": "OfTomorrow", "body": {"n": -(10**30)}},
    ],
)
def test_a_number_that_no_log_can_hold_is_corrupt(tmp_path: Path, change: dict[str, Any]) -> None:
    """Its chain is valid: JSON has such numbers."""
    path = tmp_path / "log.jsonl"
    plain = codec.to_plain(record(1))
    with path.open("wb") as file:
        writer = archive.Writer(
            path,
            file,
            archive.Header(
                format=archive.FORMAT,
                version=archive.FORMAT_VERSION,
                cluster="c",
                code="t",
                first_seq=1,
            ),
        )
        writer._line({**plain, **change, "body": plain["body"] | change.get("body", {})})
    num, error = read_all(path)
    assert (num, error and error.seq) == (0, 1)
    assert "not a record" in str(error)


def test_a_line_that_is_nested_too_deep_is_corrupt(exported: Path) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"incarnation":7', b'"incarnation":' + b"[" * 9000 + b"]" * 9000)
    exported.write_bytes(b"".join(lines))
    num, error = read_all(exported)
    assert (num, error and error.seq) == (4, 5)


def test_lines_as_tail_prints_them_are_no_exported_log(tmp_path: Path) -> None:
    path = tmp_path / "tail.jsonl"
    path.write_text("".join(f"{json.dumps(codec.to_plain(record(seq)))}\n" for seq in (5, 6)))
    with pytest.raises(UsageError, match="is not an exported log") as raised:
        list(archive.read(path))
    assert raised.value.hint == archive.EXPORT_HINT


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"hello\n",
        b"{}\n",
        b"[1]\n",
        b"\x89PNG\r\n\x1a\n\x00\xff",
        b"7\n",
        b'{"format":"other","version":1}\n',
        b'{"format":"unicron-log","version":99}\n',
        b"\x00" * 99,
    ],
)
def test_a_foreign_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        list(archive.read(path))
    assert raised.value.hint
    assert "\n" not in str(raised.value)


def test_a_missing_file_or_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError):
            list(archive.read(path))


def test_a_write_that_fails_leaves_the_old_file(exported: Path) -> None:
    before = exported.read_bytes()
    with pytest.raises(CorruptLog) as raised:
        archive.write(exported, [record(1), record(3)], cluster="c", code="1.0")
    assert raised.value.seq == 2
    assert exported.read_bytes() == before
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    with pytest.raises(UsageError):
        archive.write(exported.parent / "no" / "folder", [], cluster="c", code="1.0")
    with pytest.raises(OSError, match="of the source"):  # errors of the source pass through
        archive.write(exported, (_fail() for _ in "1"), cluster="c", code="1.0")


def _fail() -> Record:
    raise OSError("of the source")


def test_memory_stays_constant(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tracemalloc.start()
    try:
        archive.write(path, (record(seq) for seq in range(1, 20001)), cluster="c", code="1.0")
        assert sum(1 for _ in archive.read(path)) == 20000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 < path.stat().st_size // 4
    finally:
        tracemalloc.stop()


def test_the_chain_is_that_of_hashlib(exported: Path) -> None:
    """SHA-256 over the chain before and the line without its own, which is its last member."""
    chain = ""
    for line in exported.read_bytes().splitlines():
        body, found = line[:-2].split(b',"chain":"')
        chain = hashlib.sha256(chain.encode() + body + b"}").hexdigest()
        assert found.decode() == chain
