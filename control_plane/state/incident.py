"""Faults and incidents in the state: a fault is observed, decide turns it into an incident."""

from msgspec import Struct, field

from ...events.records.types import Origin, Severity, Slot

ORIGINS: tuple[Origin, ...] = ("", "own", "peer", "copy", "checkpoint", "seed")
"""Where a rank's state comes from, nearest first."""
FARTHER = ORIGINS[3:]
"""Origins that are used only if no member has the state."""


NUM_FAILURES_MAX = 64
NUM_STACKS_MAX = 16
STACK_CHARS_MAX = 2000
"""Of the innermost frames in the state; the file on the node has all."""
NUM_EVIDENCE_MAX = 256
"""An open incident takes no more evidence than this; the log has the rest."""


class Source(Struct, frozen=True, kw_only=True):
    """Where a member's state came from. An incident has the farthest source of all members."""

    origin: Origin = ""
    """The kind of source."""
    node: str = ""
    step_version: int = 0
    """The iterations that this state has."""
    path: str = ""
    """Path of the checkpoint, relative to the task's output folder."""
    num_bytes: int = 0
    """State bytes that came from this source, without bytes that peers forwarded."""


class FailureLocation(Struct, frozen=True):
    """Where and when a rank failed. Device errors of this slot near this time are its evidence."""

    rank: int
    slot: Slot
    at_s: float
    """When it failed, seconds since 1970."""


class FailureSeries(Struct, kw_only=True):
    """Failures of a task's own processes, until it has passed its point of failure."""

    since_s: float
    """When the first of them was observed, seconds since 1970."""
    since_iteration: int
    """Iterations that the task had finished then, at most."""
    ranks: list[int] = field(default_factory=list[int])
    """The ranks that failed and have not made progress since (`restart_iterations`)."""
    status: str = ""
    """The status of the newest failure."""
    iteration: int = -1
    """Iterations that the task had finished, at most, at the newest failure."""
    slots: list[Slot] = field(default_factory=list[Slot])
    """Where this status occurred at this iteration."""
    num: int = 0
    """How often it did. Failures of several ranks in one generation count once."""
    generation: int = -1
    """The generation of the newest failure; of a command its round."""
    now: list[int] = field(default_factory=list[int])
    """The ranks whose failures are the newest that count once."""
    why: str = ""
    """The newest failure, for people."""
    words: str = ""
    """The line that tells it, without numbers."""
    are_alike: bool = True
    """Whether all these failures have the same words."""
    can_pass: bool = False
    """Whether the newest failure may pass by itself."""
    is_refuted: bool = False
    """Whether an experiment has shown that a slot is not at fault: no other one is made."""


class UnnamedFault(Struct, frozen=True, kw_only=True):
    """A fault whose cause nothing names: a collective that failed or did not end."""

    at_s: float
    """When it was decided upon, seconds since 1970."""
    task: int
    incident: int
    generation: int
    """The task's generation in which it occurred."""
    status: str
    """The fault's kind (events/records/statuses.py)."""
    iteration: int
    """Iterations that the task had finished, at most."""
    nodes: tuple[str, ...]
    """The nodes that explain it; empty: too many do."""
    links: tuple[tuple[str, str], ...] = ()
    """The pairs of nodes between which members said that nothing came through."""


class HungRank(Struct, frozen=True, kw_only=True):
    """A rank that hung in its own work."""

    at_s: float
    """When it was decided upon, seconds since 1970."""
    task: int
    rank: int
    slot: Slot


class Suspect(Struct, frozen=True, kw_only=True):
    """A slot that a rank has left as an experiment (ExperimentBegun)."""

    slot: Slot
    status: str
    """How the rank failed there."""
    why: str
    """The reason of the experiment, for people."""
    iteration: int = -1
    """Iterations that the task had finished, at most, when the rank left the slot."""
    is_unnamed: bool = False
    """The fault had no name: what other ranks do tells, too (incidents/unnamed.py)."""
    is_exchanged: bool = False
    """Another rank of the task has the slot now."""


class Fault(Struct, frozen=True, kw_only=True):
    """An observed fault. The next decision turns it into an incident."""

    ranks: tuple[int, ...]
    node: str
    status: str
    """The fault's kind (events/records/statuses.py)."""
    why: str
    """The reason, for people."""
    evidence: tuple[int, ...]
    at_s: float
    """When it was observed, seconds since 1970."""
    hurts: bool
    """It interrupted training."""
    ended: bool
    """It ended a process, so a restart is due."""
    on_purpose: bool = False
    """It was injected (FaultRequested)."""
    second_hand: bool = False
    """It is indirect evidence, such as the end of another process: a direct fault is the cause."""
    strikes: tuple[FailureLocation, ...] = ()
    """Where and when ranks failed."""


class KeptStacks(Struct, frozen=True, kw_only=True):
    """What a rank did before it was ended (StacksKept)."""

    rank: int
    attempt: int
    node: str
    path: str
    """The file on the node, beside the rank's output; "": there is none."""
    stack: str
    """The innermost frames of its main thread, innermost first, a line each."""
    mark: str
    """What it did by its progress page; "": it has none."""
    why: str
    """Why there are no stacks, or not of all its processes; "": there are."""
    nccl_ras: str
    """What NCCL's RAS service said of the jobs on the node; "": nothing."""


class Incident(Struct, kw_only=True):
    """One fault of a task and all its consequences."""

    id: int
    """The seq of its IncidentOpened."""
    task: int
    node: str
    severity: Severity
    status: str
    """The fault's kind (events/records/statuses.py)."""
    ranks: list[int]
    why: str
    """The reason, for people."""
    evidence: list[int]
    opened_s: float
    """When it was opened, seconds since 1970."""
    down_since_s: float = -1.0
    """When the task stopped stepping; below 0: it steps."""
    on_purpose: bool = False
    """Its fault was injected (FaultRequested): another one is none that comes back."""
    num_times: int = 1
    """How often the fault has occurred: again while the incident was recovering."""
    begun_iteration: int = 0
    """Iterations that the task had finished, at most, when the fault last occurred."""
    until_iteration: int = 0
    """While it is recovering: when the task has finished so many iterations, it is closed."""
    recovering_s: float = 0.0
    """Since when the task trains again (IncidentRecovering); 0: it does not, or it is closed."""
    pause_s: float = 0.0
    """From detection to the first step; 0 while it is open."""
    iterations_lost: int | None = 0
    """None: the task is a command that has not logged an iteration since its restart."""
    kept: int = 0
    """Micro-batches of the interrupted iteration whose gradients were kept."""
    dealt: int = 0
    """Micro-batches of it that were reassigned to other members."""
    kept_before: int = 0
    """Part of `kept` from earlier interruptions of this incident; `dealt_before` likewise."""
    dealt_before: int = 0
    """Part of `dealt` from earlier interruptions of this incident."""
    ckpt_read: bool = False
    """A checkpoint on disk was read."""
    source: Source = Source()
    """The farthest source of any member's state."""
    ckpt_read_before: bool = False
    """The value of `ckpt_read` when the task last stepped; `source_before` likewise."""
    source_before: Source = Source()
    """The value of `source` when the task last stepped."""
    received_bytes: int = 0
    """State bytes received by all members, in all attempts."""
    peer_bytes: int = 0
    """Part of `received_bytes` that came from other members."""
    near_bytes: int = 0
    """Part of `peer_bytes` that came from members on the same node."""
    outcome: str = ""
    """How it ended (IncidentClosed); "": it is open."""
    closed_s: float = 0.0
    """When it was closed; 0: it is open."""
    acknowledged_by: str = ""
    """Who knows of it (IncidentAcknowledged); "": nobody has said so."""
    acknowledged_why: str = ""
    """What they wrote about it."""
    second_hand: bool = False
    """Only indirect evidence so far; the cause is unknown."""
    strikes: list[FailureLocation] = field(default_factory=list[FailureLocation])
    """The newest failure locations."""
    stacks: list[KeptStacks] = field(default_factory=list[KeptStacks])
    """What ranks did before they were ended, of the first NUM_STACKS_MAX."""
