"""Flight-recorder dump files: JSON, or torch's pickles, read without executing code.

A file has the dump of one rank, which its name ends in (`nccl_trace_rank_7`), or the dumps of all
ranks under the key `ranks`. Of a folder, all such files are read. What is cut off, or is no dump,
is left out: ranks exit while they write, and folders have other files too.
"""

import errno
import io
import pickle
import re
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from msgspec import Meta, Struct

from ...events.collectives import Dump, Job
from ...events.decoding import from_json
from ...events.errors import UsageError
from ...events.regular_files import read_regular
from .flight_recorder import NotADump, read

FILE_BYTES_MAX = 256 << 20
"""A dump has about 1 KB per entry, 10 KB with stacks; torch keeps 2,000 entries."""
MEMORY_TIMES_MAX = 128
"""Memory of a dump's values for each byte of its pickle; the worst byte makes an empty dict."""
MEMORY_BYTES_FREE = 256 << 20
FILES_NUM_MAX = 100_000
JOBS_NUM_MAX = 3
"""Maximum number of jobs that the error about several jobs names."""
OTHER_FILES = (".error.json",)
"""Endings of other files in the folder of Unicron's dumps: these are torch's error files."""
HINT = "give the files that torch's flight recorder wrote, one per rank, or their folder"
_NAMED = re.compile(r"(\d{1,9})(?:\.(?:json|pickle|pkl))?$")
_Rank = Annotated[int, Meta(ge=0, lt=10**9)]


class _File(Struct):
    """What a file says about the ranks of its dumps."""

    rank: _Rank | None = None
    """Unicron's dumps name their rank."""
    ranks: dict[_Rank, object] = {}
    """The dumps of all ranks, if they are in this file."""


class Dumps(NamedTuple):
    """The dumps of a job, sorted by rank."""

    dumps: list[Dump]
    left_out: list[str]
    """A line for each file, or rank of a file, that is no dump: the file, and what is wrong."""


def read_files(paths: Iterable[Path]) -> Dumps:
    """Read all dumps. A file that is named twice is read once. Raises UsageError if the dumps are
    of several jobs, or if a rank has two; UsageError and OSError if there is none to read."""
    files: dict[Path, Path] = {}
    for path in _files(paths):
        files.setdefault(path.resolve(), path)
    dumps: list[tuple[Dump, Path]] = []
    errors: list[UsageError | OSError] = []
    for path in files.values():
        for one in _read_file(path):
            if isinstance(one, Dump):
                dumps.append((one, path))
            else:
                errors.append(one)
    if errors and not dumps:
        raise errors[0]
    _refuse_several_jobs(dumps)
    found: dict[int, tuple[Dump, Path]] = {}
    for dump, path in dumps:
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} is there twice: in {found[dump.rank][1]} and in {path}",
                "give one file for all ranks, or the files of one job at one time; ranks are "
                "numbered across all its nodes",
            )
        found[dump.rank] = dump, path
    return Dumps([found[rank][0] for rank in sorted(found)], [*map(_in_a_line, errors)])


def _in_a_line(error: UsageError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {(error.strerror or str(error)).lower()}"
    return str(error)


def _refuse_several_jobs(dumps: Iterable[tuple[Dump, Path]]) -> None:
    """Raise UsageError for several jobs: their ranks would be reported as missing or behind."""
    jobs: dict[Job, Path] = {}
    for dump, path in dumps:
        if dump.job.world:
            jobs.setdefault(dump.job, path)
    if len(jobs) > 1:
        parts = [f"{_job_name(job)} (as {path})" for job, path in list(jobs.items())[:JOBS_NUM_MAX]]
        raise UsageError(
            f"these dumps are of {len(jobs)} jobs, or of several attempts: {', '.join(parts)}",
            "give only the files of one of them, written at one time: the folder may also have "
            "older ones (ls -lt)",
        )


def _job_name(job: Job) -> str:
    num = f"{len(job.world)} rank{'s' * (len(job.world) != 1)}"
    return f"task {job.task} generation {job.generation}, {num}" if job.task else num


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(
            one
            for one in path.iterdir()
            if one.is_file()
            and (_NAMED.search(one.name) or one.suffix == ".json")
            and not one.name.startswith(".")
            and not one.name.endswith(OTHER_FILES)
        )
        if not inside:
            raise UsageError(f"{path}: no dump in this folder", HINT)
        if len(inside) > FILES_NUM_MAX:
            raise UsageError(f"{path}: {len(inside)} files; at most {FILES_NUM_MAX}", HINT)
        yield from inside


def _read_file(path: Path) -> Iterator[Dump | UsageError | OSError]:
    """Yield the dumps in the file, and the error of each that cannot be read."""
    try:
        document = _document(path)
        file = msgspec.convert(document, _File, strict=False)
    except (UsageError, OSError) as error:
        yield error
        return
    except ValueError as error:
        yield UsageError(f"{path}: not a flight-recorder dump: {error}", HINT)
        return
    named = _NAMED.search(path.name)
    own = file.rank if file.rank is not None else int(named[1]) if named is not None else None
    for rank, one in file.ranks.items() or [(own or 0, document)]:
        of = f" of rank {rank}" * (rank in file.ranks)
        try:
            dump = read(rank, one)
        except NotADump as error:
            yield UsageError(f"{path}: not a flight-recorder dump{of}: {error}", HINT)
            continue
        if own is None and not file.ranks:
            yield UsageError(
                f"{path}: its name does not end in a rank",
                "name each file after its rank, as torch does: nccl_trace_rank_7",
            )
        else:
            yield dump


def _document(path: Path) -> object:
    try:
        data = read_regular(path, FILE_BYTES_MAX)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UsageError(f"{path}: {error.strerror}", HINT) from None
        if error.errno == errno.EFBIG:  # a core file may be longer than the memory
            raise UsageError(
                f"{path}: longer than {FILE_BYTES_MAX >> 20} MiB", "give one file per rank"
            ) from None
        raise
    try:
        return _unpickled(data) if data[:1] == b"\x80" else from_json(data)
    except _ImportRefused as error:
        raise UsageError(
            f"{path}: refused: it would load {error}",
            "a flight-recorder dump holds plain values only; do not trust this file",
        ) from None
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
        raise UsageError(
            f"{path}: cut off, or not a flight-recorder dump: {str(error) or type(error).__name__}",
            "if the rank exited while it wrote this file, leave it out",
        ) from None


def _unpickled(data: bytes) -> object:
    """A pickle of ten bytes may ask for a table of 64 GB: the memory is limited meanwhile, where
    the system can do that. Raises MemoryError, and all that a pickle raises."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return _PlainUnpickler(io.BytesIO(data)).load()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + len(data) * MEMORY_TIMES_MAX + MEMORY_BYTES_FREE
    if soft in (resource.RLIM_INFINITY, -1) or soft > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _ImportRefused(Exception):
    """The pickle would import an object."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads only plain values. torch writes no other values, and other values could run code."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise _ImportRefused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _ImportRefused("a persistent object")
