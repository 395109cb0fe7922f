"""The indexes of a checkpoint's data files, by which it can be read back without torch.

Each member of a task writes a data file and its index (training/checkpoint/share_files.py).
"""

import os
import zlib
from typing import IO

import msgspec
from msgspec import Struct

from ...events.decoding import from_msgpack
from ...events.object_storage import COMPLETE_MARK, PathStore, Store
from ...events.spec.job import is_url

PIECE_BYTES = 16 << 20
_INDEX, _DATA = ".index", ".distcp"


class Chunk(Struct, frozen=True, array_like=True):
    """A region of a tensor in a data file. `kind` is the dtype and shape of the whole tensor; a
    number has none. `checksum` is the CRC-32 of its `length_bytes` from `begin_bytes` on."""

    key: str
    kind: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin_bytes: int
    length_bytes: int
    checksum: int


class Index(Struct, frozen=True, array_like=True):
    """The contents of the data file `file`. `error`: why the member did not write its share."""

    format: int
    step_version: int
    file: str
    file_bytes: int
    chunks: list[Chunk]
    error: str = ""


def read_index(data: bytes | None) -> Index | None:
    """An index from its bytes; None if there is none, or if it is not complete."""
    try:
        return None if data is None else from_msgpack(data, Index)
    except msgspec.MsgspecError:
        return None


def damage(folder: str) -> str:
    """Read all data of a checkpoint, at a path or a URL: what is wrong with it; "": nothing. Raises
    OSError, and for a URL UsageError."""
    files = Store(folder) if is_url(folder) else PathStore(folder)
    names = files.names()
    if COMPLETE_MARK not in names:
        return f"it has no {COMPLETE_MARK}"
    data = sorted(name for name in names if name.endswith(_DATA))
    if not data:
        return "it has no data"
    for name in data:
        index = read_index(files.read(f"{name.removesuffix(_DATA)}{_INDEX}"))
        if index is None or index.error:
            return f"the index of its file {name} is missing or cut"
        if sum(chunk.length_bytes for chunk in index.chunks) > index.file_bytes or any(
            chunk.begin_bytes < 0 or chunk.length_bytes < 0 for chunk in index.chunks
        ):
            return f"the index of its file {name} names more than that has"
        if files.size(name) != index.file_bytes:
            return f"its file {name} has {files.size(name)} bytes of {index.file_bytes}"
        with files.opened(name) as file:
            if not is_url(folder):  # from the disk, and without a place in the cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for chunk in sorted(index.chunks, key=lambda chunk: chunk.begin_bytes):
                if _checksum(file, chunk) != chunk.checksum:
                    return f"its file {name} was altered: a checksum is wrong"
            if not is_url(folder):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ""


def _checksum(file: IO[bytes], chunk: Chunk) -> int:
    file.seek(chunk.begin_bytes)
    left, checksum = chunk.length_bytes, 0
    while left and (piece := file.read(min(left, PIECE_BYTES))):
        checksum = zlib.crc32(piece, checksum)
        left -= len(piece)
    return checksum if not left else -1
