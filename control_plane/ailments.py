"""What ails a node, as the state holds it: what its checks say, what its devices told, what counts.

All of it is bounded; the log keeps the rest.
"""

from __future__ import annotations

from msgspec import Struct

NUM_CHECKS_MAX = 64
NUM_ERRED_MAX = 32
NUM_OFFENCES_MAX = 16
"""Of one node: so many are kept of each."""
TEXT_CHARS_MAX = 200


class Check(Struct, frozen=True, kw_only=True):
    """The last word of one of the node's checks, where that is not `healthy`."""

    check: str
    health: str
    why: str
    devices: tuple[int, ...]
    status: str
    rule: str
    seq: int
    at_s: float
    """Since when it says so, for whatever reason."""
    incident: int = 0
    """Which it is evidence of."""

    @property
    def is_site(self) -> bool:
        """Whether a command of the site says so, and not a driver."""
        return self.check.startswith("check/")


class Erred(Struct, kw_only=True):
    """What the kernel or a driver told of a device: evidence."""

    seq: int
    at_s: float
    origin: str
    status: str
    rule: str
    text: str
    devices: tuple[int, ...]
    code: int
    pid: int
    incident: int = 0
    """Which it is evidence of; 0: of none yet."""
    due: bool = False
    """The time in which its rank would have failed is over: it stands alone."""

    def is_like(self, other: Erred) -> bool:
        """Whether both tell the same: an equal XID, or the same rule, of the same devices."""
        same = self.code == other.code if self.code and other.code else self.rule == other.rule
        return same and self.devices == other.devices


class Offence(Struct, kw_only=True):
    """A fault that counts against a node."""

    at_s: float
    incident: int
    status: str
    why: str
    fresh: bool = True
    """It came after the last quarantine."""
    incarnation: int = 0
    """Of the node's agent then."""


class Quarantine(Struct, frozen=True, kw_only=True):
    """The node gets no tasks until `until_s`, unless an operator lifts it."""

    since_s: float
    until_s: float
    why: str
    incidents: tuple[int, ...]
