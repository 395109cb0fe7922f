"""PyTorch's flight-recorder dumps made plain: the groups, what was entered, what is not complete.

torch writes one dump per rank (NCCL since 2.5, gloo since 2.10). Its numbers are read with care:

- `pg_status` goes by a number that is the rank's own; entries tie it to a group's name. Where a
  group has no entry left, both lists are in the order of creation.
- In a group that also sends and receives, that status counts those too: entries alone count there.
- A rank that has rebuilt its groups has several of one name: only the newest counts.
- gloo never says that a collective has completed, only that it was retired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

Json = Mapping[str, Any]

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
    entries = sorted(_known(dump["entries"]), key=lambda entry: int(entry.get("record_id", 0)))
    newest = _newest(entries)
    entries = [entry for entry in entries
               if int(entry.get("pg_id", -1)) == newest[_group(entry)]]
    config = _table(dump.get("pg_config"))
    config.pop("", None)  # gloo's: it has no name
    members = {_key(name, str(one.get("desc", ""))): found for name, one in config.items()
               if (found := _ranks(one.get("ranks")))}
    mixed = frozenset(_group(entry) for entry in entries
                      if entry.get("is_p2p") or _seq(entry) != int(entry.get("op_id", -1)))
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    for entry in entries:
        group, seq = _group(entry), _seq(entry)
        entered[group] = max(entered.get(group, 0), seq)
        if _is_done(entry) and not entry.get("is_p2p"):
            completed[group] = max(completed.get(group, 0), seq)
    status = _status(_table(dump.get("pg_status")), config, newest)
    pending = tuple(_op(entry, members) for entry in entries if not _is_done(entry)
                    and not str(entry.get("profiling_name", "")).endswith(":coalesced"))
    return Dump(
        rank=rank, members=members, entered=entered, completed=completed, status=status,
        pending=pending, mixed=mixed,
        tells_starts=any(entry.get("time_discovered_started_ns") or entry.get("state") == "started"
                         for entry in entries),
        is_cut=bool(entries) and int(entries[0].get("record_id", 0)) > 0,
        dumped_ns=int(dump.get("dumped_ns") or 0), job=_job(dump, config))


def _job(dump: Json, config: Mapping[str, Json]) -> Job:
    """By the group of all ranks, which is the default one, and what our own dumps say."""
    worlds = [found for one in config.values() if one.get("desc") == "default_pg"
              and (found := _ranks(one.get("ranks")))]
    if not worlds:
        return Job()
    return Job(tuple(sorted(worlds[0])), int(dump.get("task") or 0),
               int(dump.get("generation") or 0))


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
    return int(entry["collective_seq_id"])


def _ranks(text: object) -> tuple[int, ...]:
    """torch writes the list as text."""
    found: object = json.loads(text) if isinstance(text, str) else text
    return tuple(int(one) for one in cast(Iterable[int], found or ()))


def _newest(entries: Iterable[Json]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for entry in entries:
        group = _group(entry)
        newest[group] = max(newest.get(group, -1), int(entry.get("pg_id", -1)))
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
            found[group] = (max(int(one.get("last_enqueued_collective", -1)), 0),
                            max(int(one.get("last_completed_collective", -1)), 0))
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
    return Op(group=group, name=name or "?", at_ns=int(entry.get("time_created_ns") or 0),
              seq=int(entry.get("p2p_seq_id", 0)) if ends else _seq(entry),
              order=int(entry.get("record_id", 0)), source=source, target=target,
              has_started=entry.get("state") == "started")
