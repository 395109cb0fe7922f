"""Reads PyTorch's flight-recorder dumps: groups, entered collectives, incomplete collectives.

torch writes one dump per rank (for NCCL since torch 2.5, for gloo since 2.10).

- The keys of `pg_status` are group numbers that are local to the rank. An entry has the number and
  the name of its group. Groups without an entry are matched by position, because `pg_status` and
  `pg_config` are both in the order of creation.
- `pg_status` also counts sends and receives. In a group that has them only entries are used.
- A rank that has rebuilt its groups has several groups of one name. Only the newest is used.
- gloo never reports that a collective has completed. A retired one counts as complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

Json = Mapping[str, Any]

DIMENSIONS_NUM_MAX = 64
"""Maximum number of tensor dimensions in torch."""

_SAME_INPUT = ("reduce", "all_gather", "allgather", "broadcast")
"""Collectives whose input has one size and type on all ranks; that of all_to_all may differ."""
_ENDS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class NotADump(ValueError):
    """The document is not a flight-recorder dump; `str()` says what is missing."""


class Op(NamedTuple):
    """One entry: a collective of `group`, or a send or receive between two ranks of the group."""

    group: str
    seq: int
    """Number of the collective in its group; sends and receives are counted separately."""
    name: str
    at_ns: int
    """When the rank entered the operation, by its own clock (nanoseconds since 1970)."""
    order: int
    """Its index among all operations of this rank."""
    has_started: bool = False
    source: int = -1
    """The sending rank of a send or receive; -1: this is a collective."""
    target: int = -1
    tensors: str = ""
    """Elements and data type of the input, as `4096 Float`. "": unknown, or sizes may differ."""

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Equal for all participants. Sends and receives are matched in order, not by number."""
        if self.is_p2p:
            return self.group, -1, self.source, self.target
        return self.group, self.seq, -1, -1


class Job(NamedTuple):
    """The job and its attempt, as far as a dump identifies them."""

    world: tuple[int, ...] = ()
    """All its ranks; empty: unknown."""
    task: int = 0
    """The Unicron task, in generation `generation`; 0: not a Unicron task."""
    generation: int = 0


class Dump(NamedTuple):
    """The content of one rank's recorder."""

    rank: int
    members: dict[str, tuple[int, ...]]
    """Group -> its ranks. A group whose ranks are unknown is absent."""
    entered: dict[str, int]
    """Group -> the last collective that this rank entered."""
    completed: dict[str, int]
    status: dict[str, tuple[int, int]]
    """Group -> entered and completed by `pg_status`, which includes sends and receives."""
    pending: tuple[Op, ...]
    """The operations that this rank entered and does not see as complete, oldest first."""
    ended: tuple[Op, ...]
    """The last complete collective of each group, according to this rank."""
    mixed: frozenset[str]
    """Groups with sends and receives."""
    records_starts: bool
    """Whether its recorder records the start of kernels."""
    dumped_ns: int
    """When the dump was written; 0: unknown."""
    job: Job


def read(rank: int, document: object) -> Dump:
    """Parse the dump of one rank. Linear in its entries. Raises NotADump."""
    if not isinstance(document, Mapping) or not isinstance(
            cast(Json, document).get("entries"), Sequence):
        raise NotADump("it has no list `entries`")
    dump = cast(Json, document)
    try:
        return _read(rank, dump)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise NotADump(f"it is malformed: {type(error).__name__} {error}") from None


def _read(rank: int, dump: Json) -> Dump:
    # Some entries belong to no process group.
    entries = sorted((entry for entry in dump["entries"] if entry.get("process_group")),
                     key=lambda entry: _whole(entry.get("record_id", 0)))
    newest = _newest(entries)
    entries = [entry for entry in entries
               if _whole(entry.get("pg_id", -1)) == newest[_group(entry)]]
    config = _table(dump.get("pg_config"))
    config.pop("", None)  # gloo has a group without a name
    members = {_group_name(name, str(one.get("desc", ""))): found for name, one in config.items()
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
        records_starts=any(
            entry.get("time_discovered_started_ns") or entry.get("state") == "started"
            for entry in entries),
        dumped_ns=_whole(dump.get("dumped_ns") or 0), job=_job(dump, config))


def _job(dump: Json, config: Mapping[str, Json]) -> Job:
    """The job: its ranks are in the default group, task and generation in Unicron's own fields."""
    worlds = [found for one in config.values() if one.get("desc") == "default_pg"
              and (found := _ranks(one.get("ranks")))]
    if not worlds:
        return Job()
    return Job(tuple(sorted(worlds[0])), _whole(dump.get("task") or 0),
               _whole(dump.get("generation") or 0))


def _table(value: object) -> dict[str, Json]:
    """The mapping with its keys as text: in torch's pickles they may be numbers."""
    return {str(key): one for key, one in cast(Mapping[object, Json], value or {}).items()}


def _group_name(name: str, desc: str) -> str:
    return f"{name} {desc}" if desc not in ("", "undefined") else name


def _group(entry: Json) -> str:
    name, *desc = entry["process_group"]
    return _group_name(str(name), str(desc[0]) if desc else "")


def _seq(entry: Json) -> int:
    return _whole(entry["collective_seq_id"])


def _ranks(text: object) -> tuple[int, ...]:
    """The ranks in a list. torch writes the list as text."""
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
    """Group -> (entered, completed), for each group number that can be mapped to a name."""
    named = {number: group for group, number in newest.items()}
    if (len(status) == len(config)
            and all(name.isdigit() for name in config) and all(one.isdigit() for one in status)):
        pairs = zip(sorted(map(int, status)), sorted(config, key=int), strict=True)
        guessed = {number: _group_name(name, str(config[name].get("desc", "")))
                   for number, name in pairs}
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
        indices = int(ends[2]), int(ends[3])
        ranks = members.get(group, ())
        one, other = (ranks[index] if index < len(ranks) else index for index in indices)
        source, target = (one, other) if ends[1] == "send" else (other, one)
        name = ends[1]
    return Op(group=group, name=name or "?", at_ns=_whole(entry.get("time_created_ns") or 0),
              seq=_whole(entry.get("p2p_seq_id", 0)) if ends else _seq(entry),
              order=_whole(entry.get("record_id", 0)), source=source, target=target,
              has_started=entry.get("state") == "started",
              tensors=_tensors(entry, name) if source < 0 else "")


def _tensors(entry: Json, name: str) -> str:
    """Number of elements and data types of the input; NCCL and gloo ignore the shape."""
    if not any(word in name for word in _SAME_INPUT) or "sparse" in name:
        return ""
    sizes, dtypes = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    return ", ".join(f"{math.prod(map(_whole, size[:DIMENSIONS_NUM_MAX]))} {dtype}"
                     for size, dtype in zip(sizes, dtypes, strict=False))


def _whole(value: object) -> int:
    """Accept a 64-bit integer, as torch writes it. JSON also allows longer ones, inf and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} where a whole number belongs")
    found = int(cast(int, value))
    if not -1 << 63 <= found < 1 << 64:
        raise ValueError("a number of more than 64 bits")
    return found
