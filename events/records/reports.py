"""What happened: the bodies of reports, past participles, frozen."""

from __future__ import annotations

from typing import Literal

from ..spec.job import JobSpec
from ..spec.model import Modelled
from ..spec.policy import Policy
from .types import Body, FaultKind, Labels, Origin, Taken


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


class NodeUnreachable(Body, frozen=True):
    """No heartbeat of this incarnation for `silence_s`."""

    node: str
    incarnation: int
    silence_s: float


class NodeReachable(Body, frozen=True):
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


class MemoryCheckpointsLost(Body, frozen=True):
    """The node's keeper has no copies of the task any more; `task` 0: of none, it has ended.

    `keeper_start` is its number: what later ones of the node have is not meant. `order` is the
    DropMemoryCheckpoints that was carried out (0: none was).
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


class Reconfigured(Body, frozen=True, rename={
        "kept_micro_batches": "kept", "remaining_micro_batches": "todo",
        "reassigned_micro_batches": "dealt", "received_from": "taken"}):
    """The rank is in generation `generation`, has settled with its peers, and holds.

    Of iteration `step_version`: `kept_micro_batches` are whole in its own sum, it will run
    `remaining_micro_batches`, and `reassigned_micro_batches` are the part of these that belonged
    to a rank that is gone. `source` is the rank that gave it its state: itself, another, or -1 for
    none. `origin` says whence it is, -1 being a copy, the checkpoint or the seed; `origin_node` is
    the peer's, or the copy's. `received_from`: from each peer how much. Times in seconds.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    step_version: int
    kept_micro_batches: tuple[int, ...]
    remaining_micro_batches: tuple[int, ...]
    reassigned_micro_batches: tuple[int, ...]
    source: int
    received_bytes: int
    down_s: float
    up_s: float
    settle_s: float
    origin: Origin = ""
    origin_node: str = ""
    received_from: tuple[Taken, ...] = ()


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


class MemoryCheckpointStored(Body, frozen=True):
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


# --- What detection tells of nodes, and of ranks that go on living: bodies of reports, frozen. ---
#
# `status` is a row of the paper's table (events/records/statuses.py), "" where no row is meant;
# `rule` names what matched, so that a person can look it up.

CheckHealth = Literal["healthy", "degraded", "unhealthy", "unknown"]
"""What a check says, in the order of the exit codes 0 to 3 of a check command."""
Whereabouts = Literal["own", "collective"]
"""What a rank is in: work of its own, or a collective, where it waits for others."""


# --- said by a rank ---------------------------------------------------------------------------
class InMemoryRecoveryDeclined(Body, frozen=True):
    """The loop that a command runs cannot heal in memory: the task is a command as any other, and
    this process trains on, or ends, as one."""

    task: int
    rank: int
    attempt: int
    why: str


# --- said by an agent about its node ------------------------------------------------------------
class HealthChanged(Body, frozen=True):
    """A check of the node says something else than before; the first "healthy" is not told.

    `check` is its name ("gpu", "memory", "check/NAME" of a site's own). `devices` are the slots
    that it is about; empty: the whole node.
    """

    node: str
    incarnation: int
    check: str
    health: CheckHealth
    why: str
    devices: tuple[int, ...] = ()
    status: str = ""
    rule: str = ""


class DeviceErred(Body, frozen=True):
    """The kernel or a driver told of an error: evidence, once for each burst of equal ones.

    `devices` are the slots whose GPU it names; empty: the whole node, or nobody knows. `code` is
    the XID (0: it is none), `pid` the process that it names (0: none).
    """

    node: str
    incarnation: int
    origin: Literal["kernel", "nvml", "network"]
    status: str
    rule: str
    text: str
    devices: tuple[int, ...] = ()
    code: int = 0
    pid: int = 0


# --- said by an agent about a rank --------------------------------------------------------------
class RankStalled(Body, frozen=True):
    """The rank has passed no mark for more than three times its average iteration.

    First, evaluation, checkpoint and reconfiguration do not count. Each rank of a task that stands
    is told of by itself, so that they can be compared. `collective` is how many collectives of this
    iteration it has entered, the one that it is in included; `what` names the mark passed last;
    `stack` where its code stands, where that could be read.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    where: Whereabouts
    what: str
    collective: int
    in_s: float
    """For so long it has passed no mark."""
    normal_s: float
    """The running average of an iteration."""
    stack: str = ""


class RankUnstalled(Body, frozen=True):
    """A stalled rank passed a mark again."""

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    stalled_s: float


class StepTimeChanged(Body, frozen=True):
    """How fast the rank works: told when it is first known, and when it has changed for good.

    Medians over the last `num_iterations`. `own_s` is what its own work of an iteration takes,
    without waiting for others in collectives; `normal_s` what that took when it was first known.
    `num_iterations` 1: of one that has not ended and lasts too long by the rank's own work, though
    that passes marks; told again whenever it has lasted twice as long.
    """

    task: int
    rank: int
    attempt: int
    generation: int
    iteration: int
    num_iterations: int
    iteration_s: float
    own_s: float
    normal_s: float


# --- said by an operator ------------------------------------------------------------------------
class QuarantineLifted(Body, frozen=True):
    """The node may have tasks again, and what it did before counts no more."""

    node: str
    reason: str = ""


# --- What a command's own log told: the body of a report, frozen. ---


class IterationsLogged(Body, frozen=True):
    """A command printed Megatron-LM's line of progress; told by the agent that reads its log.

    At most every second, the lines of one process joined. Only the rank that prints them tells.
    """

    task: int
    rank: int
    attempt: int
    iteration: int
    """Iterations finished, as printed: the command counts, also what it read from a checkpoint."""
    iterations: int
    """How many there are to be; 0: not known."""
    num_iterations: int
    """Iterations of which `step_s` is the mean; 0: not known, or it is of a process warming up."""
    step_s: float
    loss: float | None = None
    """None: not printed, or not finite."""
    global_batch: int = 0
    """In samples; 0: not printed."""
    skipped: int = 0
    """Of the iterations since the last report, those that took no step; so for `nan`."""
    nan: int = 0
