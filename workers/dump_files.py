"""Flight-recorder dumps from files: JSON, or torch's own pickles read without running anything.

A file holds one rank's dump, and its name ends in the rank (`nccl_trace_rank_7`, `_dump_7`,
`flight-rank-7.json`), or all ranks' under `ranks`. A folder stands for all such files in it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, cast

from ..events.errors import UsageError
from .recorded import Dump, Job, NotADump, read

FILE_BYTES_MAX = 256 << 20
"""A rank's dump takes about 1 KB an entry, with stacks 10; torch keeps 2,000 entries."""
FILES_NUM_MAX = 100_000
JOBS_NUM_MAX = 3
"""Named where there are several."""
OTHERS = (".error.json",)
"""What lies beside our own dumps: torch's error files."""
HINT = "give the files that torch's flight recorder wrote, one per rank, or their folder"
_NAMED = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")


def read_files(paths: Iterable[Path]) -> list[Dump]:
    """All dumps of the files, by rank; a file that is named twice counts once.

    Raises UsageError for what is none, for dumps of several jobs, or a rank that is there twice.
    """
    told: list[tuple[Dump, Path]] = []
    for path, is_inside in _once(_files(paths)):
        try:
            dumps = _read_file(path)
        except UsageError as error:
            if is_inside:
                raise UsageError(str(error), "leave it out: give the other files, without their "
                                 "folder") from None
            raise
        told += ((dump, path) for dump in dumps)
    _refuse_several_jobs(told)
    found: dict[int, tuple[Dump, Path]] = {}
    for dump, path in told:
        if dump.rank in found:
            raise UsageError(
                f"rank {dump.rank} is there twice: in {found[dump.rank][1]} and in {path}",
                "give one file for all ranks, or the files of one job at one moment; ranks are "
                "numbered across all its nodes")
        found[dump.rank] = dump, path
    return [found[rank][0] for rank in sorted(found)]


def _refuse_several_jobs(told: Iterable[tuple[Dump, Path]]) -> None:
    """Raises UsageError: together they would blame a rank that another job alone has not."""
    jobs: dict[Job, list[Path]] = {}
    for path, dumps in groupby(told, key=itemgetter(1)):  # a file with all ranks is of one job
        job = next((dump.job for dump, _ in dumps if dump.job.world), None)
        if job is not None:
            jobs.setdefault(job, []).append(path)
    if len(jobs) > 1:
        parts = [f"{_named(job)} ({files[0]}{_and_more(len(files) - 1)})"
                 for job, files in list(jobs.items())[:JOBS_NUM_MAX]]
        raise UsageError(
            f"these dumps are of {len(jobs)} jobs, or of several tries of one: {', '.join(parts)}"
            f"{_and_more(len(jobs) - JOBS_NUM_MAX)}",
            "give the files of one of them alone, all of one moment: older ones may have been "
            "left in the folder (ls -lt)")


def _named(job: Job) -> str:
    num = f"{len(job.world)} rank{'s' * (len(job.world) != 1)}"
    return f"task {job.task} generation {job.generation}, {num}" if job.task else num


def _and_more(num: int) -> str:
    return f" and {num} more" if num > 0 else ""


def _once(files: Iterable[tuple[Path, bool]]) -> Iterator[tuple[Path, bool]]:
    seen: set[Path] = set()
    for path, is_inside in files:
        if (real := path.resolve()) not in seen:
            seen.add(real)
            yield path, is_inside


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, with whether its folder was named, not it."""
    for path in paths:
        if not path.is_dir():
            yield path, False
            continue
        inside = sorted(one for one in path.iterdir()
                        if one.is_file() and (_NAMED.search(one.name) or one.suffix == ".json")
                        and not one.name.startswith(".") and not one.name.endswith(OTHERS))
        if not inside:
            raise UsageError(f"{path}: no dump in this folder", HINT)
        if len(inside) > FILES_NUM_MAX:
            raise UsageError(f"{path}: {len(inside)} files; at most {FILES_NUM_MAX}", HINT)
        yield from ((one, True) for one in inside)


def _read_file(path: Path) -> list[Dump]:
    document = _document(path)
    try:
        ranks = _told(document, "ranks")
        if isinstance(ranks, Mapping):
            return _of_all(cast(Mapping[str, Any], ranks))
        return [read(_rank_of(path, document), document)]
    except NotADump as error:
        raise UsageError(f"{path}: not a flight-recorder dump: {error}", HINT) from None


def _told(document: object, key: str) -> object:
    return cast(Mapping[str, Any], document).get(key) if isinstance(document, Mapping) else None


def _of_all(ranks: Mapping[str, Any]) -> list[Dump]:
    dumps: list[Dump] = []
    for name, one in ranks.items():
        if not str(name).isdecimal():
            raise NotADump(f"`ranks` names {str(name)[:40]!r}, which is no rank")
        try:
            dumps.append(read(int(name), one))
        except NotADump as error:
            raise NotADump(f"rank {name}: {error}") from None
    if not dumps:
        raise NotADump("`ranks` is empty")
    return dumps


def _rank_of(path: Path, document: object) -> int:
    """As the dump says, where it is one of ours; else as the file is named."""
    told = _told(document, "rank")
    if isinstance(told, int) and told >= 0:
        return told
    named = _NAMED.search(path.name)
    if named is None:
        read(0, document)  # what is no dump at all is told first
        raise UsageError(f"{path}: its name does not end in a rank",
                         "name each file after its rank, as torch does: nccl_trace_rank_7")
    return int(named[1])


def _document(path: Path) -> object:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(path.stat().st_mode):
                raise UsageError(f"{path}: not a file", HINT)
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", HINT) from None
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path}: longer than {FILE_BYTES_MAX >> 20} MiB",
                         "give one file per rank")
    if not data.strip():
        raise UsageError(f"{path}: empty", "the rank may have ended while it wrote: leave it out")
    try:
        return _Plain(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    except RecursionError:
        raise UsageError(f"{path}: not a flight-recorder dump: nested too deep", HINT) from None
    except _Refused as error:
        raise UsageError(f"{path}: refused: it would load {error}",
                         "a flight-recorder dump holds plain values only; do not trust this "
                         "file") from None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError,
            AttributeError, MemoryError, OverflowError) as error:
        raise UsageError(f"{path}: cut off, or not a flight-recorder dump: {_in_words(error)}",
                         HINT) from None


def _in_words(error: Exception) -> str:
    """Python's readers say it in words of theirs."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return "neither a pickle nor text in UTF-8"
    return "its pickle cannot be read to the end"


class _Refused(Exception):
    """The pickle names something to import."""


class _Plain(pickle.Unpickler):
    """Reads plain values only: torch writes nothing else, and anything else could run code."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Refused("a persistent object")
