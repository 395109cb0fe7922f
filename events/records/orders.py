"""What was decided: the bodies of decisions and of orders (imperatives), frozen.

An order states a whole target and is addressed to nodes. Its id is its seq. A lower epoch or a
lower generation is refused; delivery twice is harmless.
"""

from __future__ import annotations

from ..spec.job import JobSpec
from ..spec.model import Axes
from .types import Body, Copy, FaultKind, Keeper, Member, QuiesceMode, Slot


# --- orders -------------------------------------------------------------------------------------
class StartRank(Body, frozen=True):
    """Start one process on a slot. `seats` is how many the command tier starts (WORLD_SIZE).

    For `command:` tasks `host` and `port` are MASTER_ADDR and MASTER_PORT; else empty and 0.
    `checkpoint` is the published checkpoint that a first generation loads, or empty.
    `incarnation` is the agent's that the order is meant for: another one, which reads the same
    stream from its beginning, ignores it. 0 means any that has joined. `axes`: the layout that the
    plan counted on, of a command with a `model`.
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


class StopRank(Body, frozen=True):
    """End the process and its group: SIGTERM, after `grace_s` SIGKILL. 0 kills at once."""

    nodes: tuple[str, ...]
    task: int
    rank: int
    attempt: int
    grace_s: float
    why: str


class Quiesce(Body, frozen=True):
    """Leave generation `generation`: `now`, after the micro-batch, or at the next `boundary`.

    `save`: the task loses all its slots. `ranks[0]` writes a checkpoint of what it holds and says
    CheckpointSaved before it says Quiesced, so that no iteration is lost.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    mode: QuiesceMode
    ranks: tuple[int, ...]
    save: bool = False


class Reconfigure(Body, frozen=True):
    """Be generation `generation`: these members, in this order, in layout `axes`.

    Members beyond its places are beside it (events/spec/parallelism.py): they give what they hold,
    and train nothing. None is data-parallel, with all of them. `store` is the endpoint of the
    member that hosts the rendezvous. Members settle step version, kept micro-batches and sources
    among themselves: whoever has the highest step version gives.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    members: tuple[Member, ...]
    store: str
    dp: int
    checkpoint: str
    """Read by the first member when nobody brings state and no copy serves; empty: iteration 0."""
    copies: tuple[Copy, ...] = ()
    """Where nobody has state: what the first member tries first, in this order."""
    keepers: tuple[Keeper, ...] = ()
    """To whom the first member sends copies of its state from now on."""
    axes: Axes | None = None


class Resume(Body, frozen=True):
    """Train. The first member tells progress from iteration `progress_from` on."""

    nodes: tuple[str, ...]
    task: int
    generation: int
    progress_from: int


class SetCheckpointStores(Body, frozen=True):
    """From now on these keepers get the copies of generation `generation`.

    `nodes` are those of its members.
    """

    nodes: tuple[str, ...]
    task: int
    generation: int
    keepers: tuple[Keeper, ...]


class DropMemoryCheckpoints(Body, frozen=True):
    """The task has ended: forget its copies. Open until each node has answered
    MemoryCheckpointsLost.
    """

    nodes: tuple[str, ...]
    task: int


class PublishCheckpoint(Body, frozen=True):
    """Point `<output>/latest` at `path` (relative to output)."""

    nodes: tuple[str, ...]
    task: int
    generation: int
    output: str
    path: str


class InjectFault(Body, frozen=True):
    """Break something on purpose (FaultRequested): kill or stop a rank, or kill the agent.

    Once only: not an open order, and an agent of another `incarnation` ignores it.
    """

    nodes: tuple[str, ...]
    what: FaultKind
    task: int
    rank: int
    attempt: int
    incarnation: int
    stop_s: float


ORDERS = (StartRank, StopRank, Quiesce, Reconfigure, Resume, SetCheckpointStores,
          DropMemoryCheckpoints, PublishCheckpoint, InjectFault)
Order = (StartRank | StopRank | Quiesce | Reconfigure | Resume | SetCheckpointStores
         | DropMemoryCheckpoints | PublishCheckpoint | InjectFault)
