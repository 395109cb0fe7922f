"""One rule of the classifier: the words that call it, its pattern, how deep the cause lies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

HARDWARE, DEVICE, KILLED, FABRIC, RAISED, CARRIER, WRAPPER, TRACE = range(8)
"""How deep a cause lies. In a text of many lines the deepest wins, then the first:
hardware or a dead node; CUDA; a process killed or stuck in the kernel; storage or the fabric;
what was raised or a peer's end; a library's own name for it; how a launcher tells it."""


class Rule(NamedTuple):
    status: str
    """A row of the table; "": the line means nothing."""
    name: str
    depth: int
    words: tuple[str, ...]
    """One of these is in the line, in lower case, or the pattern is not tried."""
    pattern: re.Pattern[str] | None
    """Searched in the line in lower case; None: the words are enough."""
    second_hand: bool = False


def rules(status: str, depth: int, rows: Iterable[tuple[str, str] | tuple[str, str, str]], *,
          second_hand: bool = False) -> tuple[Rule, ...]:
    """Rules of one row: (name, words split by |, pattern if the words are not enough).

    Patterns know only bounded repeats: a line is searched in time linear in its length.
    """
    return tuple(Rule(status, row[0], depth, tuple(row[1].split("|")),
                      re.compile(row[2]) if len(row) > 2 else None, second_hand)
                 for row in rows)
