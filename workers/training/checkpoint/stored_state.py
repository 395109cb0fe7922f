"""Reads a checkpoint by regions of the whole tensors, into the live tensors of any layout.

Nothing that a checkpoint contains is executed: of pickles only torch's metadata classes are read.
It may come from somebody else: it names files of its own folder only, and what is read of them is
no larger than its tensors are.
"""

import errno
import io
import pathlib
import pickle
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner

from ....events.errors import UsageError
from ....events.object_storage import COMPLETE_MARK, PathStore, Store, reason
from ....events.spec.job import is_url
from ...host.checkpoint_index import read_index
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..dependencies.private_torch import classes_of_metadata
from ..recovery.regions import State, cut, kind_of, shape_of, torch_dtype
from ..recovery.resharding import Dims, Region, intersection
from .share_files import FORMAT_KEY, FORMAT_NUM, NUMBERS

ANOTHER = "name another checkpoint"
VALUE_BYTES_MAX = 64 << 20
"""Of a number, or another plain value."""
BLOCK_BYTES, BLOCK_BYTES_OF_URL = 4 << 20, 32 << 20
"""A part of a tensor is read in blocks of so many bytes; an object store takes a request for each,
and its bytes are seen to arrive."""
READERS_NUM = 4
"""Threads that read at once, and check and copy what they have read, if the parts in their memory
are together no larger than BUFFERS_BYTES."""
BUFFERS_BYTES = 128 << 20
RUN_BYTES = 128 << 20
"""What a thread reads of an open file, into the same memory: new memory for each part costs more
than to read it."""
_PARTS_BYTES_MAX = 1 << 20
"""What torch.save writes beside a tensor."""
_NO_FILE = frozenset({errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENXIO})
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


UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""What damaged bytes make of an unpickler."""


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


class _View(io.RawIOBase):
    """Reads bytes where they are; io.BytesIO would copy them."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def readinto(self, target: Any) -> int:
        part = self._data[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


def unpacked_parts(data: memoryview) -> list[zipfile.ZipInfo]:
    """The parts of a file of torch.save. Raises ValueError if it is packed, which torch never does:
    a few bytes could become many."""
    if bytes(data[:2]) != b"PK":
        return []
    with zipfile.ZipFile(_View(data)) as file:
        all_parts = file.infolist()
    if sum(part.file_size for part in all_parts) > len(data):
        raise ValueError("it is packed")
    return all_parts


def _load_plain(data: memoryview) -> Any:
    view: Any = _View(data)
    return torch.load(view, map_location="cpu", weights_only=True)


def _loaded(data: memoryview) -> Any:
    """What torch.save has written."""
    unpacked_parts(data)
    return _load_plain(data)


def _tensor_in(data: memoryview) -> Any:
    """As `_loaded`; the elements of a tensor stay in `data`."""
    own = [part for part in unpacked_parts(data) if part.filename.endswith("/data/0")]
    if len(own) != 1 or not own[0].file_size:
        return _loaded(data)
    with torch.serialization.skip_data():
        tensor = _load_plain(data)
    if not isinstance(tensor, Tensor) or tensor.untyped_storage().nbytes() != own[0].file_size:
        raise ValueError("it is no tensor")
    # Before the data are a header of 30 bytes, which ends with two lengths, a name and some more.
    header_end = own[0].header_offset + 30
    name_length, more_length = (
        int.from_bytes(data[begin : begin + 2], "little")
        for begin in (header_end - 4, header_end - 2)
    )
    flat = torch.frombuffer(
        data,
        dtype=tensor.dtype,
        count=own[0].file_size // tensor.dtype.itemsize,
        offset=header_end + name_length + more_length,
    )
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _region(chunk: Any, num_dims: int) -> Region:
    region = Region(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
    if not len(region.offset) == len(region.shape) == num_dims:
        raise ValueError("a part of a tensor has other dims than the tensor")
    return region


def _place(region: Region, info: Any) -> _Place:
    """Where a part is. Raises ValueError for a file that is not directly in the folder."""
    place = _Place(region, str(info.relative_path), int(info.offset), int(info.length))
    if "/" in place.file or place.file in ("", ".", ".."):
        raise ValueError(f"it names a file outside of the folder: {place.file[:80]!r}")
    if min(place.begin_bytes, place.length_bytes) < 0:
        raise ValueError(f"a part of its file {place.file} begins before the file")
    return place


def _fill(file: Any, target: memoryview, block_bytes: int, count: WorkCount) -> int:
    """Read into `target` in blocks: each is a sign of life. Returns how many bytes there were."""
    done = 0
    while num := file.readinto(target[done : done + block_bytes]):
        done += num
        count.add(num)
    return done


def _runs(places: Iterable[_Place]) -> list[list[_Place]]:
    """The places in the order of files, in parts of one file and about RUN_BYTES."""
    runs: list[list[_Place]] = []
    num_bytes = 0
    for place in sorted(places, key=lambda place: (place.file, place.begin_bytes)):
        if not runs or runs[-1][0].file != place.file or num_bytes >= RUN_BYTES:
            runs.append([])
            num_bytes = 0
        runs[-1].append(place)
        num_bytes += place.length_bytes
    return runs


def _bytes_max(kind: str, region: Region) -> int:
    """How long a part of a tensor of this kind may be in its file."""
    num = min(region.num_elements, prod(shape_of(kind)))
    return 2 * num * torch_dtype(kind).itemsize + _PARTS_BYTES_MAX


class StoredState:
    """A complete checkpoint at a path or a URL. Each method raises UsageError if the checkpoint is
    of another model or a later version, Damaged if it is damaged or missing, and another OSError
    if it cannot be read now."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files = Store(folder) if is_url(folder) else PathStore(folder)
        self._block_bytes = BLOCK_BYTES_OF_URL if is_url(folder) else BLOCK_BYTES
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
                    regions = [_region(chunk, len(stored.size)) for chunk in stored.chunks]
                infos = [places[key, region.offset] for region in regions]
                self._chunks[key] = [
                    _place(region, info) for region, info in zip(regions, infos, strict=True)
                ]
        except (*UNREADABLE, MemoryError) as error:
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
        with self._opened(place.file) as file:
            self._check_length(place, VALUE_BYTES_MAX)
            return self._load(file, place, bytearray(place.length_bytes), _loaded)

    def check(self, want: State, count: WorkCount = UNCOUNTED) -> None:
        """Check that the checkpoint has these shards and that its files are complete. Call
        `numbers` before, which checks the version. `count`: of the files."""
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
        self._check_files(used, count)

    def file(self, name: str) -> bytes | None:
        """A small file of the checkpoint; None if it has none of this name."""
        return self._files.read(name)

    def check_files(self) -> None:
        self._check_files(place for places in self._chunks.values() for place in places)

    def _check_files(self, used: Iterable[_Place], count: WorkCount = UNCOUNTED) -> None:
        ends_bytes: dict[str, int] = {}
        for place in used:
            end_bytes = place.begin_bytes + place.length_bytes
            ends_bytes[place.file] = max(ends_bytes.get(place.file, 0), end_bytes)
        with count.of("checks its checkpoint", len(ends_bytes), "files", is_storage=True):
            for file, end_bytes in ends_bytes.items():
                self._check_file(file, end_bytes)
                count.add(1)

    def _check_file(self, file: str, end_bytes: int) -> None:
        size = self._files.size(file)
        if size is None:
            raise self._damaged(f"its file {file} is missing")
        if size < end_bytes:
            raise self._damaged(f"its file {file} is cut: it has {size} bytes of {end_bytes}")
        if self._format_num > 1 and not self._checksums_of(file):
            raise self._damaged(f"the index of its file {file} is missing or cut")

    def read(self, want: State, count: WorkCount = UNCOUNTED) -> None:
        """Read these shards into their memory. Call `check` before: a failure may leave a part.
        `count`: of the bytes."""
        takers: dict[_Place, list[tuple[str, Region, Region, Tensor]]] = {}
        for (key, _, region), tensor in want.items():
            for place in self._chunks[key]:
                if (part := intersection(place.region, region)) is not None:
                    takers.setdefault(place, []).append((key, part, region, tensor))
        total = sum(place.length_bytes for place in takers)
        most_bytes = max((place.length_bytes for place in takers), default=1)

        def read_run(places: list[_Place]) -> None:
            with self._opened(places[0].file) as file:
                for place in places:
                    kind = self.kinds[takers[place][0][0]]
                    self._check_length(place, _bytes_max(kind, place.region))
                buffer = bytearray(max(place.length_bytes for place in places))
                for place in places:
                    chunk = self._load(file, place, buffer, _tensor_in, count)
                    for key, part, region, tensor in takers[place]:
                        self._check_chunk(key, place, chunk)
                        cut(tensor, region, part).copy_(cut(chunk, place.region, part))

        num_readers = min(READERS_NUM, max(1, BUFFERS_BYTES // most_bytes))
        pool = ThreadPoolExecutor(num_readers, "checkpoint")
        with count.of("reads its checkpoint", total, is_storage=True):
            try:
                for run in [pool.submit(read_run, places) for places in _runs(takers)]:
                    run.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _check_chunk(self, key: str, place: _Place, chunk: Any) -> None:
        dtype = self.kinds[key].partition(" ")[0]
        if (
            not isinstance(chunk, Tensor)
            or tuple(chunk.shape) != place.region.shape
            or (kind_of(chunk, ()).strip() != dtype)
        ):
            raise self._damaged(f"a part of {key} in {place.file} is not what its metadata says")

    @contextmanager
    def _opened(self, name: str) -> Generator[IO[bytes]]:
        try:
            context = self._files.opened(name)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise self._damaged(f"its file {name}: {reason(error)}") from None
            raise
        with context as file:
            yield file

    def _check_length(self, place: _Place, bytes_max: int) -> None:
        if place.length_bytes > bytes_max:
            raise self._damaged(
                f"a part of its file {place.file} has {place.length_bytes} bytes, at most "
                f"{bytes_max} hold it"
            )

    def _load(
        self,
        file: IO[bytes],
        place: _Place,
        buffer: bytearray,
        unpack: Callable[[memoryview], Any],
        count: WorkCount = UNCOUNTED,
    ) -> Any:
        """What `unpack` makes of a part, which is read into the buffer."""
        if file.seek(0, io.SEEK_END) < place.begin_bytes + place.length_bytes:
            raise self._damaged(f"its file {place.file} is cut")
        file.seek(place.begin_bytes)
        data = memoryview(buffer)[: place.length_bytes]
        expected = self._checksums_of(place.file).get(place.begin_bytes)
        if _fill(file, data, self._block_bytes, count) < place.length_bytes:
            raise self._damaged(f"its file {place.file} is cut")
        if expected is not None and zlib.crc32(data) != expected:
            raise self._damaged(f"its file {place.file} was altered: a checksum is wrong")
        try:
            return unpack(data)
        except UNREADABLE as error:
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
