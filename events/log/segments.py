"""Segments: the sealed part of the log in files, compressed and chained by digest.

    FIRST-LAST-EPOCH-DIGEST-PREV.segment   records FIRST to LAST; PREV: the segment before
    SEQ-EPOCH-DIGEST.state                 a snapshot: the folded state after record SEQ
    SEQ-EPOCH-DIGEST.usage                 figures of the records until SEQ, which ends a segment
    FIRST-PREV.pruned                      the segments before record FIRST were pruned

A name has all that the chain needs: the digest of the file's bytes, and that of the segment before.
So the name of the newest segment, the head, determines the whole sealed log. The log's server holds
it, and moves it by a script that is fenced by the epoch: two leaders may write files, and only one
of them moves the head. Without the server, the longest chain counts. Files are written whole, and
never changed. Whoever reads them trusts nothing in them: a folder may come from somebody else.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from ..decoding import from_json
from ..errors import CorruptLog, Pruned, UsageError
from ..object_storage import PathStore, Store
from ..records import codec
from ..records.envelope import Record
from ..spec.job import is_url

FORMAT_VERSION = 1
DIGEST_CHARS = 16
"""64 bits: the chain detects accidents; it is not a signature."""
FILE_BYTES_MAX, UNPACKED_BYTES_MAX = 256 << 20, 512 << 20
"""Of a file, and of what it has once it is unpacked: a thousand times as much, if it is hostile."""
_HEAD = struct.Struct(">I")
_SEGMENT = re.compile(r"(\d{16})-(\d{16})-(\d{8})-([0-9a-f]{16})-([0-9a-f]{16})\.segment")
_SNAPSHOT = re.compile(r"(\d{16})-(\d{8})-([0-9a-f]{16})\.(state|usage)")
_PRUNED = re.compile(r"(\d{16})-([0-9a-f]{16})\.pruned")
NO_DIGEST = "0" * DIGEST_CHARS
Kind = Literal["state", "usage"]


class Segment(NamedTuple):
    """Records `first` to `last` of the log, sealed by the leader of `epoch`."""

    first: int
    last: int
    epoch: int
    digest: str
    prev: str

    @property
    def name(self) -> str:
        return f"{self.first:016}-{self.last:016}-{self.epoch:08}-{self.digest}-{self.prev}.segment"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """The segment of a file's name; None for another file."""
        if (found := _SEGMENT.fullmatch(name)) is None:
            return None
        one = cls(int(found[1]), int(found[2]), int(found[3]), *found.group(4, 5))
        return one if 0 < one.first <= one.last else None


class Snapshot(NamedTuple):
    """The state after record `seq`, which is of `epoch`; `usage`: figures until then."""

    seq: int
    epoch: int
    digest: str
    kind: str = "state"

    @property
    def name(self) -> str:
        return f"{self.seq:016}-{self.epoch:08}-{self.digest}.{self.kind}"

    @classmethod
    def parse(cls, name: str) -> Snapshot | None:
        """The snapshot of a file's name; None for another file."""
        found = _SNAPSHOT.fullmatch(name)
        return cls(int(found[1]), int(found[2]), *found.group(3, 4)) if found else None


class _Header(Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    kind: str
    version: int
    cluster: str
    schema: str = ""
    """Of a snapshot: control_plane/state/cluster.py; of figures: control_plane/history/usage.py."""


class Folder:
    """The files of one cluster's log. Methods that touch a file raise OSError."""

    def __init__(self, where: str | Path, cluster: str) -> None:
        """Raises UsageError for a URL without a driver."""
        self.where = str(where)
        self.cluster = cluster
        self._store = Store(self.where) if is_url(self.where) else PathStore(where, 0o700)

    # --- segments ---------------------------------------------------------------------------------
    def write(self, records: Sequence[Record], prev: Segment | None) -> Segment:
        """Write contiguous records behind `prev`. Raises UsageError if they are too large."""
        body = bytearray()
        for record in records:
            wire = codec.encode_record(record)
            body += _HEAD.pack(len(wire)) + wire
        data = self._packed("segment", bytes(body))
        if len(body) > UNPACKED_BYTES_MAX or len(data) > FILE_BYTES_MAX:
            raise UsageError(
                f"{len(records)} records are {len(body)} bytes, and {len(data)} packed; a segment "
                f"has at most {UNPACKED_BYTES_MAX}, and {FILE_BYTES_MAX} packed",
                "lower seal_records in the policy",
            )
        segment = Segment(
            records[0].seq,
            records[-1].seq,
            records[-1].epoch,
            _digest(data),
            prev.digest if prev else NO_DIGEST,
        )
        self._store.write(segment.name, data)
        return segment

    def read(self, segment: Segment) -> list[Record]:
        """The records of a segment. Raises CorruptLog if it is missing or damaged."""
        body, _ = self._checked(segment.name, segment.digest, segment.first, segment.last)
        records: list[Record] = []
        at = 0
        try:
            while at < len(body):
                (length,) = _HEAD.unpack_from(body, at)
                at += _HEAD.size + length
                if at > len(body):
                    raise struct.error("a record is longer than the rest of the file")
                records.append(codec.decode_record(body[at - length : at]))
        except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptLog(segment.first + len(records), f"{segment.name}: {error}") from None
        if len(records) != segment.last - segment.first + 1 or any(
            one.seq != seq for seq, one in enumerate(records, segment.first)
        ):
            raise CorruptLog(segment.first, f"{segment.name} has other records than its name says")
        return records

    def segments(self) -> list[Segment]:
        """All segments of the folder, also those that are in no chain."""
        return sorted(
            one for name in self._store.names() if (one := Segment.parse(name)) is not None
        )

    def chain(self, head: str = "") -> list[Segment]:
        """The sealed log up to the segment named `head`, from the oldest that was not pruned; "":
        the longest chain. Raises CorruptLog, with the seqs that are gone, if one is missing."""
        found = self.segments()
        ends = {(one.digest, one.last): one for one in found}
        last = Segment.parse(head)
        if last is None:
            last = max(found, key=lambda one: (one.last, one.epoch), default=None)
        elif last not in found:
            raise CorruptLog(
                last.first,
                f"the newest segment, {head}, is not in {self.where}: all "
                "control planes of a log need the same --segments FOLDER|URL",
            )
        chain: list[Segment] = []
        while last is not None:
            chain.append(last)
            last = ends.get((last.prev, last.first - 1))  # seqs only fall: no circle
        chain.reverse()
        pruned = self._pruned()
        begin = max(
            (at for at, one in enumerate(chain) if (one.first, one.prev) in pruned), default=0
        )
        if (
            chain
            and not begin
            and chain[0].prev != NO_DIGEST
            and (chain[0].first, chain[0].prev) not in pruned
        ):
            lasts = [one.last for one in found if one.last < chain[0].first]
            first = max(
                [*lasts, *(seq - 1 for seq, _ in pruned if seq < chain[0].first)], default=0
            )
            raise gone(first + 1, chain[0].first - 1, self.where)
        return chain[begin:]

    def prune(self, chain: Sequence[Segment], first: int) -> list[Segment | Snapshot]:
        """Let the log begin with the segment of `chain` that begins with record `first`; remove the
        older files, and return them. A snapshot of the state before `first` is there already. If
        this is interrupted, the log is whole, and the next call removes the rest."""
        begin = next(one for one in chain if one.first == first)
        old: list[Segment | Snapshot] = [
            *(one for one in self.segments() if one.last < first),
            *(one for one in self.snapshots() if one.seq < first - 1),
        ]
        self._store.write(f"{first:016}-{begin.prev}.pruned", b"older records were pruned\n")
        self.remove(old)
        return old

    def _pruned(self) -> set[tuple[int, str]]:
        """Where pruned logs begin: the first record, and the digest of the segment before."""
        return {
            (int(found[1]), found[2])
            for name in self._store.names()
            if (found := _PRUNED.fullmatch(name))
        }

    # --- snapshots --------------------------------------------------------------------------------
    def write_snapshot(
        self, seq: int, epoch: int, schema: str, state: bytes, kind: Kind = "state"
    ) -> Snapshot:
        """Write the encoded state after a record, or figures."""
        data = self._packed(kind, state, schema)
        snapshot = Snapshot(seq, epoch, _digest(data), kind)
        self._store.write(snapshot.name, data)
        return snapshot

    def read_snapshot(self, snapshot: Snapshot) -> tuple[str, bytes]:
        """Its schema and the encoded state. Raises CorruptLog if it is missing or damaged."""
        state, schema = self._checked(snapshot.name, snapshot.digest, snapshot.seq, snapshot.seq)
        return schema, state

    def snapshots(self, kind: Kind = "state") -> list[Snapshot]:
        """All snapshots, the newest last."""
        return sorted(
            one
            for name in self._store.names()
            if (one := Snapshot.parse(name)) is not None and one.kind == kind
        )

    def remove(self, files: Iterable[Segment | Snapshot]) -> None:
        """Remove files."""
        for one in files:
            self._store.remove(one.name)

    # --- files ------------------------------------------------------------------------------------
    def _packed(self, kind: str, body: bytes, schema: str = "") -> bytes:
        header = _Header(
            kind=f"unicron-{kind}", version=FORMAT_VERSION, cluster=self.cluster, schema=schema
        )
        return msgspec.json.encode(header) + b"\n" + zlib.compress(body, 1)

    def _checked(self, name: str, digest: str, first: int, last: int) -> tuple[bytes, str]:
        data = self._store.read(name, FILE_BYTES_MAX)
        if data is None:
            raise gone(first, last, self.where)
        if _digest(data) != digest:
            raise CorruptLog(
                first, f"{name} in {self.where} is damaged: it has other bytes than were written"
            )
        try:
            line, _, packed = data.partition(b"\n")
            header = from_json(line, _Header)
            if header.version != FORMAT_VERSION:
                raise UsageError(
                    f"{name} has format version {header.version}, this reads {FORMAT_VERSION}",
                    "use the Unicron that wrote it",
                )
            if header.cluster != self.cluster:
                raise UsageError(
                    f"{name} is of cluster {header.cluster}, not {self.cluster}",
                    "name the folder of this cluster's log",
                )
            return _unpacked(packed), header.schema
        except (msgspec.MsgspecError, zlib.error, ValueError, RecursionError) as error:
            raise CorruptLog(first, f"{name} in {self.where} is damaged: {error}") from None


class SealedLog:
    """Reads records of the sealed log by seq. `head` as in Folder.chain."""

    def __init__(self, folder: Folder, head: str = "") -> None:
        """Raises OSError, CorruptLog."""
        self.folder = folder
        self.chain = folder.chain(head)
        self._records: list[Record] = []

    @property
    def first(self) -> int:
        """The oldest seq that is left; 1 for an empty log."""
        return self.chain[0].first if self.chain else 1

    @property
    def last(self) -> int:
        """The newest seq; 0 for an empty log."""
        return self.chain[-1].last if self.chain else 0

    def add(self, segment: Segment) -> None:
        """A segment was sealed behind the others."""
        self.chain.append(segment)

    def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order, at most `num_max`, and at most to the end of
        a segment. Raises CorruptLog, OSError."""
        if after + 1 < self.first:
            raise Pruned(self.first)
        records = self._records  # another thread may read elsewhere meanwhile
        if not records or not records[0].seq <= after + 1 <= records[-1].seq:
            segment = next(
                (one for one in reversed(self.chain) if one.first <= after + 1 <= one.last), None
            )
            if segment is None:
                return []
            self._records = records = self.folder.read(segment)
        begin = after + 1 - records[0].seq
        return records[begin : begin + num_max]

    def records(self, *, after: int = 0) -> Iterator[Record]:
        """All records above `after`, in order. Raises CorruptLog, OSError."""
        while page := self.read(after=after, num_max=1 << 30):
            yield from page
            after = page[-1].seq


def gone(first: int, last: int, where: str) -> CorruptLog:
    """The error for records that are in no file."""
    which = f"records {first} to {last} are" if last > first else f"record {first} is"
    return CorruptLog(
        first, f"{which} missing from {where}: put the file back, or name a folder that has it"
    )


def _unpacked(packed: bytes) -> bytes:
    """Raises zlib.error."""
    unpacking = zlib.decompressobj()
    body = unpacking.decompress(packed, UNPACKED_BYTES_MAX)
    if unpacking.unconsumed_tail:
        raise zlib.error(f"it unpacks to more than {UNPACKED_BYTES_MAX} bytes")
    if not unpacking.eof or unpacking.unused_data:
        raise zlib.error("it is cut, or has more than its end")
    return body


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]
