"""Flight-recorder dump files: JSON, or torch's pickles, read without executing code.

A file has the dump of one rank, which its name ends in (`nccl_trace_rank_7`), or the dumps of all
ranks under the key `ranks`. Of a folder, all such files are read.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, cast

from ...events.errors import UsageError
from .flight_recorder import Dump, Job, NotADump, read

FILE_BYTES_MAX = 256 << 20
"""A dump has about 1 KB per entry, 10 KB with stacks; torch keeps 2,000 entries."""
MEMORY_TIMES_MAX = 128
"""Memory of a dump's values for each byte of its pickle; the worst byte makes an empty dict."""
MEMORY_BYTES_FREE = 256 << 20
FILES_NUM_MAX = 100_000
RANK_CHARS_MAX = 9
JOBS_NUM_MAX = 3
"""Maximum number of jobs that the error about several jobs names."""
OTHER_FILES = (".error.json",)
"""Endings of other files in the folder of Unicron's dumps: these are torch's error files."""
HINT = "give the files that torch's flight recorder wrote, one per rank, or their folder"
_NAMED = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")


def read_files(paths: Iterable[Path]) -> list[Dump]:
    """Read all dumps, sorted by rank. A file that is named twice is read once. Raises UsageError if
    a file is invalid, if the dumps are of several jobs, or if a rank has two dumps."""
    read_dumps: list[tuple[Dump, Path]] = []
    for path, is_inside in _distinct(_files(paths)):
        try:
            dumps = _read_file(path)
        except UsageError as error:
            if is_inside:
                raise UsageError(str(error), "leave it out: give the other files, without their "
                                 "folder") from None
            raise
        read_dumps += ((dump, path) for dump in dumps)
    _refuse_several_jobs(read_dumps)
    found: dict[int, tuple[Dump, Path]] = {}
    for dump, path in read_dumps:
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} is there twice: in {found[dump.rank][1]} and in {path}",
                "give one file for all ranks, or the files of one job at one time; ranks are "
                "numbered across all its nodes")
        found[dump.rank] = dump, path
    return [found[rank][0] for rank in sorted(found)]


def _refuse_several_jobs(dumps_of: Iterable[tuple[Dump, Path]]) -> None:
    """Raise UsageError for several jobs: their ranks would be reported as missing or behind."""
    jobs: dict[Job, list[Path]] = {}
    for path, dumps in groupby(dumps_of, key=itemgetter(1)):  # the dumps of a file are of one job
        job = next((dump.job for dump, _ in dumps if dump.job.world), None)
        if job is not None:
            jobs.setdefault(job, []).append(path)
    if len(jobs) > 1:
        parts = [f"{_job_name(job)} ({files[0]}{_and_more(len(files) - 1)})"
                 for job, files in list(jobs.items())[:JOBS_NUM_MAX]]
        raise UsageError(
            f"these dumps are of {len(jobs)} jobs, or of several attempts: {', '.join(parts)}"
            f"{_and_more(len(jobs) - JOBS_NUM_MAX)}",
            "give only the files of one of them, written at one time: the folder may also have "
            "older ones (ls -lt)")


def _job_name(job: Job) -> str:
    num = f"{len(job.world)} rank{'s' * (len(job.world) != 1)}"
    return f"task {job.task} generation {job.generation}, {num}" if job.task else num


def _and_more(num: int) -> str:
    return f" and {num} more" if num > 0 else ""


def _distinct(files: Iterable[tuple[Path, bool]]) -> Iterator[tuple[Path, bool]]:
    seen: set[Path] = set()
    for path, is_inside in files:
        if (real := path.resolve()) not in seen:
            seen.add(real)
            yield path, is_inside


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file, and whether its folder was given instead of the file."""
    for path in paths:
        if not path.is_dir():
            yield path, False
            continue
        inside = sorted(one for one in path.iterdir()
                        if one.is_file() and (_NAMED.search(one.name) or one.suffix == ".json")
                        and not one.name.startswith(".") and not one.name.endswith(OTHER_FILES))
        if not inside:
            raise UsageError(f"{path}: no dump in this folder", HINT)
        if len(inside) > FILES_NUM_MAX:
            raise UsageError(f"{path}: {len(inside)} files; at most {FILES_NUM_MAX}", HINT)
        yield from ((one, True) for one in inside)


def _read_file(path: Path) -> list[Dump]:
    document = _document(path)
    try:
        ranks = _field(document, "ranks")
        if isinstance(ranks, Mapping):
            return _read_all(cast(Mapping[str, Any], ranks))
        return [read(_rank_of(path, document), document)]
    except NotADump as error:
        raise UsageError(f"{path}: not a flight-recorder dump: {error}", HINT) from None


def _field(document: object, key: str) -> object:
    return cast(Mapping[str, Any], document).get(key) if isinstance(document, Mapping) else None


def _read_all(ranks: Mapping[str, Any]) -> list[Dump]:
    dumps: list[Dump] = []
    for name, one in ranks.items():
        if not str(name).isdecimal() or len(str(name)) > RANK_CHARS_MAX:
            raise NotADump(f"`ranks` names {str(name)[:40]!r}, which is not a rank")
        try:
            dumps.append(read(int(name), one))
        except NotADump as error:
            raise NotADump(f"rank {name}: {error}") from None
    if not dumps:
        raise NotADump("`ranks` is empty")
    return dumps


def _rank_of(path: Path, document: object) -> int:
    """The rank that the dump names (Unicron's dumps do), else the rank in the file name."""
    rank = _field(document, "rank")
    if isinstance(rank, int) and rank >= 0:
        return rank
    named = _NAMED.search(path.name)
    if named is None:
        read(0, document)  # if the document is not a dump, raise that error
        raise UsageError(f"{path}: its name does not end in a rank",
                         "name each file after its rank, as torch does: nccl_trace_rank_7")
    return int(named[1])


def _document(path: Path) -> object:
    try:
        with open(path, "rb", opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path}: not a regular file", HINT)
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", HINT) from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path}: longer than {FILE_BYTES_MAX >> 20} MiB",
                         "give one file per rank")
    if not data.strip():
        raise UsageError(f"{path}: empty", "the rank may have exited while it wrote: leave it out")
    try:
        return _unpickled(data) if data[:1] == b"\x80" else json.loads(data)
    except RecursionError:
        raise UsageError(f"{path}: not a flight-recorder dump: nested too deep", HINT) from None
    except _ImportRefused as error:
        raise UsageError(f"{path}: refused: it would load {error}",
                         "a flight-recorder dump holds plain values only; do not trust this "
                         "file") from None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError,
            AttributeError, MemoryError, OverflowError) as error:
        raise UsageError(f"{path}: cut off, or not a flight-recorder dump: {_in_words(error)}",
                         HINT) from None


def _open(path: str, flags: int) -> int:
    """Open without blocking: a FIFO without a writer would block forever."""
    return os.open(path, flags | os.O_NONBLOCK)


def _in_words(error: Exception) -> str:
    """A plain message for an error of Python's JSON or pickle reader."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return "neither a pickle nor text in UTF-8"
    return "its pickle cannot be read to the end"


def _unpickled(data: bytes) -> object:
    """A pickle of ten bytes may ask for a table of 64 GB: the memory is limited meanwhile, where
    the system can do that. Raises MemoryError, and all that a pickle raises."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return _PlainUnpickler(io.BytesIO(data)).load()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * os.sysconf("SC_PAGE_SIZE") + len(data) * MEMORY_TIMES_MAX + MEMORY_BYTES_FREE
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
