"""The rows of a progress page: what a rank has entered in each of its groups, for its agent.

A row is of one group, or of the messages to or from one peer of a group. It says how many
operations the rank has entered there, and the last of them: kind, bytes, time. The rank writes it
before each operation, in about a microsecond, without a lock. The agent can read it at any time: a
row begins and ends with the same number, which is another one after each entry.

The rank counts all its groups, but the page has room for ROWS_NUM. The row that was written least
recently gives way, and the header says how many did.
"""

import math
import mmap
import struct
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from .violation import Violation

VERSION = 2
"""Of the page. Version 1 has no rows."""
ROWS_NUM = 64
ROW_BYTES = 64
HEADER_BYTES = 64
BYTES = HEADER_BYTES + ROWS_NUM * ROW_BYTES
_HEADER = struct.Struct("<IIIII")
_ROWS = struct.Struct("<III")
_WAITS_AT, _BEGAN_AT = 12, 16
_NUMBER = struct.Struct("<I")
_ENTRY = struct.Struct("<IIIBB2xQdI")
_GROUP = struct.Struct("<IIIIII")
_PART = struct.Struct(f"{_GROUP.size}s")
_HEADS = struct.Struct("<" + f"I{ROW_BYTES - 4}x" * ROWS_NUM)
_GROUP_AT = _ENTRY.size
_MASK = (1 << 32) - 1
assert _HEADER.size <= HEADER_BYTES
assert _GROUP_AT + _GROUP.size <= ROW_BYTES

ROLES = ("", "world", "dp_cp", "tp", "pp", "mp", "embd")
"""What a group is for; "": a group that the loop itself made."""
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "send",
    "receive",
)
NUM_BYTES_MAX = 1 << 60
TIME_S_MAX = 1e10
MEMBERS_NUM_MAX = 1 << 24
WORDS_NUM_MAX = 8
"""Groups of a rank that are told in words."""
Strides = tuple[int, int, int, int, int]
"""Ranks as two nested loops: `start + i * s1 + j * s2` for i below n1, j below n2; in this order:
start, n1, s1, n2, s2. n1 is 0 if the ranks are no such loops."""
UNKNOWN: Strides = (0, 0, 0, 0, 0)


class Entry(NamedTuple):
    """What one row says. `order` is the number of its last operation among all of this rank; 0: of
    an iteration before the current one. `left` is the last operation whose end the rank has waited
    for, as far as it waited in the call that entered it. `at_s` is of CLOCK_MONOTONIC."""

    key: int
    """Of the group's name in torch, which is the same on all of its members."""
    role: str
    members: Strides
    """Places in the generation; of messages: the peer."""
    entered: int
    left: int
    kind: str
    num_bytes: int
    at_s: float
    order: int


class Progress(NamedTuple):
    """What the rows say together."""

    entries: tuple[Entry, ...]
    is_complete: bool
    """False: a row was being written, or rows gave way."""
    waits: bool
    """Whether the rank is in a call that waits for the end of an operation."""

    def in_words(self) -> str:
        """The last operation of each of its groups, the newest first. For example
        `its last operation is all_reduce 41 of tp, entered, not left; before that send 7 of pp,
        left`. "": it has entered none."""
        newest = sorted(self.entries, key=lambda entry: (entry.order, entry.at_s), reverse=True)
        words = [self._operation(entry) for entry in newest[:WORDS_NUM_MAX]]
        return "; ".join(
            f"{'before that' if i else 'its last operation is'} {each}"
            for i, each in enumerate(words)
        )

    def _operation(self, entry: Entry) -> str:
        group = entry.role or f"group {entry.key:08x}"
        if entry.entered == entry.left:
            state = "left"
        else:  # one that no call waits for may have ended
            state = "entered, not left" if self.waits else "entered"
        return f"{entry.kind} {entry.entered} of {group}, {state}"


class Row:
    """The writer's side of one row. `index` -1: it has none at present."""

    __slots__ = ("entered", "group", "index", "left", "order", "role")

    def __init__(self, group: bytes, role: int) -> None:
        self.group, self.role = group, role
        self.index = -1
        self.entered = self.left = self.order = 0


class RowsWriter:
    """The rank's side, of `page` from byte `at` on. Threads of one process may write at a time."""

    def __init__(self, page: mmap.mmap, at: int) -> None:
        self._page, self._at = page, at
        self._order = self._num_dropped = 0
        self._rows: list[Row] = []
        self.clear()

    def clear(self) -> None:
        """No group has been entered: a generation begins."""
        for row in self._rows:
            row.index = -1
        self._rows = []
        self._num_dropped = 0
        self.set_waits(0)
        self.begin_iteration()
        self._write_header()

    def begin_iteration(self) -> None:
        """All that was entered before has ended: an iteration begins."""
        _NUMBER.pack_into(self._page, self._at + _BEGAN_AT, self._order)

    def set_waits(self, num: int) -> None:
        """How many calls wait now for the end of an operation."""
        _NUMBER.pack_into(self._page, self._at + _WAITS_AT, num)

    def enter(self, row: Row, kind: int, num_bytes: int) -> None:
        """The operation is about to be started."""
        self._order = order = (self._order + 1) & _MASK or 1
        if row.index < 0:
            self._give_place(row)
        row.entered = (row.entered + 1) & _MASK
        row.order = order
        _ENTRY.pack_into(
            self._page,
            self._at + HEADER_BYTES + row.index * ROW_BYTES,
            order,
            row.entered,
            row.left,
            kind,
            row.role,
            num_bytes,
            time.monotonic(),
            order,
        )

    def leave(self, row: Row, number: int) -> None:
        """The operation of this number has ended."""
        row.left = number
        if row.index >= 0:
            at = self._at + HEADER_BYTES + row.index * ROW_BYTES
            _NUMBER.pack_into(self._page, at + 8, number)

    def _give_place(self, row: Row) -> None:
        if len(self._rows) < ROWS_NUM:
            row.index = len(self._rows)
            self._rows.append(row)
        else:
            oldest = min(self._rows, key=lambda each: each.order)
            row.index, oldest.index = oldest.index, -1
            self._rows[row.index] = row
            self._num_dropped += 1
        at = self._at + HEADER_BYTES + row.index * ROW_BYTES
        _NUMBER.pack_into(self._page, at, 0)  # incomplete, until the entry has been written
        at += _GROUP_AT
        _PART.pack_into(self._page, at, row.group)
        self._write_header()

    def _write_header(self) -> None:
        _ROWS.pack_into(self._page, self._at, VERSION, len(self._rows), self._num_dropped)


def group_of(name: str, members: Sequence[int]) -> bytes:
    """The part of a row that stays: the group's name in torch, and its members."""
    return _GROUP.pack(zlib.crc32(name.encode()), *strides(members))


def strides(members: Sequence[int]) -> Strides:
    """Members as two nested loops; UNKNOWN if they are none."""
    num = len(members)
    if not num or not all(0 <= place < MEMBERS_NUM_MAX for place in members):
        return UNKNOWN
    step = members[1] - members[0] if num > 1 else 1
    inner = 1
    while inner < num and members[inner] - members[inner - 1] == step:
        inner += 1
    outer, outer_step = 1, 0
    if inner < num:
        if num % inner:
            return UNKNOWN
        outer, outer_step = num // inner, members[inner] - members[0]
    loops = (members[0], inner, step, outer, outer_step)
    if min(loops) < 0 or list(members_of(loops)) != list(members):
        return UNKNOWN
    return loops


def members_of(loops: Strides) -> tuple[int, ...]:
    """The members, in their order; () if they are unknown."""
    start, n1, s1, n2, s2 = loops
    return tuple(start + i * s1 + j * s2 for j in range(n2) for i in range(n1))


def read(first: bytes, again: bytes, now_s: float) -> Progress | None:
    """What two copies of the rows say, one after the other; None if the rank has written none: one
    of the version before has a page with room for them, too. Raises Violation."""
    version, num, num_dropped, num_waits, began = _HEADER.unpack_from(first)
    if not version:
        return None
    if version != VERSION:
        raise Violation(f"rows of version {version}")
    if num > ROWS_NUM:
        raise Violation(f"{num} rows")
    entries: list[Entry] = []
    for at in range(HEADER_BYTES, HEADER_BYTES + num * ROW_BYTES, ROW_BYTES):
        data = first[at : at + ROW_BYTES]
        if data == again[at : at + ROW_BYTES] and (entry := _entry(data, began, now_s)):
            entries.append(entry)
    return Progress(tuple(entries), len(entries) == num and not num_dropped, num_waits > 0)


def num_entered(rows: bytes) -> int:
    """A number that changes with each operation that the rank enters, of a copy of the rows."""
    newest: int = max(_HEADS.unpack_from(rows, HEADER_BYTES))
    return newest


def _entry(data: bytes, began: int, now_s: float) -> Entry | None:
    head, entered, left, kind, role, num_bytes, at_s, tail = _ENTRY.unpack_from(data)
    if head != tail or not head:
        return None  # being written
    key, *loops = _GROUP.unpack_from(data, _GROUP_AT)
    start, n1, s1, n2, s2 = loops
    if kind >= len(KINDS):
        raise Violation(f"kind {kind} of an operation")
    if role >= len(ROLES):
        raise Violation(f"role {role} of a group")
    if max(start, n1, s1, n2, s2, n1 * n2) > MEMBERS_NUM_MAX or (n1 > 0) != (n2 > 0):
        raise Violation(f"group of {n1} x {n2} members")
    if num_bytes > NUM_BYTES_MAX:
        raise Violation(f"operation of {num_bytes} bytes")
    if not (math.isfinite(at_s) and 0 <= at_s <= TIME_S_MAX):
        raise Violation(f"time {at_s}")
    return Entry(
        key,
        ROLES[role],
        (start, n1, s1, n2, s2),
        entered,
        left,
        KINDS[kind],
        num_bytes,
        min(at_s, now_s),
        head if head > began else 0,
    )
