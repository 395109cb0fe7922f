"""One rule of the classifier: its words, its pattern, and the depth of the cause."""

import re
from collections.abc import Iterable
from typing import NamedTuple

HARDWARE, DEVICE, KILLED, FABRIC, RAISED, CARRIER, WRAPPER, TRACE = range(8)
"""Depth of a cause, deepest first: hardware or a dead node; CUDA; a process that was killed or is
blocked in the kernel; storage or the network fabric; an exception, or the exit of a peer; a
library's message about such an error; a launcher's message; any other line about a failure."""


class Rule(NamedTuple):
    status: str
    """A status of the table; "": the line is harmless."""
    name: str
    depth: int
    words: tuple[str, ...]
    """The pattern is tried only if the lower-case line contains one of these."""
    pattern: re.Pattern[str] | None
    """Searched in the lower-case line; None: a word is enough."""
    second_hand: bool = False
    can_pass: bool = False
    """Whether such a fault can end by itself within minutes, without anybody's doing: of names, of
    connections, of the network, of storage that is full or away, of a remote service. Not that of a
    collective's timeout, which tells of a wait, and not of its cause."""


def rules(
    status: str,
    depth: int,
    rows: Iterable[tuple[str, str] | tuple[str, str, str]],
    *,
    second_hand: bool = False,
    can_pass: bool = False,
) -> tuple[Rule, ...]:
    """Build the rules of one status: (name, words separated by |, optional pattern). Patterns use
    only bounded repeats, so that a line is searched in time linear in its length."""
    return tuple(
        Rule(
            status,
            row[0],
            depth,
            tuple(row[1].split("|")),
            re.compile(row[2]) if len(row) > 2 else None,
            second_hand,
            can_pass,
        )
        for row in rows
    )
