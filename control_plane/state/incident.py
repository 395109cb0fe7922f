"""What goes wrong, as the state holds it: a fault that was noticed, the incident it becomes."""

from __future__ import annotations

from msgspec import Struct, field

from ...events.records.types import Origin, Severity, Slot

ORIGINS: tuple[Origin, ...] = ("", "own", "peer", "copy", "checkpoint", "seed")
"""From the nearest to the farthest."""
FARTHER = ORIGINS[3:]
"""Where state comes from that no member has any more."""


NUM_STRIKES_MAX = 64
NUM_EVIDENCE_MAX = 256
"""Of one incident, what is told when it was decided upon; the log has the rest."""


class Source(Struct, frozen=True, kw_only=True):
    """Whence state came: a member's, and for an incident the farthest of all of its members."""

    origin: Origin = ""
    node: str = ""
    step_version: int = 0
    path: str = ""
    """Of a checkpoint, from the task's output folder."""
    num_bytes: int = 0
    """What came from there, without what peers passed on of it."""


class Strike(Struct, frozen=True):
    """A rank that failed, where and when: what its device tells around then belongs to it."""

    rank: int
    slot: Slot
    at_s: float


class Series(Struct, kw_only=True):
    """The same fault at the same iteration, again and again, in whichever rank."""

    status: str
    iteration: int
    generation: int
    """When it was counted last: what strikes several ranks at once is one."""
    num: int = 1


class Fault(Struct, frozen=True, kw_only=True):
    """Something went wrong; not yet decided upon. The next decision turns it into an incident."""

    ranks: tuple[int, ...]
    node: str
    status: str
    why: str
    evidence: tuple[int, ...]
    at_s: float
    hurts: bool
    """Training was interrupted by it."""
    ended: bool
    """It took a process, so that a restart is due."""
    on_purpose: bool = False
    """Somebody asked for it (FaultRequested)."""
    second_hand: bool = False
    """It tells of another's end: never the cause where the evidence holds one."""
    strikes: tuple[Strike, ...] = ()


class Incident(Struct, kw_only=True):
    """What one fault, with all that followed from it, did to one task."""

    id: int
    task: int
    node: str
    severity: Severity
    status: str
    ranks: list[int]
    why: str
    evidence: list[int]
    opened_s: float
    down_since_s: float = -1.0
    """Since when the task does not step; below 0: it does."""
    pause_s: float = 0.0
    iterations_lost: int | None = 0
    """None: of a command that has not printed how far it is since it was started again."""
    kept: int = 0
    dealt: int = 0
    kept_before: int = 0
    """Of `kept`, what earlier interruptions of this incident kept; so for `dealt_before`."""
    dealt_before: int = 0
    ckpt_read: bool = False
    source: Source = Source()
    """The farthest that a member's state was taken from."""
    ckpt_read_before: bool = False
    """As it was when the task last stepped; so for `source_before`."""
    source_before: Source = Source()
    received_bytes: int = 0
    """Of state, by all members, in all tries."""
    peer_bytes: int = 0
    """Of these, from other members."""
    near_bytes: int = 0
    """Of these, from members on the same node."""
    outcome: str = ""
    closed_s: float = 0.0
    second_hand: bool = False
    """Nothing is known of its cause but what others saw of it."""
    strikes: list[Strike] = field(default_factory=list[Strike])
    """The newest."""
