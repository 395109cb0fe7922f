"""What happens to a cluster from outside, and the files that tell of it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from itertools import islice
from typing import Literal, NamedTuple

from ...events.errors import UsageError
from ..severity import TABLE

Event = Literal["fault", "repaired", "joined", "left"]
EVENTS: dict[str, Event] = {
    "fault": "fault", "repaired": "repaired", "joined": "joined", "left": "left"}
HEADER = ("at_s", "node", "event", "cause")
AT_S_MAX = 1e12


class Happening(NamedTuple):
    """At `at_s` of the scenario something befalls a node.

    fault: by `cause`, a row of the paper's table. repaired: it may have tasks again, if a fault
    took it out. joined: it is there for the first time, or again after it `left`.
    """

    at_s: float
    node: str
    event: Event
    cause: str = ""


def read(lines: Iterable[str], source: str) -> list[Happening]:
    """A trace in CSV with the header `at_s,node,event,cause`, by time; at one time in its order.

    Raises UsageError, which names the line.
    """
    rows = csv.reader(lines)
    header = tuple(word.strip() for row in islice(rows, 1) for word in row)
    if header != HEADER:
        raise UsageError(f"{source}: line 1: the header is {','.join(header) or 'missing'}",
                         f"write {','.join(HEADER)}")
    found = [_row(row, f"{source}: line {rows.line_num}") for row in rows if row]
    return sorted(found, key=lambda one: one.at_s)


def _row(row: list[str], where: str) -> Happening:
    if len(row) != len(HEADER):
        raise UsageError(f"{where}: {len(row)} columns", f"{len(HEADER)}: {','.join(HEADER)}")
    time, node, event, cause = (word.strip() for word in row)
    try:
        at_s = float(time)
    except ValueError:
        at_s = math.nan
    if not 0 <= at_s <= AT_S_MAX:
        raise UsageError(f"{where}: at_s is {time!r}", "seconds from the beginning, at least 0")
    if not node:
        raise UsageError(f"{where}: names no node")
    kind = EVENTS.get(event)
    if kind is None:
        raise UsageError(f"{where}: event is {event!r}", f"one of {', '.join(EVENTS)}")
    if kind == "fault" and cause not in TABLE:
        raise UsageError(f"{where}: cause is {cause!r}", f"one of {', '.join(TABLE)}")
    return Happening(at_s, node, kind, cause)
