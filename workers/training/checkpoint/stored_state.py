"""Reads a checkpoint by regions of the whole tensors, into the live tensors of any layout.

Nothing that a checkpoint contains is executed: of pickles only torch's metadata classes are read.
"""

import io
import pathlib
import pickle
import zlib
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner

from ....events.errors import UsageError
from ....events.object_storage import COMPLETE_MARK, PathStore, Store
from ....events.spec.job import is_url
from ...host.checkpoint_index import read_index
from ..dependencies.private_torch import classes_of_metadata
from ..recovery.regions import State, cut, kind_of
from ..recovery.resharding import Dims, Region, intersection
from .share_files import FORMAT_KEY, FORMAT_NUM, NUMBERS

ANOTHER = "name another checkpoint"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    **{
        (planner.__name__, name): getattr(planner, name)
        for name in (
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        )
    },
    **classes_of_metadata(),
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
}
"""What a pickle of `.metadata` may name, beside torch's dtypes. None of these runs code."""


class _Place(NamedTuple):
    region: Region
    file: str
    begin_bytes: int
    length_bytes: int


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        found = _ALLOWED.get((module_name, global_name))
        if found is None and module_name == "torch":
            found = getattr(torch, global_name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it would load {module_name}.{global_name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it would load a persistent object")


class Damaged(OSError):
    """The checkpoint or a part of it is missing, or is not what its metadata says."""


class StoredState:
    """A complete checkpoint at a path or a URL. Each method raises UsageError if the checkpoint is
    of another model or a later version, Damaged if it is damaged or missing, and another OSError
    if it cannot be read now."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files = Store(folder) if is_url(folder) else PathStore(folder)
        self.kinds: dict[str, str] = {}
        """By key of a tensor: the dtype and shape of the whole tensor."""
        self._chunks: dict[str, list[_Place]] = {}
        self._checksums: dict[str, dict[int, int]] = {}
        self._format_num = 0
        self._read_metadata()

    def _read_metadata(self) -> None:
        data = self._files.read(COMPLETE_MARK)
        if data is None:
            if not self._files.names():
                raise Damaged("the checkpoint is missing")
            raise self._damaged(f"it has no {COMPLETE_MARK}: it is not complete")
        try:
            found = _MetadataUnpickler(io.BytesIO(data)).load()
            places: dict[tuple[str, Dims], Any] = {
                (index.fqn, tuple(index.offset or ())): info
                for index, info in found.storage_data.items()
            }
            for key, stored in found.state_dict_metadata.items():
                regions = [Region((), ())]
                if isinstance(stored, metadata.TensorStorageMetadata):
                    self.kinds[key] = (
                        f"{str(stored.properties.dtype).removeprefix('torch.')} "
                        f"{'x'.join(map(str, stored.size))}"
                    )
                    regions = [
                        Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks
                    ]
                infos = [places[key, region.offset] for region in regions]
                self._chunks[key] = [
                    _Place(region, str(info.relative_path), int(info.offset), int(info.length))
                    for region, info in zip(regions, infos, strict=True)
                ]
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
            MemoryError,
            OverflowError,
            RecursionError,
        ) as error:
            raise self._damaged(
                f"its {COMPLETE_MARK} cannot be read: {' '.join(str(error).split())}"
            ) from None

    def numbers(self) -> dict[str, Any]:
        found = {
            key.removeprefix(f"{NUMBERS}."): self.value(key)
            for key in self._chunks
            if key.startswith(f"{NUMBERS}.")
        }
        if not found:
            raise UsageError(
                f"{self.folder} has no numbers: it is not a checkpoint of Unicron", ANOTHER
            )
        number = found.pop(FORMAT_KEY, 1)
        if not isinstance(number, int) or number > FORMAT_NUM:
            raise UsageError(
                f"{self.folder} has format {number}; this release reads formats up to {FORMAT_NUM}",
                "install the release that wrote it",
            )
        self._format_num = number
        return found

    @property
    def keys(self) -> list[str]:
        return list(self._chunks)

    def value(self, key: str) -> Any:
        """A number, or any other plain value."""
        (place,) = self._chunks[key]
        with self._files.opened(place.file) as file:
            return self._load(file, place)

    def check(self, want: State) -> None:
        """Check that the checkpoint has these shards and that its files are complete. Call
        `numbers` before, which checks the version."""
        missing = sorted({shard.key for shard in want if shard.key not in self.kinds})
        if missing:
            raise self._other(
                f"it has no {missing[0]}"
                + (f", nor {len(missing) - 1} other tensors of the model" if missing[1:] else "")
            )
        used: list[_Place] = []
        for key, kind, region in want:
            if self.kinds[key] != kind:
                raise self._other(f"its {key} is {self.kinds[key]}, not {kind}")
            num = 0
            for place in self._chunks[key]:
                if (part := intersection(place.region, region)) is not None:
                    num += part.num_elements
                    used.append(place)
            if num != region.num_elements:
                raise self._damaged(f"it lacks a part of {key}")
        self._check_files(used)

    def file(self, name: str) -> bytes | None:
        """A small file of the checkpoint; None if it has none of this name."""
        return self._files.read(name)

    def check_files(self) -> None:
        self._check_files(place for places in self._chunks.values() for place in places)

    def _check_files(self, used: Iterable[_Place]) -> None:
        ends_bytes: dict[str, int] = {}
        for place in used:
            end_bytes = place.begin_bytes + place.length_bytes
            ends_bytes[place.file] = max(ends_bytes.get(place.file, 0), end_bytes)
        for file, end_bytes in ends_bytes.items():
            size = self._files.size(file)
            if size is None:
                raise self._damaged(f"its file {file} is missing")
            if size < end_bytes:
                raise self._damaged(f"its file {file} is cut: it has {size} bytes of {end_bytes}")
            if self._format_num > 1 and not self._checksums_of(file):
                raise self._damaged(f"the index of its file {file} is missing or cut")

    def read(self, want: State) -> None:
        """Read these shards into their memory. Call `check` before: a failure may leave a part."""
        takers: dict[_Place, list[tuple[str, Region, Region, Tensor]]] = {}
        for (key, _, region), tensor in want.items():
            for place in self._chunks[key]:
                if (part := intersection(place.region, region)) is not None:
                    takers.setdefault(place, []).append((key, part, region, tensor))
        by_file: dict[str, list[_Place]] = {}
        for place in takers:
            by_file.setdefault(place.file, []).append(place)
        for name, places in by_file.items():
            with self._files.opened(name) as file:
                for place in sorted(places, key=lambda place: place.begin_bytes):
                    chunk = self._load(file, place)
                    for key, part, region, tensor in takers[place]:
                        self._check_chunk(key, place, chunk)
                        cut(tensor, region, part).copy_(cut(chunk, place.region, part))

    def _check_chunk(self, key: str, place: _Place, chunk: Any) -> None:
        dtype = self.kinds[key].partition(" ")[0]
        if (
            not isinstance(chunk, Tensor)
            or tuple(chunk.shape) != place.region.shape
            or (kind_of(chunk, ()).strip() != dtype)
        ):
            raise self._damaged(f"a part of {key} in {place.file} is not what its metadata says")

    def _load(self, file: IO[bytes], place: _Place) -> Any:
        file.seek(place.begin_bytes)
        data = file.read(place.length_bytes)
        expected = self._checksums_of(place.file).get(place.begin_bytes)
        if len(data) < place.length_bytes:
            raise self._damaged(f"its file {place.file} is cut")
        if expected is not None and zlib.crc32(data) != expected:
            raise self._damaged(f"its file {place.file} was altered: a checksum is wrong")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise self._damaged(f"a part of its file {place.file} cannot be read: {why}") from None

    def _checksums_of(self, file: str) -> dict[int, int]:
        """By offset: the checksums of a data file's chunks; none if one member wrote it."""
        if file not in self._checksums:
            name = f"{file.removesuffix('.distcp')}.index"
            index = read_index(self._files.read(name))
            self._checksums[file] = (
                {}
                if index is None
                else {chunk.begin_bytes: chunk.checksum for chunk in index.chunks}
            )
        return self._checksums[file]

    def _damaged(self, why: str) -> Damaged:
        return Damaged(f"the checkpoint is damaged: {why}")

    def _other(self, why: str) -> UsageError:
        return UsageError(f"{self.folder} is of another model: {why}", ANOTHER)
