"""The bodies of reports: what happened (past participles)."""

from typing import Literal

from msgspec import field

from ..spec.job import JobSpec
from ..spec.model import Modelled
from ..spec.policy import Policy
from .types import (
    Body,
    FaultKind,
    GroupProgress,
    Labels,
    LetterAct,
    OperatorRequest,
    Origin,
    RankReport,
    ReceivedState,
    SaveKind,
    TokenAct,
)


# --- sent by the leader -------------------------------------------------------------------------
class EpochStarted(Body, frozen=True):
    """A leader took the log. Every deadline and lease restarts with its full length. `durability`
    and `replicas_min` are the policy's."""

    nonce: str
    code: str
    heart: int
    durability: str = ""
    replicas_min: int = 0


class OutageEnded(Body, frozen=True):
    """`what` was away for `length_s`. Without effect on any decision. `leader`: another control
    plane took over. `num_reports` waited meanwhile, and told of `num_iterations` finished
    iterations; the record is written when they are in the log. `lost_from` to `lost_to`: records
    of an earlier epoch that the log's server had and has no more; others have these numbers now.
    """

    what: Literal["control plane", "leader", "server"]
    since_s: float
    length_s: float
    num_reports: int = 0
    num_iterations: int = 0
    why: str = ""
    lost_from: int = 0
    lost_to: int = 0


class RoomChanged(Body, frozen=True):
    """The disk of the log is nearly full, or has room again."""

    is_full: bool
    """Nearly: from now on no process of a rank is started."""
    folder: str
    """The folder of the log's server."""
    free_bytes: int
    """Free room there."""
    free_files: int | None = None
    """How many files can still be made there; None: enough."""


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
    """A heartbeat of an unreachable incarnation arrived again."""

    node: str
    incarnation: int


# --- sent by an operator ------------------------------------------------------------------------
class TaskSubmitted(OperatorRequest, frozen=True):
    """The seq of this record is the task's id. `modelled`: T(t, x) of the spec's `model`."""

    spec: JobSpec
    modelled: Modelled | None = None


class TaskCancelRequested(OperatorRequest, frozen=True):
    task: int
    reason: str = ""


class TaskWeightSet(OperatorRequest, frozen=True):
    """The task's weight from now on; the spec keeps the submitted one."""

    task: int
    weight: float
    reason: str = ""


class TaskOutputSet(OperatorRequest, frozen=True):
    """The task's checkpoints go to `output`, a folder or a URL, from its next generation on."""

    task: int
    output: str
    reason: str = ""
    """Why, as the operator says."""


class HealingFrozen(OperatorRequest, frozen=True):
    """From now on Unicron sends orders only on request; transitions in progress are completed."""

    reason: str


class HealingResumed(OperatorRequest, frozen=True):
    """Unicron acts again, first on the faults since HealingFrozen."""

    reason: str = ""


AGENT_STOPS = "its agent was told to stop"
"""The reason of a NodeDrained that ends when the node's next agent joins."""


class NodeDrained(OperatorRequest, frozen=True):
    """Tasks must leave the node. It gets no task until NodeUndrained, even if it joins again."""

    node: str
    reason: str = ""
    down: bool = False
    """The scheduler, or an operator, says that its machine is off: if it is also unreachable, its
    processes count as lost."""


class NodeUndrained(OperatorRequest, frozen=True):
    """The node may have tasks again."""

    node: str
    reason: str = ""


class FaultRequested(OperatorRequest, frozen=True):
    """Inject a fault into `rank` of `task`, or into `node`. -1 or "": not used."""

    what: FaultKind
    task: int = 0
    rank: int = -1
    node: str = ""
    stop_s: float = 0.0
    """How long a stopped rank stays stopped; 0: without limit."""
    reason: str = ""


class TokenChanged(OperatorRequest, frozen=True):
    """A token, or the identity of a node (`token_role` is `node`), has changed. Without effect on
    any decision."""

    act: TokenAct
    name: str
    token_role: str
    reason: str = ""


class DeadLettersHandled(OperatorRequest, frozen=True):
    """An operator has removed dead letters, or sent one to the intake again (`act`), for `reason`.
    `numbers`: the first of `num`, at most 100. Without effect on any decision."""

    act: LetterAct
    num: int
    numbers: tuple[int, ...]
    reason: str = ""


# --- sent by an agent about its node ------------------------------------------------------------
class NodeJoined(Body, frozen=True):
    """An agent started. Processes of older incarnations of this node are dead.

    `incarnation` is the start time of the agent in ms since 1970; the newest wins. `host` is the
    address of its ranks, `keeper` the endpoint of its checkpoint store ("": it has none), which may
    take `copies_bytes_max` bytes (0: not known). `labels` are the labels that the agent was started
    with. `boot_id` is the kernel's, another after each boot ("": not known). `order_format`: which
    orders the agent reads (order_format.py; 0: those of release 0.3.0). `unlimited`: what the
    policy limits of a rank, `pids` and `memory`, and this agent cannot limit. `probe_port`: the UDP
    port at which the node answers probes (ProbeNode; 0: at none).
    """

    node: str
    incarnation: int
    host: str
    pid: int
    num_slots: int
    accelerator: str = "cpu"
    keeper: str = ""
    labels: Labels = Labels()
    copies_bytes_max: int = 0
    boot_id: str = ""
    order_format: int = 0
    unlimited: tuple[str, ...] = ()
    probe_port: int = 0


class NodeProbed(Body, frozen=True):
    """The agent of `node` has probed `target` (`target_incarnation`) for `order` of `epoch`: it got
    `proof`, in hex digits ("": none came). `reached`: the proof is that of the target; the leader
    has verified it, and writes this field itself."""

    node: str
    incarnation: int
    target: str
    target_incarnation: int
    order: int
    epoch: int
    proof: str = ""
    reached: bool = False
    error: str = ""
    """Why the probe was not made, "": it was."""


class AgentRestarting(Body, frozen=True):
    """An agent ends, and leaves its processes to the next one, which is due within `back_s`. The
    node is not unreachable before."""

    node: str
    incarnation: int
    back_s: float


class AgentRestarted(Body, frozen=True):
    """A new agent continues the incarnation: it has adopted the processes of the former one.
    `order_format` and `unlimited` as in NodeJoined."""

    node: str
    incarnation: int
    pid: int
    order_format: int = 0
    unlimited: tuple[str, ...] = ()


class NodeLeft(Body, frozen=True):
    """An agent stopped on request together with its ranks; not a fault."""

    node: str
    incarnation: int
    reason: str


class MemoryCheckpointsLost(Body, frozen=True):
    """The node's checkpoint store has no in-memory checkpoints of the task any more. `task` 0: it
    has none of any task, because the store has exited.

    `keeper_start` is the number of the store; later stores of the node are not affected. `order` is
    the seq of the DropMemoryCheckpoints that was carried out (0: none).
    """

    node: str
    incarnation: int
    task: int
    why: str
    keeper_start: int = 0
    order: int = 0


class ReportsLost(Body, frozen=True):
    """`num_lost` reports are lost: the agent's spool overflowed, or the log's server lost them."""

    node: str
    num_lost: int


class OrderRefused(Body, frozen=True):
    """An agent refused or failed to carry out the order `order` (a seq)."""

    node: str
    order: int
    why: str
    errno: str = ""
    """The name of the operating system's error, such as ENOSPC, if it was one; of a StartRank, only
    of what the machine lacks: then the task is not at fault."""
    task: int = 0
    """The task whose checkpoint was not published; 0: it was another order."""


# --- sent by an agent or a rank about a rank ----------------------------------------------------
class RankStarted(RankReport, frozen=True):
    """The process runs. Its output is in `log_path` on the node."""

    node: str
    pid: int
    log_path: str


class RankAdopted(RankReport, frozen=True):
    """The process of a command has adopted Unicron: it prepares, for however long, and then reports
    RankReady or that it declines."""


class RankReady(RankReport, frozen=True):
    """Model and data are ready, communicators are not. `endpoint`: the rank's store, host:port.
    `rounding_why`: why the task's `reproducible: bitwise` cannot be kept; empty: it is. `protocol`:
    how the members of a generation speak with each other; those of one generation have the same."""

    endpoint: str
    num_params: int
    state_bytes: int
    iteration_flops: float
    data_digest: str
    rounding_why: str = ""
    protocol: int = 0


class RankErrored(RankReport, frozen=True):
    """An exception in the rank, reported before the process exits."""

    generation: int
    iteration: int
    error: str
    text: str
    status: str = ""
    """The status (events/records/statuses.py) of `text` ("": unknown)."""
    rule: str = ""
    second_hand: bool = False
    """Indirect evidence: the error is about another process ("closed by peer")."""
    can_pass: bool = False
    """Whether such a fault can end by itself within minutes: of names, connections, the network,
    storage or a remote service."""
    peer: str = ""
    """The peer that the error names, as host:port or host; "": none."""


class RankExited(RankReport, frozen=True):
    """The process has exited. Exactly one of exit_code, signal is set.

    The slot is free when all child processes of the rank have exited too. A training rank that
    exited on its own is reported at once. Any other rank is reported when the slot is free, or
    after a timeout.
    """

    pid: int
    exit_code: int | None
    signal: int | None
    tail: str = ""
    """The last lines of the process's output, with secrets redacted (Policy.redact). Empty where
    they explain nothing: after exit code 0, or after the signal that was ordered."""
    status: str = ""
    """The status of the failure, from `cause`; "": unknown."""
    rule: str = ""
    cause: str = ""
    """The line that states the cause: from stderr, torch's error file or the OOM killer."""
    second_hand: bool = False
    can_pass: bool = False
    """As in RankErrored."""
    peer: str = ""
    """As in RankErrored."""


class RankReportsDropped(RankReport, frozen=True):
    """The rank sent reports faster than its agent takes them: `num_dropped` were dropped, of these
    kinds. The agent sums up for some seconds."""

    num_dropped: int
    kinds: tuple[str, ...]


class RankSuspended(RankReport, frozen=True):
    """The process was found stopped (SIGSTOP, a shell's Ctrl-Z)."""

    pid: int


class RankContinued(RankReport, frozen=True):
    """A suspended process runs again (SIGCONT)."""

    pid: int


class CollectiveFailed(RankReport, frozen=True):
    """A collective failed in this rank: indirect evidence. The rank keeps its state."""

    generation: int
    iteration: int
    error: str
    status: str = ""
    rule: str = ""
    peer: str = ""  # the peer that the error names, as host:port


class Quiesced(RankReport, frozen=True):
    """The rank left generation `generation` and is paused.

    `step_version` is the number of iterations in its state. `micro_batches` are the micro-batches
    of iteration `step_version` whose gradients are complete in its accumulated local gradient.
    """

    generation: int
    step_version: int
    micro_batches: tuple[int, ...]
    buckets_reduced: int
    num_buckets: int


class Reconfigured(
    RankReport,
    frozen=True,
    rename={
        "kept_micro_batches": "kept",
        "remaining_micro_batches": "todo",
        "reassigned_micro_batches": "dealt",
        "received_from": "taken",
    },
):
    """The rank is in generation `generation`, has settled with its peers, and is paused.

    In iteration `step_version`, `kept_micro_batches` are complete in the rank's local gradient. The
    rank will run `remaining_micro_batches`; `reassigned_micro_batches` of them belonged to a lost
    rank. `source` is the rank that the state comes from: itself, another, or -1 for an in-memory
    checkpoint, the checkpoint or the seed (`origin`). `origin_node` is the node of the peer or of
    the in-memory checkpoint. `received_from`: bytes from each peer. Times in seconds.
    """

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
    received_from: tuple[ReceivedState, ...] = ()
    damaged: str = ""
    """Why newer checkpoints on disk were not read."""
    built_s: dict[str, float] = field(default_factory=dict[str, float])
    """Of the first member: the seconds in which each communicator was built, by its first role."""
    mirrored_params: int = 0
    """The parameters in the optimizer shard of another rank that this one steps too."""
    mirrored_bytes: int = 0
    """The bytes of that shard: its masters and moments."""


class ReconfigureFailed(RankReport, frozen=True):
    """New communicators could not be built. The rank keeps its state and is in no generation."""

    generation: int
    error: str


class TaskProgressed(Body, frozen=True):
    """Finished iterations, reported by the first member: after Resume, then at most every second.

    `losses[i]` and `step_s[i]` belong to iteration `first_iteration + i`. `losses` is empty if none
    of these losses is finite: LossNotFinite began the series. `digests`: of the state with which an
    iteration began, by iteration; 16 hex digits.
    """

    task: int
    generation: int
    first_iteration: int
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    rate_flops: float
    """Achieved aggregate FLOP/s over these iterations."""
    micro_batches: int
    """Micro-batches in each optimizer step: always the whole global batch."""
    skipped: int = 0
    """Iterations so far that took no step because loss or gradient were not finite."""
    digests: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def end(self) -> int:
        """The first iteration after the reported ones."""
        return self.first_iteration + (len(self.losses) or len(self.step_s))


class LossNotFinite(Body, frozen=True):
    """The loss is NaN or infinite from `iteration` on. Up to decider version 23 there is one for
    each such iteration; since then TaskProgressed without losses follows, until LossFiniteAgain."""

    task: int
    generation: int
    iteration: int
    text: str
    """The loss, as text, because records hold only finite floats."""
    is_saving: bool = False
    """Whether the state with which `iteration` began is being saved, as a checkpoint."""


class LossFiniteAgain(Body, frozen=True):
    """The loss is finite from `iteration` on, after `num` iterations in which it was not."""

    task: int
    generation: int
    iteration: int
    num: int


class MemoryCheckpointStored(RankReport, frozen=True):
    """The checkpoint store of `node` holds a complete share of the state at `step_version`.

    `share` is the share's number, from 0, of `num_shares`. The first share of a generation, and the
    first in a new store, are reported at once, further ones at most once a minute. `checksum` is
    `crc32:` and 8 hex digits over the share's list of pieces and their checksums. The share is lost
    when the store process with number `keeper_start` ends.
    """

    generation: int
    step_version: int
    node: str
    copy_bytes: int
    checksum: str
    keeper_start: int = 0
    share: int = 0
    num_shares: int = 1


class CheckpointSaved(Body, frozen=True):
    """A checkpoint is complete at `path`; it must not be read before it is published."""

    task: int
    generation: int
    step_version: int
    path: str
    ckpt_bytes: int
    final: bool
    loss: str = ""
    """The loss of its last iteration, if its state is not finite: it is not to be published."""
    output: str = ""
    """The folder that `path` is relative to; empty: that of the task's spec."""


class CheckpointFailed(RankReport, frozen=True):
    """The rank could not save the state at `step_version`. It is reported when saves begin to fail
    and when the reason changes; the task trains on, and a final save is tried again.

    `path` is the folder, or the node of a checkpoint store. `why` is empty if saves that are not
    published work again.
    """

    generation: int
    step_version: int
    what: SaveKind
    """What could not be saved."""
    path: str
    why: str
    errno: str = ""
    """As in OrderRefused."""
    final: bool = False
    """It is the state after the last iteration: the processes keep it until it is saved."""


class CheckpointPublished(Body, frozen=True):
    """An agent moved the task's `latest` link to the path of the order."""

    task: int
    order: int
    path: str


class RankFinished(RankReport, frozen=True):
    """The rank has finished all iterations and exits with code 0."""

    generation: int
    step_version: int
    forward_calls: int


# --- Detection: faults of nodes, and of ranks that keep running ---
#
# `status` is a row of the paper's table (events/records/statuses.py), "" for no row; `rule` is the
# name of the rule that matched.

CheckHealth = Literal["healthy", "degraded", "unhealthy", "unknown"]
"""Result of a check, in the order of the exit codes 0 to 3 of a check command."""
Whereabouts = Literal["own", "collective"]
"""Where a rank is: in its own work, or in a collective."""


# --- sent by a rank ---------------------------------------------------------------------------
class InMemoryRecoveryDeclined(RankReport, frozen=True):
    """The loop of a command cannot recover in memory. From now on the task is handled as any other
    command. This process continues to train, or exits, as that of a plain command.

    `from_memory`: the processes store their state in memory. After a fault they start again from
    it, if their number is the same.
    """

    why: str
    from_memory: bool = False


# --- sent by an agent about its node ------------------------------------------------------------
class HealthChanged(Body, frozen=True):
    """The result of a node check has changed; an initial "healthy" is not reported.

    `check` is the name of the check ("gpu", "memory"; "check/NAME" for a custom check). `devices`
    are the affected slots; empty: the whole node.
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
    """The kernel or a driver logged an error: evidence, one report per burst of equal errors.

    `devices` are the slots of the GPUs that the error names; empty: the whole node, or unknown.
    `code` is the XID (0: none), `pid` the process that the error names (0: none).
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


# --- sent by an agent about a rank --------------------------------------------------------------
class RankStalled(RankReport, frozen=True):
    """The rank has passed no progress mark for more than three times its average iteration.

    Each rank of a stalled task is reported, so that the ranks can be compared. `collective` counts
    the collectives that the rank has entered in this iteration, including the current one. `what`
    names the last mark, and `stack` is the rank's current stack, if it could be read. First
    iterations, evaluations and what else lies between two iterations have other limits.
    """

    generation: int
    iteration: int
    where: Whereabouts
    what: str
    collective: int
    in_s: float
    """Time since the last mark."""
    normal_s: float
    """The running average of an iteration; in an evaluation: its longest so far; 0: unknown."""
    stack: str = ""
    silent_peers: tuple[str, ...] = ()
    """Addresses that do not acknowledge what the rank has sent."""
    groups: tuple[GroupProgress, ...] = ()
    """What the rank has entered in each of its groups."""
    are_groups_complete: bool = False
    """Whether `groups` has every group in which the rank has entered something."""
    waits: bool = False
    """Whether it is in a call that waits for the end of an operation of `groups`."""
    is_untimed: bool = False
    """No time of this process says how long that may take: the limit is `first_iteration_s_max`."""


StacksReader = Literal["", "py-spy", "signal"]


class StacksKept(RankReport, frozen=True):
    """What a process did before its agent ended it, because it did not answer in time or hung.

    A file on its node has the Python stacks of all its threads and of its descendants, its last
    collective, and what torch's flight recorder and NCCL said.
    """

    path: str
    """The file, beside the output of the process; "": it could not be written."""
    num_bytes: int
    """Of the file."""
    reader: StacksReader
    """What read the stacks: `py-spy`, `signal` (Python's faulthandler), or "" if none could."""
    stack: str = ""
    """The innermost frames of the thread that works, innermost first, a line each."""
    mark: str = ""
    """What it did by its progress page: iteration, last mark, the last operation of each group; "":
    it has no page."""
    why: str = ""
    """Why there are no stacks, or not of all processes; "": there are."""
    nccl_ras: str = ""
    """Errors and warnings of NCCL's RAS service on its node, of all its jobs; "": none."""
    took_s: float = 0.0
    """How long the process was kept for that."""


class RankUnstalled(RankReport, frozen=True):
    """A stalled rank passed a progress mark again."""

    generation: int
    iteration: int
    stalled_s: float


class RankWorked(RankReport, frozen=True):
    """A rank for which its task waits has moved something, or computes: its time limit begins anew.

    A rank is waited for while it starts, comes up in a generation or leaves one. Its agent says it
    once in a third of the limit at most, and only if that lasts as long.
    """

    generation: int
    """The newest one in which the rank has trained; 0: none."""
    what: str
    """What it does, as in `reads its checkpoint`; "": it does not say."""
    unit: str
    """What `done` counts: `B` for bytes, or a noun in the plural; "": nothing is counted."""
    done: int
    """How much of it is done."""
    total: int
    """Of how much; 0: unknown."""
    moved_bytes: int
    """What the process and its descendants have read and written since they were waited for."""
    idle_s: float
    """How long ago it was last seen to move anything: bytes, or `done`."""
    computes: bool = False
    """It has moved nothing since the last report, and computes. That counts for `silent_s_max`."""
    is_storage: bool = False
    """It reads or writes a checkpoint: its storage may stand still for `storage_s_max`."""


class StepTimeChanged(RankReport, frozen=True):
    """The step time of the rank: reported when first known, and after a lasting change.

    The times are medians over the last `num_iterations`. `own_s` is the rank's own work in an
    iteration, without the wait for others in collectives; `normal_s` is its first known value.
    `num_iterations` 1: an unfinished iteration takes too long because of the rank's own work,
    although the rank passes marks. It is reported again each time its duration has doubled.
    """

    generation: int
    iteration: int
    num_iterations: int
    iteration_s: float
    own_s: float
    normal_s: float


# --- sent by an operator ------------------------------------------------------------------------
class QuarantineLifted(OperatorRequest, frozen=True):
    """The node may have tasks again, and its earlier faults are not counted any more.

    `slots`: disabled slots that are given back; what took them out counts no more. `quarantine`
    False: only these, and a quarantine stays.
    """

    node: str
    reason: str = ""
    slots: tuple[int, ...] = ()
    quarantine: bool = True


class IncidentAcknowledged(OperatorRequest, frozen=True):
    """A person knows of the incident `of`: it is no longer among what needs a person, and no more
    is notified of it. Nothing else changes."""

    of: int
    reason: str = ""


class PersonNotified(OperatorRequest, frozen=True):
    """A message to the webhook has told these (control_plane/api/notifications.py): `opened` needs
    a person, `over` no longer does. Without effect on any decision."""

    opened: tuple[str, ...]
    over: tuple[str, ...] = ()


# --- Progress of commands, from their output ---


class IterationsLogged(RankReport, frozen=True):
    """A command printed Megatron-LM's progress line; reported by the agent that reads its output.

    The agent reports at most once a second and combines the lines of one process. Only the rank
    that prints progress lines causes reports.
    """

    iteration: int
    """Finished iterations as printed, including those of a checkpoint that the command read."""
    iterations: int
    """Total number of iterations; 0: unknown."""
    num_iterations: int
    """Iterations over which `step_s` is the mean; 0: unknown, or the process is warming up."""
    step_s: float
    loss: float | None = None
    """None: not printed, or not finite."""
    global_batch: int = 0
    """In samples; 0: not printed."""
    skipped: int = 0
    """Iterations since the last report that took no step; `nan`: those with a NaN."""
    nan: int = 0
    loss_text: str = ""
    """The loss as printed, if it is NaN or infinite."""
