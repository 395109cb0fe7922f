"""Snapshots: the folded state in files, so that a start or a look back need not fold the whole log.

A snapshot is never trusted more than the log: one that is damaged, or of another shape of the
state, is passed over for the one before.
"""

from collections.abc import Iterable

import msgspec
import structlog

from ...events.decoding import from_msgpack
from ...events.errors import CorruptLog
from ...events.log.segments import Folder, SealedLog
from ...events.records.envelope import Record
from ..fold.fold import fold
from ..state.cluster import (
    NUM_REQUESTS_MAX,
    SCHEMA,
    ClusterState,
    decode_state,
    encode_state,
)

_logger = structlog.get_logger("control_plane")


def encode(state: ClusterState, answers: dict[str, int]) -> bytes:
    """The bytes of a snapshot. `answers`: see control_plane/service/leader.py."""
    return msgspec.msgpack.encode((answers, encode_state(state)))


def write(folder: Folder, seq: int, epoch: int, encoded: bytes) -> None:
    """Write a snapshot that was encoded after record `seq`. Raises OSError."""
    folder.write_snapshot(seq, epoch, SCHEMA, encoded)


def remember(answers: dict[str, int], records: Iterable[Record]) -> None:
    """Add the operators' requests among the records to the answers; the oldest are dropped."""
    for record in records:
        if record.source.startswith("operator/") and record.source_seq == 1:
            answers[record.source] = record.seq
    while len(answers) > NUM_REQUESTS_MAX:
        del answers[next(iter(answers))]


def write_at(folder: Folder, sealed: SealedLog, seq: int) -> None:
    """Write the snapshot after record `seq`, and read it again. Raises CorruptLog, OSError."""
    state, answers = newest(folder, seq)
    while state.seq < seq:
        page = sealed.read(after=state.seq, num_max=seq - state.seq)
        for record in page:
            fold(state, record)
        remember(answers, page)
    write(folder, seq, state.epoch, encode(state, answers))
    if encode_state(newest(folder, seq)[0]) != encode_state(state):
        raise CorruptLog(seq, "its snapshot cannot be read again")


def newest(
    folder: Folder | None, seq_max: int | None = None
) -> tuple[ClusterState, dict[str, int]]:
    """State and answers of the newest good snapshot until `seq_max`, or empty. Raises OSError."""
    if folder is None:
        return ClusterState(), {}
    for one in reversed(folder.snapshots()):
        if seq_max is not None and one.seq > seq_max:
            continue
        try:
            schema, data = folder.read_snapshot(one)
            if schema == SCHEMA:
                answers, state = from_msgpack(data, tuple[dict[str, int], bytes])
                return decode_state(state), answers
        except (CorruptLog, msgspec.MsgspecError) as error:
            _logger.warning("passed over a snapshot", snapshot=one.name, why=str(error))
    return ClusterState(), {}
