"""Reads PyTorch's flight-recorder dumps: groups, entered collectives, incomplete collectives.

torch writes one dump per rank (for NCCL since torch 2.5, for gloo since 2.10).

- The keys of `pg_status` are group numbers that are local to the rank. An entry has the number and
  the name of its group. Groups without an entry are matched by position, because `pg_status` and
  `pg_config` are both in the order of creation.
- `pg_status` also counts sends and receives. In a group that has them only entries are used.
- A rank that has rebuilt its groups has several groups of one name. Only the newest is used.
- Up to torch 2.9 the disjoint groups of a DeviceMesh have one name. So a group is its name and its
  ranks.
- gloo never reports that a collective has completed. A retired one counts as complete.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...events.collectives import Dump, Group, Job, Op
from ...events.decoding import from_json
from ...events.whole_numbers import whole_number

DIMENSIONS_NUM_MAX = 64
"""Maximum number of tensor dimensions in torch."""

_SAME_INPUT = ("reduce", "all_gather", "allgather", "broadcast")
"""Collectives whose input has one size and type on all ranks; that of all_to_all may differ."""
_ENDS = re.compile(r"(send|recv) ([0-9]{1,9})(?:->|<-)([0-9]{1,9})")


class NotADump(ValueError):
    """The document is not a flight-recorder dump; `str()` says what is missing."""


# --- A dump as torch writes it: gloo's JSON has some of the numbers as text ---
_Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Entry(Struct):
    process_group: tuple[str, ...] = ()
    """Its name and description; (): it belongs to no group."""
    collective_seq_id: _Whole = 0
    p2p_seq_id: _Whole = 0
    op_id: _Whole = -1
    record_id: _Whole = 0
    pg_id: _Whole = -1
    profiling_name: str = ""
    is_p2p: bool = False
    state: str = ""
    retired: bool = False
    time_created_ns: _Whole = 0
    time_discovered_started_ns: _Whole | None = None
    input_sizes: list[list[_Whole]] = []
    input_dtypes: list[str] = []

    @property
    def group(self) -> str:
        return _group_name(*self.process_group[:2])

    @property
    def is_done(self) -> bool:
        return self.state == "completed" or (
            self.retired and self.profiling_name.startswith("gloo")
        )


class _Group(Struct):
    desc: str = ""
    ranks: str = ""


class _Status(Struct):
    last_enqueued_collective: _Whole = -1
    last_completed_collective: _Whole = -1


class _Document(Struct):
    entries: list[_Entry]
    pg_config: dict[str, _Group] = {}
    pg_status: dict[_Whole, _Status] = {}
    dumped_ns: _Whole = 0
    task: _Whole = 0
    generation: _Whole = 0


def read(rank: int, document: object) -> Dump:
    """Parse the dump of one rank. Linear in its entries. Raises NotADump."""
    try:
        return _read(rank, msgspec.convert(document, _Document, strict=False))
    except (ValueError, RecursionError) as error:
        raise NotADump(str(error)) from None


def _read(rank: int, dump: _Document) -> Dump:
    entries = sorted(
        (entry for entry in dump.entries if entry.process_group), key=lambda entry: entry.record_id
    )
    newest: dict[str, int] = {}
    for entry in entries:
        newest[entry.group] = max(newest.get(entry.group, -1), entry.pg_id)
    entries = [entry for entry in entries if entry.pg_id == newest[entry.group]]
    config = {name: one for name, one in dump.pg_config.items() if name}  # gloo has one without
    groups: dict[str, Group] = {name: Group(name) for name in newest}
    members: dict[Group, tuple[int, ...]] = {}
    for key, one in config.items():
        ranks = from_json(one.ranks or "[]", tuple[_Whole, ...])
        name = _group_name(key, one.desc)
        groups[name] = Group(name, " ".join(map(str, sorted(ranks))))
        if ranks:
            members[groups[name]] = ranks
    entered: dict[Group, int] = {}
    ended: dict[Group, _Entry] = {}
    for entry in entries:
        group, seq = groups[entry.group], entry.collective_seq_id
        entered[group] = max(entered.get(group, 0), seq)
        last = ended[group].collective_seq_id if group in ended else 0
        if entry.is_done and not entry.is_p2p and seq > last:
            ended[group] = entry
    world = next(
        (ranks for group, ranks in members.items() if group.name.endswith(" default_pg")), ()
    )
    return Dump(
        rank=rank,
        members=members,
        entered=entered,
        completed={group: entry.collective_seq_id for group, entry in ended.items()},
        status={
            groups[name]: last for name, last in _status(dump.pg_status, config, newest).items()
        },
        pending=tuple(
            _op(entry, groups[entry.group], members)
            for entry in entries
            if not entry.is_done and not entry.profiling_name.endswith(":coalesced")
        ),
        ended=tuple(_op(entry, group, members) for group, entry in ended.items()),
        mixed=frozenset(
            groups[entry.group]
            for entry in entries
            if entry.is_p2p or entry.collective_seq_id != entry.op_id
        ),
        records_starts=any(
            entry.time_discovered_started_ns or entry.state == "started" for entry in entries
        ),
        dumped_ns=dump.dumped_ns,
        job=Job(tuple(sorted(world)), dump.task, dump.generation) if world else Job(),
    )


def _group_name(name: str, desc: str = "") -> str:
    return f"{name} {desc}" if desc not in ("", "undefined") else name


def _status(
    status: Mapping[int, _Status], config: Mapping[str, _Group], newest: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Name of a group -> (entered, completed), for each number that can be mapped to a name."""
    named = {number: group for group, number in newest.items()}
    if len(status) == len(config) and all(whole_number(name) is not None for name in config):
        guessed = {
            number: _group_name(name, config[name].desc)
            for number, name in zip(sorted(status), sorted(config, key=int), strict=True)
        }
        if all(guessed.get(number, group) == group for number, group in named.items()):
            named = {**guessed, **named}
    return {
        named[number]: (max(one.last_enqueued_collective, 0), max(one.last_completed_collective, 0))
        for number, one in status.items()
        if number in named
    }


def _op(entry: _Entry, group: Group, members: Mapping[Group, Sequence[int]]) -> Op:
    name = entry.profiling_name.partition(":")[2] or "?"
    op = Op(
        group,
        entry.collective_seq_id,
        name,
        entry.time_created_ns,
        entry.record_id,
        entry.state == "started",
    )
    ends = _ENDS.search(name) if entry.is_p2p else None
    if ends is None:
        return op._replace(tensors=_tensors(entry, name))
    ranks = members.get(op.group, ())
    one, other = (
        ranks[index] if index < len(ranks) else index for index in (int(ends[2]), int(ends[3]))
    )
    source, target = (one, other) if ends[1] == "send" else (other, one)
    return op._replace(name=ends[1], seq=entry.p2p_seq_id, source=source, target=target)


def _tensors(entry: _Entry, name: str) -> str:
    """Number of elements and data types of the input; NCCL and gloo ignore the shape."""
    if not any(word in name for word in _SAME_INPUT) or "sparse" in name:
        return ""
    return ", ".join(
        f"{math.prod(size[:DIMENSIONS_NUM_MAX])} {dtype}"
        for size, dtype in zip(entry.input_sizes, entry.input_dtypes, strict=False)
    )
