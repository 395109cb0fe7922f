"""Exported log files: JSON lines with a hash chain, read with constant memory.

The first line is a header, the last a footer, and each line between a record (`codec.to_plain`).
Each line carries `chain`: the SHA-256 of the previous line's chain and of this line without it. So
an edited, dropped, swapped or duplicated record is detected at its position, and a truncated file
by its missing footer. The chain detects accidents and careless edits; it is not a signature.
"""

import contextlib
import hashlib
import os
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from msgspec import Struct

from ..decoding import from_json
from ..errors import CorruptLog, UsageError
from ..records import codec
from ..records.envelope import Record
from ..regular_files import open_regular

FORMAT = "unicron-log"
FORMAT_VERSION = 1
LINE_BYTES_MAX = 64 << 20
EXPORT_HINT = "unicron export FILE writes one"


class Header(Struct, frozen=True, kw_only=True):
    """Line 1: the cluster, the version of the code that wrote the file, the first seq. `begins`:
    of a log whose beginning was pruned, the state before that (control_plane/state/cluster.py)."""

    format: str
    version: int
    cluster: str
    code: str
    first_seq: int
    begins: str = ""


class _Footer(Struct, frozen=True, kw_only=True):
    end: bool
    num_records: int


class Writer:
    """Writes one file, line by line. Use `create` to get a writer."""

    def __init__(self, path: Path, file: IO[bytes], header: Header) -> None:
        self._path = path
        self._file = file
        self._chain = ""
        self._next = header.first_seq
        self.num_records = 0
        self._line(msgspec.to_builtins(header))

    def add(self, record: Record) -> None:
        """Write the next record. Raises CorruptLog for a gap, UsageError if the write fails."""
        if record.seq != self._next:
            raise CorruptLog(self._next, f"is missing: record {record.seq} came")
        self._line(codec.to_plain(record))
        self._next += 1
        self.num_records += 1

    def finish(self) -> None:
        """Write the footer and sync the file to disk."""
        self._line({"end": True, "num_records": self.num_records})
        with _usage_error_of(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def _line(self, data: dict[str, Any]) -> None:
        body = msgspec.json.encode(data)
        self._chain = _link(self._chain, body)
        with _usage_error_of(self._path):
            self._file.write(body[:-1] + b',"chain":"' + self._chain.encode() + b'"}\n')


@contextlib.contextmanager
def create(
    path: Path, *, cluster: str, code: str, first_seq: int = 1, begins: str = ""
) -> Generator[Writer]:
    """Yield a writer; after the block, the whole file appears at `path`. Raises UsageError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    header = Header(
        format=FORMAT,
        version=FORMAT_VERSION,
        cluster=cluster,
        code=code,
        first_seq=first_seq,
        begins=begins,
    )
    try:
        with _usage_error_of(path):
            file = new.open("wb")
        with file:
            writer = Writer(path, file, header)
            yield writer
            writer.finish()
        with _usage_error_of(path):
            new.replace(path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


@contextlib.contextmanager
def _usage_error_of(path: Path, hint: str = "name another file") -> Generator[None]:
    """Turn a failed read or write into UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint) from None


def write(
    path: Path,
    records: Iterable[Record],
    *,
    cluster: str,
    code: str,
    first_seq: int = 1,
    begins: str = "",
) -> int:
    """Write `records`, contiguous from `first_seq`: their number. Raises CorruptLog, UsageError."""
    with create(path, cluster=cluster, code=code, first_seq=first_seq, begins=begins) as writer:
        for record in records:
            writer.add(record)
        return writer.num_records


def header(path: Path) -> Header:
    """Read the header of an exported file. Raises UsageError, CorruptLog."""
    with _open(path) as file:
        return _header(path, file)[0]


def read(path: Path) -> Iterator[Record]:
    """Check and yield the records of an exported file, one after the other.

    Raises UsageError if the file is not an exported log. Raises CorruptLog at the first invalid
    record, after the valid records before it.
    """
    with _open(path) as file:
        head, chain = _header(path, file)
        seq = head.first_seq
        while line := file.readline(LINE_BYTES_MAX):
            body, stored = _parse(line, seq, _count(head, seq))
            chain = _link(chain, msgspec.json.encode(body))
            if body.get("end") is True and "seq" not in body:
                _check_end(file, body, head, seq, stored == chain)
                return
            if body.get("seq") != seq:
                raise CorruptLog(seq, f"the file has record {body.get('seq')} in its place")
            if stored != chain:
                raise CorruptLog(seq, "the record was changed: its chain does not match")
            yield codec.from_plain(body)
            seq += 1
        raise CorruptLog(seq, f"truncated after {_count(head, seq)}: the file has no footer")


def _open(path: Path) -> IO[bytes]:
    with _usage_error_of(path, EXPORT_HINT):
        return open_regular(path)


def _header(path: Path, file: IO[bytes]) -> tuple[Header, str]:
    with _usage_error_of(path, EXPORT_HINT):
        line = file.readline(LINE_BYTES_MAX)
    if not line.strip():
        raise UsageError(f"{path} is empty", EXPORT_HINT)
    try:
        data: Any = from_json(line)
    except msgspec.MsgspecError:
        raise UsageError(f"{path} is not an exported log", EXPORT_HINT) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not an exported log", EXPORT_HINT)
    body = cast(dict[str, Any], data)
    if body.get("format") != FORMAT:
        raise UsageError(f"{path} is not an exported log", EXPORT_HINT)
    stored = body.pop("chain", "")
    if body.get("version") != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {body.get('version')!r}, this reads {FORMAT_VERSION}",
            "use the Unicron that wrote it",
        )
    try:
        head = msgspec.convert(body, Header)
    except msgspec.ValidationError as error:
        raise CorruptLog(1, f"the header is invalid: {error}") from None
    chain = _link("", msgspec.json.encode(body))
    if stored != chain:
        raise CorruptLog(head.first_seq, "the header was changed: its chain does not match")
    return head, chain


def _parse(line: bytes, seq: int, so_far: str) -> tuple[dict[str, Any], str]:
    """Return (the line without its chain, its chain)."""
    if not line.endswith(b"\n"):
        raise CorruptLog(seq, f"truncated after {so_far}: the line is incomplete")
    try:
        data: Any = from_json(line)
    except msgspec.MsgspecError as error:
        raise CorruptLog(seq, f"the line is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CorruptLog(seq, "the line is not a record")
    body = cast(dict[str, Any], data)
    return body, str(body.pop("chain", ""))


def _check_end(
    file: IO[bytes], body: dict[str, Any], head: Header, seq: int, chained: bool
) -> None:
    try:
        footer = msgspec.convert(body, _Footer)
    except msgspec.ValidationError as error:
        raise CorruptLog(seq, f"the footer is invalid: {error}") from None
    num = seq - head.first_seq
    if footer.num_records != num:
        raise CorruptLog(seq, f"the file has {num} records, its footer says {footer.num_records}")
    if not chained:
        raise CorruptLog(seq, "the footer was changed: its chain does not match")
    if file.readline(LINE_BYTES_MAX):
        raise CorruptLog(seq, f"data follows the footer after {num} records")


def _count(head: Header, seq: int) -> str:
    return f"{seq - head.first_seq} records"


def _link(chain: str, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + body).hexdigest()
