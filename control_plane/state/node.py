"""Nodes in the state: slots, processes, health checks and device errors."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from ...events.records.types import Labels

# --- health of a node ---
# Failing checks, device errors, faults. The number of each is bounded; the log keeps all.

NUM_CHECKS_MAX = 64
NUM_DEVICE_ERRORS_MAX = 32
NUM_NODE_FAULTS_MAX = 16
"""Limits of one node."""
TEXT_CHARS_MAX = 200


class Check(Struct, frozen=True, kw_only=True):
    """The last result of a health check that is not `healthy`."""

    check: str
    """Its name: "gpu", "memory"; "check/NAME" for a custom check."""
    health: str
    """Its result."""
    why: str
    """The reason, for people."""
    devices: tuple[int, ...]
    """The affected slots; empty: the whole node."""
    status: str
    """The kind of fault that it stands for (events/records/statuses.py)."""
    rule: str
    """The rule that gave the status."""
    seq: int
    at_s: float
    """Since when the check has reported this health, whatever the reason."""
    incident: int = 0
    """The incident that it is evidence of."""


class DeviceError(Struct, kw_only=True):
    """A device error from the kernel or a driver: evidence."""

    seq: int
    at_s: float
    """When the agent saw it, seconds since 1970."""
    origin: str
    """Who logged it: the kernel, the driver or a network device."""
    status: str
    """The kind of fault (events/records/statuses.py)."""
    rule: str
    """The rule that gave the status."""
    text: str
    """What was logged."""
    devices: tuple[int, ...]
    """The slots of the GPUs that it names; empty: the whole node, or unknown."""
    code: int
    """The XID; 0: none."""
    pid: int
    """The process that it names; 0: none."""
    incident: int = 0
    """The incident that it is evidence of; 0: none yet."""
    due: bool = False
    """The time limit for a related rank failure has passed, so the error is judged alone."""

    def is_like(self, other: DeviceError) -> bool:
        """Whether both report the same error: the same XID or rule, on the same devices."""
        same = self.code == other.code if self.code and other.code else self.rule == other.rule
        return same and self.devices == other.devices


class NodeFault(Struct, kw_only=True):
    """A fault that counts against a node."""

    at_s: float
    """When it occurred, seconds since 1970."""
    incident: int
    status: str
    """The kind of fault (events/records/statuses.py)."""
    why: str
    """The reason, for people."""
    fresh: bool = True
    """It occurred after the last quarantine."""
    incarnation: int = 0
    """The incarnation of the node's agent at that time."""


class Quarantine(Struct, frozen=True, kw_only=True):
    """The node gets no tasks until `until_s`, unless an operator lifts it."""

    since_s: float
    """When it began, seconds since 1970."""
    until_s: float
    why: str
    """The reason, for people."""
    incidents: tuple[int, ...]


NUM_SLOTS_MAX = 1024
"""Slots of one node; larger reports are clamped."""


class Probe(Struct, kw_only=True):
    """A probe of the node: who was ordered to make it, and what they have said so far."""

    order: int
    epoch: int
    """That of the order."""
    probers: tuple[str, ...]
    """The nodes whose agents make it."""
    answers: dict[str, bool] = field(default_factory=dict[str, bool])
    """By prober: whether it has reached the node."""


Health = Literal["healthy", "unreachable", "lost", "left"]


class Occupant(Struct):
    """The process on a slot."""

    task: int
    rank: int
    attempt: int


class Node(Struct, kw_only=True):
    """One node, in its newest incarnation."""

    name: str
    """Its name, unique in the cluster."""
    incarnation: int
    host: str
    """The address of its ranks."""
    pid: int
    """The agent's process."""
    num_slots: int
    """Slots that it has, disabled ones included."""
    accelerator: str
    """The kind of its devices: "cuda" or "cpu"."""
    keeper: str = ""
    """Address of its checkpoint store, host:port; empty: it has none."""
    keeper_start: int = 0
    """Number of the current checkpoint store. In-memory checkpoints of earlier stores are lost."""
    copies_bytes_max: int = 0
    """The memory that its checkpoint store may take, as its agent reported; 0: not known."""
    order_format: int = 0
    """The format of the orders that its agent reads (events/records/order_format.py)."""
    unlimited: tuple[str, ...] = ()
    """What the policy limits of a rank, and its agent cannot limit: `pids`, `memory`."""
    labels: Labels = Labels()
    """Its location, given at the start of its agent."""
    health: Health = "healthy"
    """`lost`: a second source has confirmed that it is unreachable. `left`: its agent said that it
    ends."""
    since_s: float = 0.0
    """Since when `health` holds."""
    improved_s: float = 0.0
    """When the node last ceased to be unhealthy or degraded."""
    room_back_s: float = 0.0
    """When its slots were last used at once, because its disk had room again; 0: never."""
    away_until_s: float = 0.0
    """Its agent restarts and is due until then; a shorter silence does not count."""
    unreachable_seq: int = 0
    """The seq of its last NodeUnreachable; 0: none."""
    probe_port: int = 0
    """The UDP port at which it answers probes; 0: at none."""
    is_probed: bool = False
    """An agent on another host has reached that port since the node joined. Only then does it tell
    something that nobody reaches it."""
    probe: Probe | None = None
    """The probe that is under way."""
    num_probes: int = 0
    """Probes since it joined, fell silent or was heard again; pauses grow with their number."""
    reached_by: tuple[str, ...] = ()
    """Who has reached it in the last probe, while the node is unreachable."""
    unreached_by: tuple[str, ...] = ()
    """Who has probed the silent node when nobody reached it; empty: somebody has, or it is not
    known."""
    unreached_seq: int = 0
    """The seq of the record that ended that probe; 0: none."""
    replace: bool = False
    """The node has been unreachable for replace_after_s (policy)."""
    down_seq: int = 0
    """The request that said its machine is off, while the node is unreachable; 0: none."""
    drained: bool = False
    """An operator drains the node. It stays drained when its agent joins again."""
    drain_reason: str = ""
    """Why, as the operator said."""
    fault_injected_s: float = -1.0
    """When a fault was injected into it; below 0: none was."""
    slots_disabled: list[int] = field(default_factory=list[int])
    """Slots disabled by a fault, until an operator gives them back or the agent joins again."""
    disabled_why: dict[int, str] = field(default_factory=dict[int, str])
    """By disabled slot: the reason."""
    slots_suspected: dict[int, str] = field(default_factory=dict[int, str])
    """By slot: why it is suspected. It stays in use, and is suspected until a task trains on it."""
    avoided_s: float = 0.0
    """When a fault without a name stayed away after ranks had left the node; 0: never. For a day
    placement prefers other nodes."""
    slots_unhealthy: list[int] = field(default_factory=list[int])
    """Slots that a check reports unhealthy. They are enabled after a time without such a report."""
    slots_recovering: dict[int, float] = field(default_factory=dict[int, float])
    """By slot in `slots_unhealthy`: since when no check has reported it unhealthy."""
    unhealthy_why: str = ""
    """Why `slots_unhealthy` are disabled, or why a check's report is not acted upon."""
    checks: list[Check] = field(default_factory=list[Check])
    """Checks that do not report healthy, the oldest first."""
    erred: list[DeviceError] = field(default_factory=list[DeviceError])
    """Its newest device errors."""
    incident: int = 0
    """The open incident of the node alone, which affected no task."""
    node_faults: list[NodeFault] = field(default_factory=list[NodeFault])
    """The newest faults that count against it."""
    quarantine: Quarantine | None = None
    occupants: dict[int, Occupant] = field(default_factory=dict[int, Occupant])
    """By slot: the process on it."""

    @property
    def unreachable(self) -> bool:
        """Whether the node is unreachable or lost. Its processes may still run."""
        return self.health in ("unreachable", "lost")

    @property
    def takes_tasks(self) -> bool:
        """Whether ranks may start on it: healthy, neither drained nor quarantined."""
        return self.health == "healthy" and not self.drained and self.quarantine is None

    def is_disabled(self, index: int) -> bool:
        """Whether the slot is disabled, by a device error or by a check."""
        return index in self.slots_disabled or index in self.slots_unhealthy
