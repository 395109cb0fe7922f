"""The cluster state: plain data, changed by the fold alone."""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from ...events.decoding import Decoder
from ...events.errors import UsageError
from ...events.records.codec import decode_record
from ...events.records.decisions import PlanChosen
from ...events.records.envelope import Record
from ...events.records.reports import OutageEnded
from ...events.records.types import Seat, Slot
from ...events.spec.policy import Policy
from .incident import HungRank, Incident, UnnamedFault
from .node import Node
from .task import StragglerCost, Task

SCHEMA = "unicron-state-9"
DECIDER_VERSION = 27
"""Version of `fold` and `decide`. Each epoch of a log records the version used (`heart`)."""
NUM_REQUESTS_MAX = 1024
"""Operator requests that are remembered to recognise repetitions; the oldest are dropped first."""
NUM_INCIDENTS_MAX = 256
"""Closed incidents that the state keeps; the log keeps all."""
NUM_UNNAMED_MAX = 128
"""Faults without a name, and hung ranks, that the state keeps; older than a day none counts."""
NUM_OUTAGES_MAX = 16
"""Outages that the state keeps; the log keeps all."""
WORK_SPAN_S = 1800
"""Length of the spans over which the cluster's achieved work is summed."""
NUM_WORK_SPANS_MAX = 48
"""Spans that the state keeps: 24 h."""


class Deadline(Struct):
    """A deadline, due at `due_s`. A new epoch restarts it with its full length."""

    due_s: float
    length_s: float
    """Its full length."""


class ClusterState(Struct, kw_only=True):
    """The whole input of the decider, folded from the log. It holds no caches but `num_running`,
    `unreachable`, `undecided` and `Task.num_outstanding`, which would take too long to count each
    time. Tests compare them with a fresh count (tests/drivers/state_check.py)."""

    seq: int = 0
    epoch: int = 0
    at_s: float = 0.0
    """The leader's time of the last record, seconds since 1970."""
    nonce: str = ""
    """The leader's random name."""
    heart: int = 0
    """DECIDER_VERSION of the leader's code."""
    code: str = ""
    """The Unicron version of the leader."""
    policy: Policy = field(default_factory=Policy)
    """As last set (PolicySet)."""
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    tasks: dict[int, Task] = field(default_factory=dict[int, Task])
    incidents: dict[int, Incident] = field(default_factory=dict[int, Incident])
    unnamed: list[UnnamedFault] = field(default_factory=list[UnnamedFault])
    """The newest faults without a name, of all tasks."""
    hung: list[HungRank] = field(default_factory=list[HungRank])
    """The newest ranks that hung, of all tasks."""
    sources: dict[str, int] = field(default_factory=dict[str, int])
    """By reporter: the number of its last report, to recognise repetitions."""
    deadlines: dict[str, Deadline] = field(default_factory=dict[str, Deadline])
    """By id, such as `stop/TASK/RANK/ATTEMPT`."""
    orders: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Open orders: seq -> the record, encoded."""
    plan: PlanChosen | None = None
    plan_seq: int = 0
    """The seq of `plan`; 0: there is none."""
    plan_s: float = 0.0
    """When `plan` was chosen."""
    unreachable: list[str] = field(default_factory=list[str])
    """Nodes that are unreachable or lost, by name."""
    undecided: list[str] = field(default_factory=list[str])
    """Nodes with pending decisions, by name."""
    to_probe: list[str] = field(default_factory=list[str])
    """Nodes that are to be probed as soon as there are agents that can."""
    replan: str = ""
    """Why the last plan is out of date; empty: it is current."""
    frozen: str = ""
    """The operator's reason for freezing healing; empty: healing is not frozen."""
    no_room: str = ""
    """Why no process is started: the disk of the log is nearly full; empty: it has room."""
    earned: dict[int, float] = field(default_factory=dict[int, float])
    """Weighted FLOP of iterations finished for the first time, by span: at_s // WORK_SPAN_S."""
    slot_flops: float = 0.0
    """Measured FLOP/s of one slot; 0: not measured."""
    slot_flops_of: int = 0
    """The task that `slot_flops` was measured on."""
    num_slots_max: int = 0
    """The largest number of slots seen at the same time."""
    num_running: int = 0
    """Processes of all tasks' ranks, without orphaned ones."""
    observed_slot_s: float = 0.0
    """Total slot time of the processes in `num_running` while a leader was active."""
    num_faults: int = 0
    """Faults during `observed_slot_s` (transition_cost.py defines which faults count)."""
    mtbf_gpu_s: float = 0.0
    """Mean time between faults of one slot, as the planner uses it."""
    degraded: dict[str, StragglerCost] = field(default_factory=dict[str, StragglerCost])
    """By degraded node: its last cost estimate."""
    to_price: list[str] = field(default_factory=list[str])
    """Nodes whose cost is estimated with the next decision."""
    reports_lost: int = 0
    """Reports that agents had to drop or lost with their disk (ReportsLost)."""
    outages: list[OutageEnded] = field(default_factory=list[OutageEnded])
    """The newest outages of control plane, leader and the log's server."""
    notified: list[str] = field(default_factory=list[str])
    """What a message has told to need a person, and none that it no longer does."""

    @property
    def held(self) -> str:
        """Why healing is paused: `observing`, `frozen: REASON`; empty when healing is active."""
        if self.policy.observe:
            return "observing"
        return f"frozen: {self.frozen}" if self.frozen else ""

    @property
    def starts_held(self) -> str:
        """Why no process is started, so that none is moved either; empty: processes are."""
        return self.held or self.no_room

    @property
    def hears_no_node(self) -> bool:
        """Whether all nodes are silent. Then the control plane is cut off, or all nodes are gone:
        it cannot tell which, and no other node could have their tasks."""
        return bool(self.unreachable) and all(
            node.unreachable or node.health == "left" for node in self.nodes.values()
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = Decoder(ClusterState)


def encode_state(state: ClusterState) -> bytes:
    """The whole state as msgpack. Maps keep the order in which the log filled them. So a log has
    exactly one encoding, also if the fold continued from a snapshot, and states can be compared by
    digest."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> ClusterState:
    """The inverse of `encode_state`. Raises msgspec.MsgspecError on invalid data."""
    return _decoder.decode(data)


def state_text(state: ClusterState) -> str:
    """The state as text, for JSON: SCHEMA, a colon, and its encoding in base64."""
    return f"{SCHEMA}:{b64encode(encode_state(state)).decode()}"


def state_of_text(text: str) -> ClusterState:
    """The inverse of `state_text`. Raises UsageError for another schema."""
    schema, _, data = text.partition(":")
    if schema != SCHEMA:
        raise UsageError(
            f"the log begins with a state of {schema}, this Unicron has {SCHEMA}",
            "use the version that wrote it",
        )
    return decode_state(b64decode(data))


def state_hash(state: ClusterState) -> str:
    """`unicron-state-9:` and 16 hex digits; two folds of one log have the same hash."""
    return f"{SCHEMA}:{hashlib.blake2b(encode_state(state), digest_size=8).hexdigest()}"


def open_orders(state: ClusterState) -> list[Record]:
    """Orders that are not yet acknowledged, by seq. The order streams hold the same orders."""
    return [decode_record(state.orders[seq]) for seq in sorted(state.orders)]


def live_tasks(state: ClusterState) -> list[Task]:
    """Tasks that have not ended, by id."""
    return [state.tasks[key] for key in sorted(state.tasks) if state.tasks[key].phase != "ended"]


def allocatable_slots(state: ClusterState) -> tuple[Slot, ...]:
    """Slots that a plan may allocate, by node name and index. Linear in the slots of all nodes."""
    nodes = state.nodes
    return tuple(
        [
            Slot(name, index)
            for name in sorted(nodes)
            if (node := nodes[name]).takes_tasks
            for index in range(node.num_slots)
            if not node.is_disabled(index)
        ]
    )


def can_allocate(state: ClusterState, seats: Iterable[Seat]) -> bool:
    """Whether a plan may allocate the slots of all these seats."""
    nodes = state.nodes
    return all(
        (node := nodes.get(seat.slot.node)) is not None
        and node.takes_tasks
        and seat.slot.index < node.num_slots
        and not node.is_disabled(seat.slot.index)
        for seat in seats
    )
