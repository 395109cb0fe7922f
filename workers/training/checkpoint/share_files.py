"""Writes a checkpoint in parts: each member a data file and an index, and one of them `.metadata`.

The format is that of torch.distributed.checkpoint. The keys are those of training_state.py, and
`numbers`, plain values. `metadata.json` and `common.pt` make Megatron's `dist_checkpointing` read
the folder too. An index is written when the data is durable, so it shows that the member has
written its share.
"""

import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import IO, Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...host.checkpoint_index import Chunk, Index
from ..dependencies.private_torch import storage_info
from ..model import architecture
from ..recovery.regions import shape_of, torch_dtype
from ..recovery.resharding import Region, Shard
from .folder import Folder

FORMAT_NUM = 2
"""Version of the format. A checkpoint without a version was written by one member (version 1)."""
FORMAT_KEY = "format"
"""Key of the version in `numbers`."""
NUMBERS = "numbers"
MEGATRON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Megatron's metadata.json."""


SYNC_BYTES = 256 << 20
"""A data file goes to the disk in parts of this size. One sync at its end would write all that the
page cache has taken: minutes in which nobody sees that anything moves."""


class _Checksummed(io.RawIOBase):
    """Writes to `file`, and continues the checksum. `sync` brings what was written to the disk."""

    def __init__(self, file: IO[bytes], sync: Callable[[], None]) -> None:
        super().__init__()
        self._file, self._sync = file, sync
        self.num_bytes = self.checksum = self._num_synced = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), SYNC_BYTES):
            part = view[begin : begin + SYNC_BYTES]
            self.checksum = zlib.crc32(part, self.checksum)
            self._file.write(part)
            self.num_bytes += len(part)
            if self.num_bytes >= self._num_synced + SYNC_BYTES:
                self._sync()
                self._num_synced = self.num_bytes
        return len(view)


def write_share(
    folder: Folder,
    place: int,
    step_version: int,
    pieces: Iterable[tuple[Shard, Tensor]],
    values: Mapping[str, Any],
) -> Index:
    """Write the data file and then the index of the member at `place`. `values`: what it has beside
    tensors, by key. Raises OSError, RuntimeError, MemoryError, and what `pieces` raises."""
    chunks: list[Chunk] = []
    file_name = folder.data_name(place)
    with folder.create(file_name) as file:
        output = _Checksummed(file, lambda: folder.sync(file))
        for shard, tensor in pieces:
            chunks.append(_write(output, shard.key, shard.kind, shard.region, tensor))
        chunks += [_write(output, key, "", Region((), ()), value) for key, value in values.items()]
        num_bytes = output.num_bytes
    index = Index(FORMAT_NUM, step_version, file_name, num_bytes, chunks)
    folder.write(folder.index_name(place), msgspec.msgpack.encode(index))
    return index


def write_failure(folder: Folder, place: int, step_version: int, why: str) -> None:
    """Tell the first member that the member at `place` cannot write its share, if possible."""
    with suppress(OSError):
        folder.write(
            folder.index_name(place),
            msgspec.msgpack.encode(
                Index(FORMAT_NUM, step_version, folder.data_name(place), 0, [], why or "unknown")
            ),
        )


def plain(numbers: Struct) -> dict[str, Any]:
    """The values of training_state.Numbers, by key, and the version of the format."""
    values = {**msgspec.to_builtins(numbers), FORMAT_KEY: FORMAT_NUM}
    return {f"{NUMBERS}.{name}": value for name, value in values.items()}


def _write(output: _Checksummed, key: str, kind: str, region: Region, value: Any) -> Chunk:
    begin_bytes = output.num_bytes
    output.checksum = 0
    stream: Any = output
    torch.save(value, stream)
    return Chunk(
        key,
        kind,
        region.offset,
        region.shape,
        begin_bytes,
        output.num_bytes - begin_bytes,
        output.checksum,
    )


def complete(
    folder: Folder,
    indexes: Sequence[Index],
    values: Mapping[str, Any] | None = None,
    model: bytes = b"",
) -> int:
    """All shares are written: make the checkpoint complete. Returns its size in bytes. `values`:
    what common.pt has beside the iteration. `model`: the model's description. Raises OSError;
    ValueError if the shares together are not one whole state."""
    step_version = indexes[0].step_version
    metadata = pickle.dumps(_metadata(indexes))
    common = io.BytesIO()
    torch.save({"iteration": step_version, **(values or {})}, common)
    config = json.dumps(MEGATRON).encode()
    folder.write("common.pt", common.getvalue())
    folder.write("metadata.json", config)
    if model:
        folder.write(architecture.FILE, model)
    folder.finish(metadata)
    return (
        len(metadata)
        + len(config)
        + len(model)
        + common.tell()
        + sum(index.file_bytes for index in indexes)
    )


def _metadata(indexes: Sequence[Index]) -> Metadata:
    """torch's `.metadata` for these data files. Raises ValueError."""
    if len({(index.format, index.step_version) for index in indexes}) > 1:
        raise ValueError("its members have states of several steps")
    found: dict[str, tuple[str, list[Chunk]]] = {}
    places: dict[MetadataIndex, Any] = {}
    for index in indexes:
        for chunk in index.chunks:
            kind, chunks = found.setdefault(chunk.key, (chunk.kind, []))
            if kind != chunk.kind:
                raise ValueError(f"{chunk.key} is {kind} for one member, {chunk.kind} for another")
            offset = chunk.offset if kind else None
            position = len(chunks) if kind else None
            places[MetadataIndex(chunk.key, offset, position)] = storage_info(
                index.file, chunk.begin_bytes, chunk.length_bytes
            )
            chunks.append(chunk)
    for key, (kind, chunks) in found.items():
        held, whole = sum(prod(chunk.shape) for chunk in chunks), prod(shape_of(kind))
        if held != whole:
            raise ValueError(f"its members have {held} of the {whole} elements of {key}")
    return Metadata(
        state_dict_metadata={key: _stored(kind, chunks) for key, (kind, chunks) in found.items()},
        planner_data={
            key: tuple(key.split(".", 1)) if key.startswith(f"{NUMBERS}.") else (key,)
            for key in found
        },
        storage_data=places,
        storage_meta=StorageMeta(),
        version="1.0.0",
    )


def _stored(kind: str, chunks: Sequence[Chunk]) -> TensorStorageMetadata | BytesStorageMetadata:
    if not kind:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(kind)),
        torch.Size(shape_of(kind)),
        [
            ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
            for chunk in chunks
        ],
    )
