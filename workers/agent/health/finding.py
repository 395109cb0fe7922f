"""The types of health findings."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from ....events.records.reports import CheckHealth

RANKED: tuple[CheckHealth, ...] = ("healthy", "unknown", "degraded", "unhealthy")
"""From good to bad: "unknown" is worse than "healthy" and better than a known fault."""


class Finding(NamedTuple):
    """The current result of one check (events/records/reports.py, HealthChanged)."""

    check: str
    health: CheckHealth
    why: str = ""
    devices: tuple[int, ...] = ()
    status: str = ""
    rule: str = ""
    is_fact: bool = False
    """A driver or a counter states this finding: it is reported without debouncing."""


class DeviceError(NamedTuple):
    """One reported device error (events/records/reports.py, DeviceErred)."""

    origin: Literal["kernel", "nvml", "network"]
    status: str
    rule: str
    text: str
    devices: tuple[int, ...] = ()
    code: int = 0
    pid: int = 0


class Reading(NamedTuple):
    """One reading: the findings of all checks of a reader, and new errors."""

    findings: Sequence[Finding] = ()
    erred: Sequence[DeviceError] = ()


class Reader(Protocol):
    """Reads one part of the node. `read` may block: it is called in its own thread. It raises
    OSError, ValueError or LookupError if the part cannot be read."""

    name: str
    s_max: float

    @property
    def every_s(self) -> float:
        """The time between two readings."""
        ...

    def read(self) -> Reading: ...


def worst(check: str, found: Sequence[Finding]) -> Finding:
    """Combine the parts of `check`: the worst health, with the reasons of all equally bad parts."""
    if not found:
        return Finding(check, "healthy")
    first = max(found, key=lambda one: RANKED.index(one.health))
    same = [one for one in found if one.health == first.health]
    return first._replace(check=check, why="; ".join(one.why for one in same if one.why))
