"""Tasks in the state: ranks, checkpoints, and what was observed of the ranks."""

from typing import Literal

from msgspec import Struct, field

from ...events.records.decisions import PlaceKind, ThroughputSet
from ...events.records.reports import Whereabouts
from ...events.records.types import (
    GroupProgress,
    Member,
    MemoryCheckpoint,
    NodeStores,
    SaveKind,
    Seat,
    Slot,
    StoreEndpoint,
)
from ...events.spec.job import JobSpec
from ...events.spec.model import Axes, Modelled
from .incident import FailureSeries, Fault, Suspect
from .memory_checkpoints import whole_checkpoints


class CommandProgress(Struct, kw_only=True):
    """Progress of a command, from the newest round of processes that logged any."""

    round: int
    rank: int
    """The rank whose log counts: the first of the round that logged progress."""
    first: int
    """The first iteration that this rank logged."""
    iterations: int
    """Planned iterations; 0: unknown."""
    size: int
    """Slots of the round."""
    max_iteration: int
    """The largest iteration before the round; if there was none, the first that it reported."""
    global_batch: int = 0
    """Global batch size, as last logged; 0: never logged."""
    disturbed: bool = False
    """A process of the round was stopped after the last report."""


class OngoingTransition(Struct, kw_only=True):
    """A transition in progress: from one number of slots to another, or back to the same."""

    size: int
    """Members before; 0: the task had no slots."""
    since_s: float
    """When the task last reported an iteration before it stalled; below 0: it steps again."""
    iteration: int
    """Iterations finished at `since_s`."""
    iteration_s: float
    """Undisturbed time of one iteration; 0: unknown."""
    downtime_s: float = 0.0
    """Downtime of earlier stalls in this transition."""
    axes: Axes | None = None
    """The layout before the transition."""
    void: bool = False
    """Healing was paused during the transition, so the downtime is not used as a measurement."""


class Stall(Struct, frozen=True, kw_only=True):
    """A stalled member: reported by RankStalled and not revoked by RankUnstalled."""

    iteration: int
    where: Whereabouts
    what: str
    collective: int
    since_s: float
    """When it passed its last progress mark, by the log's clock. May be late, never early."""
    normal_s: float
    told_s: float
    seq: int
    """The record that reports it."""
    stack: str = ""
    """The innermost stack frame of its process."""
    silent_peers: tuple[str, ...] = ()
    groups: tuple[GroupProgress, ...] = ()
    """What it has entered in each of its groups."""
    are_groups_complete: bool = False
    """Whether `groups` has every group in which it has entered something."""
    waits: bool = False
    """Whether it is in a call that waits for the end of an operation of `groups`."""
    is_untimed: bool = False
    """Whether no usual time says how long that may take."""

    @property
    def position(self) -> tuple[int, int]:
        """Sort key of progress: own work comes after the last collective and before the next."""
        return self.iteration, 2 * self.collective + (self.where == "own")


class Work(Struct, frozen=True, kw_only=True):
    """What a process does for which its task waits, as its agent last told (RankWorked)."""

    generation: int
    what: str
    """As in RankWorked; "": it does not say."""
    unit: str
    """What `done` counts: B for bytes, or a noun in the plural; "": nothing is counted."""
    done: int
    """How much of it is done."""
    total: int
    """Of how much; 0: unknown."""
    moved_bytes: int
    """What the process has read and written since it was waited for."""
    moved_s: float
    """When it last moved anything."""
    computes: bool
    """It has moved nothing since the report before, and computes."""
    is_storage: bool
    """It reads or writes a checkpoint: its storage may stand still for `storage_s_max`."""
    told_s: float
    """When its agent told this."""
    first: int
    """`done` when its agent first told of this work."""
    first_s: float
    """When that was."""

    @property
    def left_s(self) -> float | None:
        """How long the rest takes at its pace so far, from `told_s` on; None: not known."""
        done, span_s = self.done - self.first, self.told_s - self.first_s
        if not self.total or done <= 0 or span_s <= 0:
            return None
        return max(self.total - self.done, 0) * span_s / done


class SlowIteration(Struct, frozen=True, kw_only=True):
    """A member that passes progress marks, but whose iteration does not end (StepTimeChanged)."""

    iteration: int
    own_s: float
    """Own work in the iteration so far, without waiting."""
    normal_s: float
    """Usual own work of an iteration."""
    since_s: float
    """When the iteration began, by the log's clock. May be late, never early."""
    told_s: float
    seq: int


class StepTime(Struct, frozen=True, kw_only=True):
    """The step time of a rank, from its last StepTimeChanged."""

    generation: int
    """0: measured on an earlier process of the rank, as a reference."""
    num_micro_batches: int
    """Micro-batches that the rank ran per iteration when this was measured."""
    iteration_s: float
    own_s: float
    normal_s: float
    normal_num: int
    """Micro-batches per iteration when `normal_s` was first reported."""
    normal_iteration_s: float
    """Shortest iteration time since `normal_s` was first reported."""
    seq: int


class Straggler(Struct, frozen=True, kw_only=True):
    """A straggler: a rank that progresses, but that the other ranks wait for."""

    ratio: float
    """Own work relative to the rank's own past, or to its peers."""
    holds_up: float
    """Iteration time relative to the iteration time without the straggler's delay."""
    since_s: float


class StragglerCost(Struct, frozen=True, kw_only=True):
    """The cost of a degraded node, from its last StragglerCostEstimated."""

    tasks: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_waf: float
    drain_waf: float
    why: str
    now_waf: float
    seq: int
    at_s: float


Phase = Literal["idle", "starting", "training", "quiescing", "reconfiguring", "ended"]
RankState = Literal["ordered", "started", "ready", "member", "finished"]


class HeldState(Struct, frozen=True, kw_only=True):
    """The part of a task's state that a process holds: one position of a generation's layout."""

    generation: int
    axes: Axes
    place: int


class Rank(Struct, kw_only=True):
    """One process of a task, from StartRank to its end."""

    rank: int
    attempt: int
    slot: Slot
    state: RankState = "ordered"
    start_order: int = 0
    ordered_s: float = 0.0
    """When its start was ordered."""
    stop_orders: list[int] = field(default_factory=list[int])
    pid: int = 0
    log_path: str = ""
    endpoint: str = ""
    protocol: int = 0
    """How it speaks with the other members of a generation."""
    quiesced: int = 0
    """The last generation that the process left by Quiesce."""
    step_version: int = -1
    """Step version of its state, as last reported by Quiesced or Reconfigured; -1: none."""
    reconfigured: int = 0
    """The last generation that the process came up in."""
    joined: int = 0
    """The first generation that the process came up in."""
    failed: int = 0
    """The last generation in which a collective or the setup failed in this process."""
    failed_seq: int = 0
    failed_status: str = ""
    failed_peer: str = ""
    """The peer that its failed collective names, as host:port or host; "": none."""
    timeout_reason: str = ""
    """Which deadline the process missed; decide orders it to stop immediately."""
    suspended_s: float = -1.0
    """When the process was stopped (SIGSTOP); below 0: it is not stopped."""
    suspended_seq: int = 0
    """The record that reports it."""
    fault_injected_s: float = -1.0
    """When a fault was injected into the process; below 0: none was."""
    has_state: bool = False
    """It came up in a generation and is no standby member. With layouts: `held` is its part."""
    held: HeldState | None = None
    joined_iteration: int = -1
    work: Work | None = None
    """What it does while its task waits for it; None: nothing that lasts, or no agent tells."""
    error: str = ""
    error_text: str = ""
    error_seq: int = 0
    second_hand: bool = False
    """The error is indirect evidence: it reports the end of another process."""

    @property
    def is_stopped(self) -> bool:
        return self.suspended_seq > 0

    @property
    def stopping(self) -> bool:
        """Whether the process was ordered to stop."""
        return bool(self.stop_orders)

    @property
    def is_healthy(self) -> bool:
        """Whether the process may continue: no stop order, no missed deadline, no error."""
        return not (self.stopping or self.timeout_reason or self.error_seq)


class Checkpoint(Struct, frozen=True, kw_only=True):
    """One checkpoint, saved or published."""

    generation: int
    step_version: int
    path: str
    final: bool
    node: str = ""
    """The node that was ordered to publish it."""
    loss: str = ""
    """The loss of its last iteration, if its state is not finite."""
    output: str = ""
    """The folder that has it, if that is not the task's output any more."""


class FailedSave(Struct, frozen=True, kw_only=True):
    """Saves of one kind fail, and none has worked since."""

    what: Literal[SaveKind, "publication"]
    """What is not saved."""
    since_s: float
    """When the first one failed."""
    seq: int
    """The record of the last failure."""
    generation: int
    step_version: int
    """How many iterations are in the state that was not saved."""
    path: str
    """The folder; of an in-memory checkpoint, the node of its store."""
    rank: int
    """The rank that could not save; -1: an agent could not publish."""
    node: str
    """The node that could not save or publish."""
    why: str
    """The reason in words."""
    errno: str
    """The name of the operating system's error, such as ENOSPC; empty: it was none."""
    final: bool
    """It is the state after the last iteration."""
    order: int
    """The order to save before the task leaves its slots, or to publish; 0: no order asked."""
    num_orders: int
    """How many orders to save, or to publish, failed in a row."""


class RefusedStart(Struct, frozen=True, kw_only=True):
    """The starts of a rank that a node refuses because its machine lacks something."""

    rank: int
    node: str
    since_s: float
    """When the first one in a row was refused."""
    num: int
    """How many in a row were."""
    why: str
    """What the agent said last."""
    errno: str
    """What the machine lacks: the name of the operating system's error, such as ENOSPC."""


class LossSeries(Struct, frozen=True, kw_only=True):
    """Iterations in a row whose loss is not finite."""

    first: int
    """The first of them; of a command, as it prints."""
    num: int
    """How many there are so far."""
    text: str
    """The loss of the first."""
    since_s: float
    """When it was reported, seconds since 1970."""
    is_saving: bool = False
    """Whether the members save the state with which the first began."""


class LossSpike(Struct, frozen=True, kw_only=True):
    """Losses in a row above the band of those before."""

    first: int
    """The first of these iterations."""
    num: int
    """How many there are so far."""
    loss: float
    """The largest of these losses."""
    median: float
    """The median of the losses before."""
    deviation: float
    """The standard deviation of the losses before."""
    seq: int = 0
    """The record that tells of it; 0: it is too short so far."""


class StoredCheckpoint(Struct, frozen=True, kw_only=True):
    """A complete checkpoint on disk that may still be there."""

    path: str
    """Its folder, relative to the output that has it."""
    step_version: int
    """How many iterations are in its state."""
    is_published: bool = False
    """Whether it was published."""
    output: str = ""
    """The folder that has it, if that is not the task's output any more."""


def whole_path(stored: Checkpoint | StoredCheckpoint) -> str:
    """The path of a checkpoint, relative to the task's output if it is there."""
    return f"{stored.output.rstrip('/')}/{stored.path}" if stored.output else stored.path


class Task(Struct, kw_only=True):
    """One task, from TaskSubmitted to TaskEnded."""

    id: int
    spec: JobSpec
    weight: float
    """w(t) of the Unicron paper. The spec's weight, until an operator sets another."""
    submitted_s: float
    since_s: float
    phase: Phase = "idle"
    ending: Literal["", "failed", "cancelled"] = ""
    outcome: str = ""
    why: str = ""
    """Why the task waits, or how it ended."""
    withheld: str = ""
    """The order that is suppressed while healing is paused."""
    target: tuple[Seat, ...] = ()
    throughput: ThroughputSet | None = None
    former_throughput: ThroughputSet | None = None
    """The measured table before `throughput`."""
    modelled: Modelled | None = None
    """T(t, x) by the spec's `model`, computed before the submission."""
    ranks: dict[int, Rank] = field(default_factory=dict[int, Rank])
    orphans: list[Rank] = field(default_factory=list[Rank])
    """Orphaned processes, to be stopped when their node is reachable again."""
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    refused_starts: dict[int, RefusedStart] = field(default_factory=dict[int, RefusedStart])
    """By rank, until a process of it runs."""
    restarts: dict[int, int] = field(default_factory=dict[int, int])
    """By rank: its faults since it last made enough progress (restart_iterations)."""
    failures: FailureSeries | None = None
    """Failures of its own processes, until it has passed its point of failure."""
    suspects: dict[int, Suspect] = field(default_factory=dict[int, Suspect])
    """By rank: the slot that it has left as an experiment, until that is judged."""
    blamed_slots: list[Slot] = field(default_factory=list[Slot])
    """Slots that are out because its processes failed there. They return when it ends."""
    slots_max: int = 0
    """It may have at most so many slots, since ranks beyond fail everywhere; 0: no such limit."""
    reattempts: int = 0
    common_nodes: list[str] = field(default_factory=list[str])
    """The nodes that were members at each fault without a name since it last made progress."""
    common_places: list[tuple[PlaceKind, str]] = field(default_factory=list[tuple[PlaceKind, str]])
    """The same for racks and switches: kind and name."""
    unnamed_s: float = 0.0
    """When the first of these faults was; 0: there is none."""
    declined: str = ""
    """Why its processes cannot recover in memory, although the spec asks for it."""
    adopted: bool = False
    """Whether any process has ever reported that it has adopted Unicron."""
    rounding_why: str = ""
    """Why its sums are rounded, although the spec asks for `reproducible: bitwise`."""
    restarts_from_memory: bool = False
    """Whether they start again from the state that they have stored in memory."""
    rounds: int = 0
    """Of a command: how often all processes were started."""
    generation: int = 0
    members: tuple[Member, ...] = ()
    member_nodes: list[str] = field(default_factory=list[str])
    """The nodes of the generation's members, also once it has ended: agents may report late."""
    positions: dict[int, int] = field(default_factory=dict[int, int])
    """By rank: its position among `members`."""
    axes: Axes | None = None
    """The layout of the generation; None: data-parallel over all members."""
    mode: str = ""
    """Mode of the quiesce in progress: now, boundary."""
    uncaused_generation: int = 0
    """The generation in which a collective failed or hung, and no root cause was found in time."""
    failed_s: float = -1.0
    """When a collective of this generation first failed; below 0: none did."""
    stepped: int = 0
    """The last generation that finished an iteration."""
    settled: int = 0
    """The step version that the last generation continues from."""
    mirrored_params: int = 0
    """The parameters in the optimizer shard that its first member steps for another; 0: none."""
    mirrored_bytes: int = 0
    """The bytes of that shard."""
    finished: list[int] = field(default_factory=list[int])
    num_outstanding: int = 0
    """Outstanding answers to orders (members.py, `outstanding`)."""
    quiesce_order: int = 0
    reconfigure_order: int = 0
    reconfigure_checkpoint: str = ""
    """The checkpoint that the last Reconfigure order names."""
    resume_order: int = 0
    savers: list[int] = field(default_factory=list[int])
    """The ranks ordered to save a checkpoint on preemption, each its share."""
    save_late: int = 0
    """The generation whose checkpoint on preemption was not saved in time."""
    saved: Checkpoint | None = None
    """A complete checkpoint whose publication is not ordered yet."""
    publishing: dict[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])
    """By seq of the publish order: checkpoints whose publication is not confirmed."""
    checkpoint: Checkpoint | None = None
    unpublished: Checkpoint | None = None
    """A later complete checkpoint that is not to be published, because its state is not finite."""
    stored: list[StoredCheckpoint] = field(default_factory=list[StoredCheckpoint])
    """In the order in which they were reported complete; those that may go are named in several
    orders, and then forgotten."""
    damaged: str = ""
    """Why the newest published checkpoints were not read, until a later one is published."""
    refused: Checkpoint | None = None
    """A complete checkpoint whose publication failed; it is ordered again after a pause."""
    failed_saves: dict[str, FailedSave] = field(default_factory=dict[str, FailedSave])
    """By what is not saved (`FailedSave.what`)."""
    moved_in: int = -1
    """The generation in which an operator moved the output; the next one saves there. -1: never."""
    keepers: tuple[StoreEndpoint, ...] = ()
    """The checkpoint stores that receive its in-memory checkpoints."""
    stores: tuple[NodeStores, ...] = ()
    """By node of members: which of `keepers` receive their shares. Empty: all."""
    keep_order: int = 0
    copies: list[MemoryCheckpoint] = field(default_factory=list[MemoryCheckpoint])
    """Shares of in-memory checkpoints: the two newest of each node and share, ascending."""
    store_nodes: list[str] = field(default_factory=list[str])
    """Nodes whose stores may hold in-memory checkpoints of the task."""
    drop_order: int = 0
    """The open DropMemoryCheckpoints, until all nodes answered."""
    iteration: int = 0
    """Iterations reported as finished."""
    logged: CommandProgress | None = None
    max_iteration: int = 0
    """The maximum of `iteration`: iterations that are done again do not count as progress."""
    progressed_s: float = 0.0
    """When it last reported an iteration; 0: never."""
    iteration_flops: float = 0.0
    times_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """By number of members (of a command: slots): times of the last undisturbed iterations."""
    transition: OngoingTransition | None = None
    """The transition in progress."""
    downtime_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By kind of change: the last downtimes."""
    loss: float | None = None
    not_finite: LossSeries | None = None
    """The losses up to now, if they are not finite."""
    losses: list[float] = field(default_factory=list[float])
    """The last losses, without those of spikes: the band with which the next is compared."""
    spike: LossSpike | None = None
    """The losses up to now, if they are above the band."""
    step_s: float = 0.0
    rate_flops: float = 0.0
    micro_batches: int = 0
    forward_calls: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])
    stalls: dict[int, Stall] = field(default_factory=dict[int, Stall])
    """By rank: stalled members of this generation."""
    slow_iterations: dict[int, SlowIteration] = field(default_factory=dict[int, SlowIteration])
    """By rank: members of this generation in a slow iteration."""
    step_times: dict[int, StepTime] = field(default_factory=dict[int, StepTime])
    slow: dict[int, Straggler] = field(default_factory=dict[int, Straggler])
    """By rank: the stragglers."""
    slow_restarts: dict[str, int] = field(default_factory=dict[str, int])
    """By slot (node/index): restarts of stragglers there."""
    incident: int = 0
    recovering: list[int] = field(default_factory=list[int])
    """Its incidents that are recovering: the task is whole, and `incident` is another one or 0."""
    healed: int = 0
    iterations_lost: int = 0

    @property
    def final_known(self) -> bool:
        """Whether a complete final checkpoint is saved or published."""
        ways = (*self.complete_checkpoints, self.unpublished)
        return any(way is not None and way.final for way in ways)

    @property
    def complete_checkpoints(self) -> list[Checkpoint]:
        """Those that are published, or are to be."""
        ways = (self.saved, self.checkpoint, self.refused, *self.publishing.values())
        return [way for way in ways if way is not None]

    @property
    def is_done(self) -> bool:
        """Whether all its iterations are reported."""
        training = self.spec.training
        return training is not None and self.iteration >= training.iterations

    @property
    def holds_final_state(self) -> bool:
        """Whether its last checkpoint could not be saved or published, and its processes, the
        checkpoint stores or files that are not published have that state."""
        if not any(failed.final for failed in self.failed_saves.values()):
            return False
        has_state = not self.heals_in_memory or (
            self.is_done and any(rank.has_state for rank in self.living_members())
        )
        return (
            has_state
            or (self.refused is not None and self.refused.final)
            or self.is_final_state_copied
        )

    @property
    def is_final_state_copied(self) -> bool:
        """Whether its last checkpoint could not be saved, and the checkpoint stores have that
        state."""
        training = self.spec.training
        return (
            training is not None
            and any(failed.final for failed in self.failed_saves.values())
            and any(
                whole.step_version >= training.iterations
                for whole in whole_checkpoints(self.copies)
            )
        )

    @property
    def is_save_repeated(self) -> bool:
        """Whether the save before the task leaves its slots failed, and is to be ordered again."""
        failed = self.failed_saves.get("checkpoint")
        return self.refused is not None or (
            failed is not None and failed.order == self.quiesce_order > 0
        )

    @property
    def output(self) -> str:
        """The folder of its checkpoints; empty: it has none."""
        return self.spec.training.output if self.spec.training is not None else ""

    @property
    def logged_now(self) -> CommandProgress | None:
        """Of a command: the progress that the present round of processes has logged."""
        is_now = self.logged is not None and self.logged.round == self.rounds
        return self.logged if is_now else None

    @property
    def smallest_size(self) -> int:
        """The smallest number of slots on which it makes progress."""
        table = self.throughput
        pairs = zip(table.sizes, table.rates_flops, strict=True) if table is not None else ()
        return min((size for size, rate in pairs if rate > 0), default=self.spec.slots.min)

    @property
    def saved_iteration(self) -> int:
        """Iterations in the published checkpoint; 0 without one."""
        return self.checkpoint.step_version if self.checkpoint is not None else 0

    @property
    def kept_iteration(self) -> int:
        """Iterations in the newest complete checkpoint of this generation or the published one."""
        later = self.unpublished
        if later is None or later.generation != self.generation:
            return self.saved_iteration
        return max(self.saved_iteration, later.step_version)

    @property
    def checkpoint_path(self) -> str:
        """The path of the published checkpoint, relative to the output if it is there; empty
        without one."""
        return whole_path(self.checkpoint) if self.checkpoint is not None else ""

    def lost_with(self, node: str = "") -> int:
        """Iterations that the loss of all processes and of the copies on `node` would cost."""
        copied = [
            whole.step_version
            for whole in whole_checkpoints(copy for copy in self.copies if copy.node != node)
        ]
        return max(self.iteration - max([self.saved_iteration, *copied]), 0)

    @property
    def heals_in_memory(self) -> bool:
        """Whether its processes recover in memory; otherwise all restart together."""
        return self.spec.training is not None and not self.declined

    @property
    def may_adopt(self) -> bool:
        """Whether it is a plain command only because no process has adopted Unicron so far."""
        return bool(self.declined) and not self.adopted

    @property
    def saver(self) -> int:
        """The rank ordered to complete a checkpoint on preemption; -1: none in this generation."""
        return self.savers[0] if self.savers else -1

    def member(self, number: int) -> Rank | None:
        """The running process of this member of the current generation."""
        rank, place = self.ranks.get(number), self.positions.get(number)
        if rank is None or place is None or self.members[place].attempt != rank.attempt:
            return None
        return rank

    def living_members(self) -> list[Rank]:
        """Members of the current generation whose process still runs, in order."""
        get = self.ranks.get
        return [
            rank
            for member in self.members
            if (rank := get(member.rank)) is not None and rank.attempt == member.attempt
        ]

    @property
    def seats_at(self) -> dict[int, Slot]:
        """By rank: the slot that the target assigns."""
        return {seat.rank: seat.slot for seat in self.target}
