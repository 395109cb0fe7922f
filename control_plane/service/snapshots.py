"""Snapshots: the folded state in files, so that a start or a look back need not fold the whole log.

A snapshot is never trusted more than the log: one that is damaged, or of another shape of the
state, is passed over for the one before.
"""

from __future__ import annotations

import msgspec
import structlog

from ...events.errors import CorruptLog
from ...events.log.segments import Folder
from ..state.cluster import SCHEMA, ClusterState, decode_state, encode_state

_logger = structlog.get_logger("control_plane")


def encode(state: ClusterState, answers: dict[str, int]) -> bytes:
    """The bytes of a snapshot. `answers`: see control_plane/service/leader.py."""
    return msgspec.msgpack.encode((answers, encode_state(state)))


def write(folder: Folder, seq: int, epoch: int, encoded: bytes) -> None:
    """Write a snapshot that was encoded after record `seq`. Raises OSError."""
    folder.write_snapshot(seq, epoch, SCHEMA, encoded)


def newest(folder: Folder | None, seq_max: int | None = None
           ) -> tuple[ClusterState, dict[str, int]]:
    """The state and answers of the newest good snapshot at or before `seq_max`; else those before
    record 1. Raises OSError."""
    if folder is None:
        return ClusterState(), {}
    for one in reversed(folder.snapshots()):
        if seq_max is not None and one.seq > seq_max:
            continue
        try:
            schema, data = folder.read_snapshot(one)
            if schema == SCHEMA:
                answers, state = msgspec.msgpack.decode(data, type=tuple[dict[str, int], bytes])
                return decode_state(state), answers
        except (CorruptLog, msgspec.MsgspecError) as error:
            _logger.warning("passed over a snapshot", snapshot=one.name, why=str(error))
    return ClusterState(), {}
