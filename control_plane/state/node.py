"""A node as the state holds it: its slots, its processes, its conditions and device errors."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from ...events.records.types import Labels, Slot

# --- What ails a node, as the state holds it: what its checks say, what its devices told, what
# counts. ---
#
# All of it is bounded; the log keeps the rest.

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

NUM_SLOTS_MAX = 1024
"""Of one node; a report of more is absurd."""

Health = Literal["healthy", "unreachable", "lost", "left"]


class Occupant(Struct):
    """The process on a slot."""

    task: int
    rank: int
    attempt: int


class Node(Struct, kw_only=True):
    """One node, in its newest incarnation."""

    name: str
    incarnation: int
    host: str
    pid: int
    num_slots: int
    accelerator: str
    keeper: str = ""
    """Where its keeper takes copies, host:port; empty: it has none."""
    keeper_start: int = 0
    """The keeper that may have copies: what earlier ones had is gone with them."""
    labels: Labels = Labels()
    health: Health = "healthy"
    since_s: float = 0.0
    eased_s: float = 0.0
    """When what ails it last grew less: unhealthy no more, or not degraded any more."""
    silenced_seq: int = 0
    replace: bool = False
    """Unreachable for replace_after_s."""
    drained: bool = False
    """An operator wants it empty; it stays so when its agent joins again."""
    drain_reason: str = ""
    harmed_s: float = -1.0
    """When somebody asked to kill it; below 0: nobody did."""
    slots_out: list[int] = field(default_factory=list[int])
    """Slots with a hardware fault; they come back when the agent joins again."""
    out_why: dict[int, str] = field(default_factory=dict[int, str])
    """Of these, what took the slot out."""
    slots_sick: list[int] = field(default_factory=list[int])
    """Slots that a check calls unhealthy; they come back when it calls them healthy for a time."""
    slots_well: dict[int, float] = field(default_factory=dict[int, float])
    """Of these, since when no check calls the slot so any more: each has a time of its own."""
    sick_why: str = ""
    """Why these, or why not in spite of what a check says."""
    checks: list[Check] = field(default_factory=list[Check])
    """Those that do not say healthy, the oldest first."""
    erred: list[Erred] = field(default_factory=list[Erred])
    incident: int = 0
    """The open one that is of the node alone; no task was hurt."""
    offences: list[Offence] = field(default_factory=list[Offence])
    quarantine: Quarantine | None = None
    occupants: dict[int, Occupant] = field(default_factory=dict[int, Occupant])

    @property
    def silent(self) -> bool:
        """Whether nothing is heard of it; its processes may live all the same."""
        return self.health in ("unreachable", "lost")

    @property
    def takes_tasks(self) -> bool:
        """Whether something may be started on it: healthy, neither drained nor quarantined."""
        return self.health == "healthy" and not self.drained and self.quarantine is None

    def is_out(self, index: int) -> bool:
        """Whether nothing may be started on this slot: it erred, or a check says so."""
        return index in self.slots_out or index in self.slots_sick

    def usable(self) -> tuple[Slot, ...]:
        """Its slots that a plan may give, by index."""
        if not self.takes_tasks:
            return ()
        return tuple(Slot(self.name, index) for index in range(self.num_slots)
                     if not self.is_out(index))
