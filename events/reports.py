"""What happened: the bodies of reports, past participles, frozen."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .labels import Labels
from .model_spec import Modelled
from .policy import Policy as Policy
from .spec import JobSpec
from .taken import Origin as Origin
from .taken import Taken

FaultKind = Literal["rank", "stop", "node"]
"""What may be broken on purpose: a rank killed, a rank stopped, an agent killed with its ranks."""

class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Root of every record's body. `v` of the envelope is `V` of the class."""


# --- said by the leader -------------------------------------------------------------------------
class EpochStarted(Body, frozen=True):
    """A leader took the log. Re-arms every deadline and lease with its full length."""

    nonce: str
    code: str
    heart: int


class PolicySet(Body, frozen=True):
    policy: Policy


class DeadlineReached(Body, frozen=True):
    """The clock passed a deadline that the state holds. `deadline` is its id."""

    deadline: str


class NodeSilenced(Body, frozen=True):
    """No heartbeat of this incarnation for `silence_s`."""

    node: str
    incarnation: int
    silence_s: float


class NodeHeard(Body, frozen=True):
    """A silenced incarnation was heard again."""

    node: str
    incarnation: int


# --- said by an operator ------------------------------------------------------------------------
class TaskSubmitted(Body, frozen=True):
    """Its seq is the task's id. `modelled`: its throughput, searched before, if it has a model."""

    spec: JobSpec
    modelled: Modelled | None = None


class TaskCancelRequested(Body, frozen=True):
    task: int
    reason: str = ""


class TaskWeightSet(Body, frozen=True):
    """The task's weight from now on; its spec keeps the one that it was submitted with."""

    task: int
    weight: float
    reason: str = ""


class HealingFrozen(Body, frozen=True):
    """From now on nothing is ordered that nobody asked for; what has begun is completed."""

    reason: str


class HealingResumed(Body, frozen=True):
    """Unicron acts again, and at once upon all that happened meanwhile."""

    reason: str = ""


class NodeDrained(Body, frozen=True):
    """Tasks shall leave the node; it gets none until NodeUndrained, also when it joins again."""

    node: str
    reason: str = ""


class NodeUndrained(Body, frozen=True):
    """The node may have tasks again."""

    node: str
    reason: str = ""


class FaultRequested(Body, frozen=True):
    """Break this on purpose: `rank` of `task`, or `node` ("" and -1 where it does not matter)."""

    what: FaultKind
    task: int = 0
    rank: int = -1
    node: str = ""
    stop_s: float = 0.0
    """How long a stopped rank stays stopped; 0 for ever."""
    reason: str = ""


# --- said by an agent about its node ------------------------------------------------------------
class NodeJoined(Body, frozen=True):
    """An agent started. Whatever an older incarnation of this node ran is dead.

    `incarnation` is the agent's start in ms since 1970; the newest wins.
    `host` is the address at which its ranks can be reached, `keeper` where its keeper takes copies
    of their state ("": it has none). `labels` are what its agent was started with.
    """

    node: str
    incarnation: int
    host: str
    pid: int
    num_slots: int
    accelerator: str = "cpu"
    keeper: str = ""
    labels: Labels = Labels()


class NodeLeft(Body, frozen=True):
    """An agent stops on purpose, and its ranks with it: no fault."""

    node: str
    incarnation: int
    reason: str


class CopiesLost(Body, frozen=True):
    """The node's keeper has no copies of the task any more; `task` 0: of none, it has ended.

    `keeper_start` is its number: what later ones of the node have is not meant. `order` is the
    DropCopies that was carried out (0: none was).
    """

    node: str
    incarnation: int
    task: int
    why: str
    keeper_start: int = 0
    order: int = 0


class ReportsLost(Body, frozen=True):
    """The agent's spool overflowed: `num_lost` reports will never come."""

    node: str
    num_lost: int


class OrderRefused(Body, frozen=True):
    """An agent could not or would not carry out the order `order` (a seq)."""

    node: str
    order: int
    why: str


# --- said by an agent or a rank about a rank ----------------------------------------------------
class RankStarted(Body, frozen=True):
    """The process runs. Its output goes to `log_path` on the node."""

    task: int
    rank: int
    attempt: int
    node: str
    pid: int
    log_path: str


class RankReady(Body, frozen=True):
    """Model and data are built, no communicator yet. `endpoint` is its store, host:port."""

    task: int
    rank: int
    attempt: int
    endpoint: str
    num_params: int
    state_bytes: int
    iteration_flops: float
    data_digest: str


class RankErrored(Body, frozen=True):
    """An exception inside the rank, told before the process ends."""

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    error: str
    text: str
    status: str = ""
    """The row of the table that `text` is of ("": not told)."""
    rule: str = ""
    second_hand: bool = False
    """It tells of another's end ("closed by peer")."""


class RankExited(Body, frozen=True):
    """The process is gone. Exactly one of exit_code, signal is set.

    The next process gets its slot when all that it had started is gone too. Of a training rank that
    ended by itself this is told at once, of others then, or when that takes too long.
    """

    task: int
    rank: int
    attempt: int
    pid: int
    exit_code: int | None
    signal: int | None
    tail: str = ""
    """The end of what it wrote to stderr."""
    status: str = ""
    """What it died of, by `cause`; "": nothing is known but its end."""
    rule: str = ""
    cause: str = ""
    """The line that says why: of stderr, torch's error file, the OOM killer."""
    second_hand: bool = False


class RankSuspended(Body, frozen=True):
    """The process was found stopped (SIGSTOP, a shell's Ctrl-Z): it does nothing, and lives."""

    task: int
    rank: int
    attempt: int
    pid: int


class RankContinued(Body, frozen=True):
    """A suspended process runs again (SIGCONT)."""

    task: int
    rank: int
    attempt: int
    pid: int


class CollectiveFailed(Body, frozen=True):
    """A collective failed under this rank: second-hand evidence. The rank holds its state."""

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    error: str
    status: str = ""
    rule: str = ""
    peer: str = ""  # whom the error names, as host:port


class Quiesced(Body, frozen=True):
    """The rank left generation `generation` and holds.

    `step_version` is the number of optimizer steps it has taken. `micro_batches` are those of
    iteration `step_version` whose gradients are whole in its kept sum.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    micro_batches: tuple[int, ...]
    buckets_reduced: int
    num_buckets: int


class Reconfigured(Body, frozen=True):
    """The rank is in generation `generation`, has settled with its peers, and holds.

    Of iteration `step_version`: `kept` are the micro-batches whole in its own sum, `todo` those
    that it will run, `dealt` the part of `todo` that the iteration's dealing had given to a rank
    that is gone. `source` is the rank that gave it its state: itself, another, or -1 for none.
    `origin` says whence it is, -1 being a copy, the checkpoint or the seed; `origin_node` is the
    peer's, or the copy's. `taken`: from each peer how much. Times in seconds.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    kept: tuple[int, ...]
    todo: tuple[int, ...]
    dealt: tuple[int, ...]
    source: int
    received_bytes: int
    down_s: float
    up_s: float
    settle_s: float
    origin: Origin = ""
    origin_node: str = ""
    taken: tuple[Taken, ...] = ()


class ReconfigureFailed(Body, frozen=True):
    """The new communicators did not come up; the rank holds its state, in no generation."""

    task: int
    rank: int
    attempt: int
    generation: int
    error: str


class TaskProgressed(Body, frozen=True):
    """Finished iterations, told by the first member at most every second, and at once after Resume.

    `losses[i]` and `step_s[i]` belong to iteration `first_iteration + i`.
    """

    task: int
    generation: int
    first_iteration: int
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    rate_flops: float
    """Achieved aggregate FLOP/s over these iterations."""
    micro_batches: int
    """Micro-batches in each optimizer step: the global batch, never changed."""
    skipped: int = 0
    """Of all iterations until now, those that took no step: their gradient was not finite."""


class LossNotFinite(Body, frozen=True):
    """A NaN or infinite loss, as text, since a record holds finite floats only."""

    task: int
    generation: int
    iteration: int
    text: str


class CopyKept(Body, frozen=True):
    """The keeper of `node` holds, whole, a copy of this rank's state after `step_version` steps.

    Told at most every 10 s, the newest. `checksum` names how it was made: `crc32:` and 8 hex
    digits over all `copy_bytes`. The copy ends with the keeper's process, whose number is
    `keeper_start`.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    node: str
    copy_bytes: int
    checksum: str
    keeper_start: int = 0


class CheckpointSaved(Body, frozen=True):
    """A checkpoint lies, complete, at `path`; nobody may read it before it is published."""

    task: int
    generation: int
    step_version: int
    path: str
    ckpt_bytes: int
    final: bool


class CheckpointPublished(Body, frozen=True):
    """An agent moved the task's `latest` link to what the order named."""

    task: int
    order: int
    path: str


class RankFinished(Body, frozen=True):
    """The rank did all iterations and ends with exit code 0."""

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    forward_calls: int
