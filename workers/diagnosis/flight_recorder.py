"""PyTorch's flight-recorder dumps made plain: the groups, what was entered, what is not complete.

torch writes one dump per rank (NCCL since 2.5, gloo since 2.10). Its numbers are read with care:

- `pg_status` goes by a number that is the rank's own; entries tie it to a group's name. Where a
  group has no entry left, both lists are in the order of creation.
- In a group that also sends and receives, that status counts those too: entries alone count there.
- A rank that has rebuilt its groups has several of one name: only the newest counts.
- gloo never says that a collective has completed, only that it was retired.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from ...events.errors import UsageError

Json = Mapping[str, Any]

DIMENSIONS_NUM_MAX = 64
"""Of a tensor, as torch has it."""

_ALL_ALIKE = ("reduce", "all_gather", "allgather", "broadcast")
"""Collectives into which all ranks put as much, of one type. all_to_all may be uneven."""
_ENDS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class NotADump(ValueError):
    """The document is no flight-recorder dump; `str()` says what is missing."""


class Op(NamedTuple):
    """One entry: a collective of `group`, or a send or receive between two ranks of it."""

    group: str
    seq: int
    """The collective's number in its group; of a send or receive: its own count there."""
    name: str
    at_ns: int
    """When it was entered, by the rank's own clock (nanoseconds since 1970)."""
    order: int
    """Where it stands among all that this rank entered."""
    has_started: bool = False
    source: int = -1
    """Of a send or receive: the rank that sends; below 0: this is a collective."""
    target: int = -1
    tensors: str = ""
    """What the rank puts in, `4096 Float`: elements and data type. Only of a collective into which
    all ranks must put the same; "": not told, or they may differ."""

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The same for all who take part. Sends are matched in order, not by number."""
        if self.is_p2p:
            return self.group, -1, self.source, self.target
        return self.group, self.seq, -1, -1


class Job(NamedTuple):
    """Of which job, and which try of it, as far as a dump says."""

    world: tuple[int, ...] = ()
    """All its ranks; none: not told."""
    task: int = 0
    """Ours, in generation `generation`; 0: another's."""
    generation: int = 0


class Dump(NamedTuple):
    """What one rank's recorder held."""

    rank: int
    members: dict[str, tuple[int, ...]]
    """Group -> its ranks; none where the dump does not say."""
    entered: dict[str, int]
    """Group -> the last collective that this rank entered."""
    completed: dict[str, int]
    status: dict[str, tuple[int, int]]
    """Group -> entered and completed as its status has it, sends and receives counted in."""
    pending: tuple[Op, ...]
    """Entered and not complete by this rank's own account, oldest first."""
    ended: tuple[Op, ...]
    """Of each group, the last collective that is complete by its own account."""
    mixed: frozenset[str]
    """Groups in which it sends and receives too."""
    tells_starts: bool
    """Whether its recorder notes when a collective's kernel starts."""
    is_cut: bool
    """Whether older entries have been overwritten."""
    dumped_ns: int
    """When it was written; 0: not told."""
    job: Job


def read(rank: int, document: object) -> Dump:
    """The dump of one rank. Linear in its entries. Raises NotADump."""
    if not isinstance(document, Mapping) or not isinstance(
            cast(Json, document).get("entries"), Sequence):
        raise NotADump("it has no list `entries`")
    dump = cast(Json, document)
    try:
        return _read(rank, dump)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise NotADump(f"it is malformed: {type(error).__name__} {error}") from None


def _read(rank: int, dump: Json) -> Dump:
    entries = sorted(_known(dump["entries"]), key=lambda entry: _whole(entry.get("record_id", 0)))
    newest = _newest(entries)
    entries = [entry for entry in entries
               if _whole(entry.get("pg_id", -1)) == newest[_group(entry)]]
    config = _table(dump.get("pg_config"))
    config.pop("", None)  # gloo's: it has no name
    members = {_key(name, str(one.get("desc", ""))): found for name, one in config.items()
               if (found := _ranks(one.get("ranks")))}
    mixed = frozenset(_group(entry) for entry in entries
                      if entry.get("is_p2p") or _seq(entry) != _whole(entry.get("op_id", -1)))
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    ended: dict[str, Json] = {}
    for entry in entries:
        group, seq = _group(entry), _seq(entry)
        entered[group] = max(entered.get(group, 0), seq)
        if _is_done(entry) and not entry.get("is_p2p") and seq > completed.get(group, 0):
            completed[group], ended[group] = seq, entry
    status = _status(_table(dump.get("pg_status")), config, newest)
    pending = tuple(_op(entry, members) for entry in entries if not _is_done(entry)
                    and not str(entry.get("profiling_name", "")).endswith(":coalesced"))
    return Dump(
        rank=rank, members=members, entered=entered, completed=completed, status=status,
        pending=pending, ended=tuple(_op(entry, members) for entry in ended.values()), mixed=mixed,
        tells_starts=any(entry.get("time_discovered_started_ns") or entry.get("state") == "started"
                         for entry in entries),
        is_cut=bool(entries) and int(entries[0].get("record_id", 0)) > 0,
        dumped_ns=_whole(dump.get("dumped_ns") or 0), job=_job(dump, config))


def _job(dump: Json, config: Mapping[str, Json]) -> Job:
    """By the group of all ranks, which is the default one, and what our own dumps say."""
    worlds = [found for one in config.values() if one.get("desc") == "default_pg"
              and (found := _ranks(one.get("ranks")))]
    if not worlds:
        return Job()
    return Job(tuple(sorted(worlds[0])), _whole(dump.get("task") or 0),
               _whole(dump.get("generation") or 0))


def _table(value: object) -> dict[str, Json]:
    """torch's JSON has text for keys; its pickles may have numbers."""
    return {str(key): one for key, one in cast(Mapping[object, Json], value or {}).items()}


def _known(entries: Iterable[Json]) -> list[Json]:
    """Entries of a group; what a recorder notes beside them has none."""
    return [entry for entry in entries if entry.get("process_group")]


def _key(name: str, desc: str) -> str:
    return f"{name} {desc}" if desc not in ("", "undefined") else name


def _group(entry: Json) -> str:
    name, *desc = entry["process_group"]
    return _key(str(name), str(desc[0]) if desc else "")


def _seq(entry: Json) -> int:
    return _whole(entry["collective_seq_id"])


def _ranks(text: object) -> tuple[int, ...]:
    """torch writes the list as text."""
    found: object = json.loads(text) if isinstance(text, str) else text
    return tuple(_whole(one) for one in cast(Iterable[int], found or ()))


def _newest(entries: Iterable[Json]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for entry in entries:
        group = _group(entry)
        newest[group] = max(newest.get(group, -1), _whole(entry.get("pg_id", -1)))
    return newest


def _status(status: Mapping[str, Json], config: Mapping[str, Json],
            newest: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Group -> (entered, completed), as far as its number can be tied to a name."""
    named = {number: group for group, number in newest.items()}
    if (len(status) == len(config)
            and all(name.isdigit() for name in config) and all(one.isdigit() for one in status)):
        pairs = zip(sorted(map(int, status)), sorted(config, key=int), strict=True)
        guessed = {number: _key(name, str(config[name].get("desc", ""))) for number, name in pairs}
        if all(guessed.get(number, group) == group for number, group in named.items()):
            named = {**guessed, **named}
    found: dict[str, tuple[int, int]] = {}
    for number, one in status.items():
        group = named.get(int(number)) if number.lstrip("-").isdigit() else None
        if group is not None:
            found[group] = (max(_whole(one.get("last_enqueued_collective", -1)), 0),
                            max(_whole(one.get("last_completed_collective", -1)), 0))
    return found


def _is_done(entry: Json) -> bool:
    return entry.get("state") == "completed" or bool(
        entry.get("retired") and str(entry.get("profiling_name", "")).startswith("gloo"))


def _op(entry: Json, members: Mapping[str, tuple[int, ...]]) -> Op:
    group, name = _group(entry), str(entry.get("profiling_name", "?")).partition(":")[2]
    source = target = -1
    ends = _ENDS.search(name) if entry.get("is_p2p") else None
    if ends is not None:
        places = int(ends[2]), int(ends[3])
        ranks = members.get(group, ())
        one, other = (ranks[place] if place < len(ranks) else place for place in places)
        source, target = (one, other) if ends[1] == "send" else (other, one)
        name = ends[1]
    return Op(group=group, name=name or "?", at_ns=_whole(entry.get("time_created_ns") or 0),
              seq=_whole(entry.get("p2p_seq_id", 0)) if ends else _seq(entry),
              order=_whole(entry.get("record_id", 0)), source=source, target=target,
              has_started=entry.get("state") == "started",
              tensors=_tensors(entry, name) if source < 0 else "")


def _tensors(entry: Json, name: str) -> str:
    """The elements and data types that go in: a reshaped tensor is the same to NCCL and gloo."""
    if not any(word in name for word in _ALL_ALIKE) or "sparse" in name:
        return ""
    sizes, dtypes = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    return ", ".join(f"{math.prod(map(_whole, size[:DIMENSIONS_NUM_MAX]))} {dtype}"
                     for size, dtype in zip(sizes, dtypes, strict=False))


def _whole(value: object) -> int:
    """torch writes whole numbers of 64 bits; JSON knows longer ones, infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} where a whole number belongs")
    found = int(cast(int, value))
    if not -1 << 63 <= found < 1 << 64:
        raise ValueError("a number of more than 64 bits")
    return found


# --- Flight-recorder dumps from files: JSON, or torch's own pickles read without running anything.
# ---
#
# A file holds one rank's dump, and its name ends in the rank (`nccl_trace_rank_7`, `_dump_7`,
# `flight-rank-7.json`), or all ranks' under `ranks`. A folder stands for all such files in it.

FILE_BYTES_MAX = 256 << 20
"""A rank's dump takes about 1 KB an entry, with stacks 10; torch keeps 2,000 entries."""
FILES_NUM_MAX = 100_000
RANK_CHARS_MAX = 9
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
        if not str(name).isdecimal() or len(str(name)) > RANK_CHARS_MAX:
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


def _open(path: str, flags: int) -> int:
    """A FIFO that nobody writes to would hold a plain open for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


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
