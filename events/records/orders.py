"""The bodies of orders (imperatives).

An order states a complete target and is addressed to nodes. Its id is its seq. Agents refuse an
order of a lower epoch or generation. Repeated delivery of an order is harmless.
"""

from ..spec.job import JobSpec
from ..spec.model import Axes
from .types import (
    Body,
    FaultKind,
    Member,
    MemoryCheckpoint,
    NodeStores,
    QuiesceMode,
    Slot,
    StoreEndpoint,
)


class StartRank(Body, frozen=True):
    """Start one process on a slot. `num_seats` is the WORLD_SIZE of a `command:` task.

    For `command:` tasks `host` and `port` are MASTER_ADDR and MASTER_PORT; else empty and 0.
    `checkpoint` is the published checkpoint that a first generation loads, or empty. The order is
    for the agent of `incarnation`, or for any that has joined (0); other agents that read the same
    stream ignore it. `axes`: the layout that the plan assumed, for a command with a `model`. For a
    task that heals in memory, `axes` and `place` are the layout (None: data-parallel only) and the
    position that the rank is expected to take, so that it builds this part of the model before its
    first generation. `place` -1: unknown. `declined`: why the processes of the task cannot recover
    in place; they start again together from their state in memory, and `copies` says where it is.
    """

    nodes: tuple[str, ...]
    task: int
    rank: int
    attempt: int
    slot: Slot
    spec: JobSpec
    num_seats: int
    host: str
    port: int
    checkpoint: str
    incarnation: int = 0
    axes: Axes | None = None
    place: int = -1
    declined: str = ""
    copies: tuple[MemoryCheckpoint, ...] = ()
    has_begun: bool = False
    """The task has trained, so its output was tried: what is wrong with it now fails saves, and
    ends no process."""
    first_iteration_s_max: float = 1200.0
    """Of the policy: a stall that has no usual time is reported after this at the latest."""
    local_slots: tuple[int, ...] = ()
    """The slots of the task on this node, in the order of its ranks: the rank sees their devices,
    and its place among them is its local rank. Empty, as in old logs: its own slot alone."""
    tell_s: float = 0.0
    """While the rank is waited for, its agent tells so often that it works (RankWorked): a third of
    the limit. 0: never."""
    restore_s_max: float = 15.0
    """Of the policy: how long a checkpoint store may send nothing, if `copies` are read."""


class StopRank(Body, frozen=True):
    """Stop the process and its group: SIGTERM, then SIGKILL after `grace_s`; 0: SIGKILL only."""

    nodes: tuple[str, ...]
    task: int
    rank: int
    attempt: int
    grace_s: float
    why: str
    keeps_stacks: bool = False
    """Before that, its agent keeps what the process does (StacksKept), for STACKS_S_MAX at most."""


class Quiesce(Body, frozen=True):
    """Leave a generation: `now`, after the current micro-batch; `boundary`, after the iteration.

    `save`: the task loses all its slots. The first ranks write a checkpoint in parts before they
    report Quiesced, so that no iteration is lost; `ranks[0]` completes it and reports
    CheckpointSaved.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    mode: QuiesceMode
    ranks: tuple[int, ...]
    save: bool = False
    saving: tuple[int, ...] = ()
    """The positions of the ranks that save, in the order of `ranks`, in the layout whose state they
    hold. Empty: `ranks[0]` alone, which has the whole state."""
    save_attempt: int = 0
    """How many such orders to save have failed before, in a row."""
    output: str = ""
    """As in Reconfigure."""
    tell_s: float = 0.0
    """As in StartRank."""


class Reconfigure(Body, frozen=True):
    """Form generation `generation` from these members, in this order, in layout `axes`.

    Members beyond the layout's positions are standby (events/spec/parallelism.py): they send their
    state, and do not train. `axes` None: data-parallel with all members. `store` is the endpoint of
    the member that hosts the rendezvous. The members agree on step version, kept micro-batches and
    state sources. Members with the highest step version send the state.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    members: tuple[Member, ...]
    store: str
    dp: int
    checkpoint: str
    """The checkpoint of which each member reads its part if no member and no in-memory checkpoint
    has the state; empty: start at iteration 0. Relative to the output, unless it is elsewhere."""
    earlier: tuple[str, ...] = ()
    """Published before it, the newest first: what is read if that one is damaged."""
    copies: tuple[MemoryCheckpoint, ...] = ()
    """If no member has the state: the generations and stores of the in-memory checkpoints to try
    first, the newest first. A store may have newer ones of the same generation."""
    keepers: tuple[StoreEndpoint, ...] = ()
    """The checkpoint stores to which members send their shares of in-memory checkpoints."""
    axes: Axes | None = None
    stores: tuple[NodeStores, ...] = ()
    """By node of members: which of `keepers` receive their shares. Empty: all."""
    copies_bytes_max: int = 0
    """The memory that each store may use for all tasks, in bytes; 0: its own limit."""
    output: str = ""
    """The folder of the checkpoints, if an operator has moved it; empty: that of the spec."""
    tell_s: float = 0.0
    """As in StartRank."""
    restore_s_max: float = 15.0
    """As in StartRank."""


class Resume(Body, frozen=True):
    """Train. The first member reports progress from iteration `progress_from` on."""

    nodes: tuple[str, ...]
    task: int
    generation: int
    progress_from: int


class SetCheckpointStores(Body, frozen=True):
    """Send the in-memory checkpoints of generation `generation` to these checkpoint stores.

    `nodes` are the nodes of its members.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    keepers: tuple[StoreEndpoint, ...]
    stores: tuple[NodeStores, ...] = ()
    """As in Reconfigure."""
    copies_bytes_max: int = 0


class DropMemoryCheckpoints(Body, frozen=True):
    """The task has ended: delete its in-memory checkpoints. The order is open until each node has
    reported MemoryCheckpointsLost."""

    nodes: tuple[str, ...]
    task: int


class PublishCheckpoint(Body, frozen=True):
    """Point `<output>/latest` at `path` (relative to output). When `path` was read back, the older
    checkpoints at the paths `remove` are removed."""

    nodes: tuple[str, ...]
    task: int
    generation: int
    output: str
    path: str
    remove: tuple[str, ...] = ()


class InjectFault(Body, frozen=True):
    """Inject a fault (FaultRequested): kill or stop a rank, or kill the agent.

    It is carried out once: it is no open order, and agents of another `incarnation` ignore it.
    """

    nodes: tuple[str, ...]
    what: FaultKind
    task: int
    rank: int
    attempt: int
    incarnation: int
    stop_s: float


class ProbeNode(Body, frozen=True):
    """Ask the agent of `node` at `host` and the UDP port `port` for a sign of life, and report the
    answer (NodeProbed). The challenge for it comes beside the order.

    It is carried out once: it is no open order, and an agent whose incarnation is not that in
    `incarnations`, at its place in `nodes`, ignores it.
    """

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]
    node: str
    incarnation: int
    host: str
    port: int


ORDERS = (
    StartRank,
    StopRank,
    Quiesce,
    Reconfigure,
    Resume,
    SetCheckpointStores,
    DropMemoryCheckpoints,
    PublishCheckpoint,
    InjectFault,
    ProbeNode,
)
Order = (
    StartRank
    | StopRank
    | Quiesce
    | Reconfigure
    | Resume
    | SetCheckpointStores
    | DropMemoryCheckpoints
    | PublishCheckpoint
    | InjectFault
    | ProbeNode
)
