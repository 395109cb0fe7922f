"""Types that bodies of several records share: slots, seats, members, labels, checkpoint stores."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ..errors import UsageError

Origin = Literal["", "own", "peer", "copy", "checkpoint", "seed"]
"""Whence a member's state is, from the nearest to the farthest ("": not told)."""


class Taken(Struct, frozen=True):
    """Bytes of state, from rank `rank` on `node`."""

    rank: int
    node: str
    taken_bytes: int


# --- Labels of a node: its rack and its switch, as whoever starts its agent says. ---

HINT = "for example --label rack=r1 --label switch=s3"
VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


class Labels(Struct, frozen=True, kw_only=True):
    """Where a node stands; empty: nobody said. What fails together has the same rack."""

    rack: str = ""
    switch: str = ""


KEYS = Labels.__struct_fields__


def parse(texts: Iterable[str]) -> Labels:
    """From `KEY=VALUE` texts. Raises UsageError for all that is no label, and for one said twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--label {text!r} is not KEY=VALUE", HINT)
        if key in found:
            raise UsageError(f"--label {key} is given twice", HINT)
        found[key] = value
        if why := wrong(key, value):
            raise UsageError(f"--label {text!r}: {why}", HINT)
    return Labels(**found)


def wrong(key: str, value: str) -> str:
    """What is wrong with a label, in words; empty where nothing is."""
    if key not in KEYS:
        return f"{key!r} is no label; there are {' and '.join(KEYS)}"
    if not VALUE.match(value):
        return f"{value!r} is not 1 to 63 of A-Z a-z 0-9 . _ -, a letter or digit at both ends"
    return ""

FaultKind = Literal["rank", "stop", "node"]
"""What may be broken on purpose: a rank killed, a rank stopped, an agent killed with its ranks."""

class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Root of every record's body. `v` of the envelope is `V` of the class."""

Severity = Literal["SEV1", "SEV2", "SEV3"]
QuiesceMode = Literal["now", "boundary"]
Outcome = Literal["healed", "set back", "failed", "ended"]


class Slot(Struct, frozen=True, order=True):
    """One GPU (or one share of a CPU node)."""

    node: str
    index: int


class Seat(Struct, frozen=True, order=True):
    """A rank's place: the rank's number in its task (stable while it lives) and its slot."""

    rank: int
    slot: Slot


class Member(Struct, frozen=True):
    """One process of a generation; its place in the tuple is its torch.distributed rank."""

    rank: int
    attempt: int
    node: str
    endpoint: str


class Keeper(Struct, frozen=True):
    """The keeper of a node, at host:port: it takes copies of state into its memory."""

    node: str
    endpoint: str


NUM_COPIES_MAX = 2
"""Of one task, in one keeper: the newest."""


class Copy(Struct, frozen=True, kw_only=True):
    """A copy of a rank's whole state, in the memory of a node's keeper (MemoryCheckpointStored)."""

    node: str
    endpoint: str
    rank: int
    generation: int
    step_version: int
    copy_bytes: int
    checksum: str
    step_version_max: int = -1
    """Where the task went on from: what is beyond it was left behind. -1: nothing was."""


# --- Numbers of keepers: which of a node's keepers, one after the other, is meant. ---

KEEPERS_NUM_MAX = 1 << 10
"""Keepers, one after the other, of one incarnation of an agent."""


def first_keeper(incarnation: int) -> int:
    """The number of its first keeper: each incarnation has KEEPERS_NUM_MAX, above all before.

    An incarnation may be only one more than the last, where a clock was set back.
    """
    return incarnation * KEEPERS_NUM_MAX
