"""What a look at the node found, before anybody is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from ....events.detected import CheckHealth

RANKED: tuple[CheckHealth, ...] = ("healthy", "unknown", "degraded", "unhealthy")
"""From good to bad. Not knowing is worse than well, and better than a known fault."""


class Finding(NamedTuple):
    """What one check says now (events/detected.py, HealthChanged)."""

    check: str
    health: CheckHealth
    why: str = ""
    devices: tuple[int, ...] = ()
    status: str = ""
    rule: str = ""
    is_fact: bool = False
    """A driver or a counter states it: it is true at the first look."""


class Erred(NamedTuple):
    """One error that somebody told of (events/detected.py, DeviceErred)."""

    origin: Literal["kernel", "nvml", "network"]
    status: str
    rule: str
    text: str
    devices: tuple[int, ...] = ()
    code: int = 0
    pid: int = 0


class Look(NamedTuple):
    """All that one look of a reader found: what each of its checks says, and errors since."""

    findings: Sequence[Finding] = ()
    erred: Sequence[Erred] = ()


class Reader(Protocol):
    """Looks at one part of the node. `read` may block: it is called in a thread of its own.

    `read` raises OSError, ValueError or LookupError where the part says nothing sensible.
    """

    name: str
    every_s: float
    s_max: float

    def read(self) -> Look: ...


def worst(check: str, found: Sequence[Finding]) -> Finding:
    """What `check` says as a whole: the worst of its parts; why names all that are as bad."""
    if not found:
        return Finding(check, "healthy")
    first = max(found, key=lambda one: RANKED.index(one.health))
    same = [one for one in found if one.health == first.health]
    return first._replace(check=check, why="; ".join(one.why for one in same if one.why))
