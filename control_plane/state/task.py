"""A task as the state holds it: its ranks, its checkpoints, and what was observed of its ranks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from ...events.records.decisions import ThroughputSet
from ...events.records.reports import Whereabouts
from ...events.records.types import Copy, Keeper, Member, Seat, Slot
from ...events.spec.job import JobSpec
from ...events.spec.model import Axes, Modelled
from .incident import Fault, Series


class Logged(Struct, kw_only=True):
    """What a command's own log has told, of its newest round of processes that told anything."""

    round: int
    rank: int
    """Who tells: whoever of the round was first."""
    first: int
    """The iteration that it told first."""
    iterations: int
    """How many there are to be; 0: not known."""
    size: int
    """Slots of the round."""
    furthest: int
    """The most that was done before the round, or when it was first heard of."""
    global_batch: int = 0
    """As last told; 0: not told."""
    disturbed: bool = False
    """A process of it stood still after the last report."""


class Standing(Struct, kw_only=True):
    """A task on its way from one number of slots to another, or back to the same."""

    size: int
    """Members before; 0: it had no slots."""
    since_s: float
    """When it last told of a finished iteration before it stood; below 0: it steps, and waits for
    what is still to come."""
    iteration: int
    """How many were finished then."""
    iteration_s: float
    """What one took, undisturbed; 0: nobody knows."""
    stood_s: float = 0.0
    """In earlier parts of the way."""
    axes: Axes | None = None
    """The layout before."""
    void: bool = False
    """Healing was held meanwhile: it says nothing of what a change costs."""


class Stall(Struct, frozen=True, kw_only=True):
    """A member stands, as RankStalled told and RankUnstalled has not denied."""

    iteration: int
    where: Whereabouts
    what: str
    collective: int
    since_s: float
    """When it passed its last mark, by the log's clock: late rather than early."""
    normal_s: float
    told_s: float
    seq: int
    """What tells so."""
    stack: str = ""
    """What its process does."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it got: work of its own after a collective is beyond it, and before the next."""
        return self.iteration, 2 * self.collective + (self.where == "own")


class Crawl(Struct, frozen=True, kw_only=True):
    """A member passes marks, and yet its iteration does not end: as StepTimeChanged said last."""

    iteration: int
    own_s: float
    """Its own work of it until then, without waiting for others."""
    normal_s: float
    """What its own work usually takes."""
    since_s: float
    """When the iteration began, by the log's clock: late rather than early."""
    told_s: float
    seq: int


class Pace(Struct, frozen=True, kw_only=True):
    """How fast a rank works, as StepTimeChanged told last."""

    generation: int
    """0: of an earlier process, from which is known what the rank can do."""
    num_micro_batches: int
    """Its part of an iteration then."""
    iteration_s: float
    own_s: float
    normal_s: float
    normal_num: int
    """Its part of an iteration when `normal_s` was told first."""
    normal_iteration_s: float
    """What an iteration took then."""
    seq: int


class Slow(Struct, frozen=True, kw_only=True):
    """A rank that keeps others waiting, though all go on."""

    ratio: float
    """Its own work takes so many times what it did, or what that of its peers takes."""
    holds_up: float
    """For it an iteration takes so many times what it would."""
    since_s: float


class Priced(Struct, frozen=True, kw_only=True):
    """What a degraded node costs, as StragglerCostEstimated told last."""

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


class Held(Struct, frozen=True, kw_only=True):
    """Which part of a task's state a process has: that of a place in the layout of a generation."""

    generation: int
    axes: Axes
    place: int


class Rank(Struct, kw_only=True):
    """One process of a task, from its StartRank to its end."""

    rank: int
    attempt: int
    slot: Slot
    state: RankState = "ordered"
    start_order: int = 0
    stop_orders: list[int] = field(default_factory=list[int])
    pid: int = 0
    log_path: str = ""
    endpoint: str = ""
    quiesced: int = 0
    """The last generation that it left in order."""
    step_version: int = -1
    """Optimizer steps that its state had taken then."""
    reconfigured: int = 0
    """The last generation that it came up in."""
    failed: int = 0
    """The last generation in which a collective, or the coming up, failed under it."""
    failed_seq: int = 0
    failed_status: str = ""
    overdue: str = ""
    """What it was too late for; it is to be ended at once."""
    suspended_s: float = -1.0
    """Since when its process is stopped; below 0: it is not."""
    suspended_seq: int = 0
    """What tells so."""
    harmed_s: float = -1.0
    """When somebody asked to break it; below 0: nobody did."""
    has_state: bool = False
    """It has settled in some generation. Of a task that has layouts, `held` says on what."""
    held: Held | None = None
    joined_iteration: int = -1
    error: str = ""
    error_text: str = ""
    error_seq: int = 0
    second_hand: bool = False
    """Its error tells of another's end."""

    @property
    def suspended(self) -> bool:
        """Whether its process stands still, as far as told."""
        return self.suspended_seq > 0

    @property
    def stopping(self) -> bool:
        """Whether it was told to end."""
        return bool(self.stop_orders)

    @property
    def sound(self) -> bool:
        """Whether it is to go on: not told to end, not late, without an error."""
        return not (self.stopping or self.overdue or self.error_seq)


class Checkpoint(Struct, frozen=True, kw_only=True):
    """One checkpoint, on its way to be published or published."""

    generation: int
    step_version: int
    path: str
    final: bool
    node: str = ""
    """Who was ordered to publish it."""


class Task(Struct, kw_only=True):
    """One task, from TaskSubmitted to TaskEnded."""

    id: int
    spec: JobSpec
    weight: float
    """w(t) of the paper; the spec's until an operator sets another."""
    submitted_s: float
    since_s: float
    phase: Phase = "idle"
    ending: Literal["", "failed", "cancelled"] = ""
    outcome: str = ""
    why: str = ""
    """Why it waits, or how it ended."""
    withheld: str = ""
    """What would be ordered now, were healing on."""
    target: tuple[Seat, ...] = ()
    throughput: ThroughputSet | None = None
    modelled: Modelled | None = None
    """T(t, x) of what its spec's `model` describes, as it was found before it was submitted."""
    ranks: dict[int, Rank] = field(default_factory=dict[int, Rank])
    ghosts: list[Rank] = field(default_factory=list[Rank])
    """Processes given up that nobody has reaped yet; stopped when they are reached again."""
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    restarts: dict[int, int] = field(default_factory=dict[int, int])
    """Faults of a rank since it last made progress."""
    blamed: dict[int, Slot] = field(default_factory=dict[int, Slot])
    """By rank: the slot taken out for its faults. Progress on another one proves it right."""
    series: Series | None = None
    reattempts: int = 0
    declined: str = ""
    """Why its processes cannot heal in memory, although its spec asks for that."""
    rounds: int = 0
    """Command tier: how often all were started."""
    generation: int = 0
    members: tuple[Member, ...] = ()
    axes: Axes | None = None
    """The layout of the generation; None: data-parallel, with all members."""
    mode: str = ""
    """Of the quiesce that is going on: now, boundary."""
    evidence_over: int = 0
    """The generation whose failed collective found no root cause in time."""
    failed_s: float = -1.0
    """When a collective of this generation first failed."""
    stepped: int = 0
    """The last generation that finished an iteration."""
    settled: int = 0
    """The step version that the last generation settled on."""
    finished: list[int] = field(default_factory=list[int])
    num_outstanding: int = 0
    """Answers to orders that the task waits for (answers.py, `outstanding`)."""
    quiesce_order: int = 0
    reconfigure_order: int = 0
    resume_order: int = 0
    saver: int = -1
    """The rank that was told to save before the task leaves; -1: none in this generation."""
    save_late: int = 0
    """The generation whose last state was not saved in time."""
    saved: Checkpoint | None = None
    """Complete, not yet ordered to be published."""
    publishing: dict[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])
    """By the seq of the order."""
    checkpoint: Checkpoint | None = None
    keepers: tuple[Keeper, ...] = ()
    """Who takes copies of its state now."""
    keep_order: int = 0
    copies: list[Copy] = field(default_factory=list[Copy])
    """What keepers hold of it, as told: the two newest of each node, the newest last."""
    kept_on: list[str] = field(default_factory=list[str])
    """Nodes whose keepers may hold something of it."""
    drop_order: int = 0
    """DropMemoryCheckpoints, while one of them has not answered."""
    iteration: int = 0
    """Iterations told as finished."""
    logged: Logged | None = None
    furthest: int = 0
    """The most that `iteration` ever was: what is done again is no progress."""
    progressed_s: float = 0.0
    """When it last told of a finished iteration; 0: never."""
    iteration_flops: float = 0.0
    times_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """By number of members, of a command by slots: what the last undisturbed iterations took."""
    standing: Standing | None = None
    """The change that it is in."""
    stood_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By kind of change: for how long it stood the last times."""
    loss: float | None = None
    step_s: float = 0.0
    rate_flops: float = 0.0
    micro_batches: int = 0
    forward_calls: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])
    stalls: dict[int, Stall] = field(default_factory=dict[int, Stall])
    """By rank: members of this generation that stand, as told."""
    crawls: dict[int, Crawl] = field(default_factory=dict[int, Crawl])
    """By rank: members of this generation whose one iteration lasts too long by their own work."""
    paces: dict[int, Pace] = field(default_factory=dict[int, Pace])
    slow: dict[int, Slow] = field(default_factory=dict[int, Slow])
    """By rank: those that hold up the others."""
    slowed: dict[str, int] = field(default_factory=dict[str, int])
    """By slot (node/index): how often what ran there was started again for being slow."""
    incident: int = 0
    healed: int = 0
    iterations_lost: int = 0

    @property
    def final_known(self) -> bool:
        """Whether a complete final checkpoint is published or on its way."""
        ways = [self.saved, self.checkpoint, *self.publishing.values()]
        return any(way is not None and way.final for way in ways)

    @property
    def saved_iteration(self) -> int:
        """Iterations in the published checkpoint; 0 without one."""
        return self.checkpoint.step_version if self.checkpoint is not None else 0

    @property
    def unsaved(self) -> int:
        """Iterations that would be lost with all its processes, as far as told."""
        return self.lost_with("")

    def lost_with(self, node: str) -> int:
        """Iterations that would be lost with all its processes and with this node's copies."""
        copied = [copy.step_version for copy in self.copies if copy.node != node]
        return max(self.iteration - max([self.saved_iteration, *copied]), 0)

    @property
    def heals_in_memory(self) -> bool:
        """Whether its processes are generations' members; else they all start again together."""
        return self.spec.training is not None and not self.declined

    def member(self, number: int) -> Rank | None:
        """The living process that is this member of the current generation."""
        rank = self.ranks.get(number)
        for member in self.members:
            if member.rank == number and rank is not None and member.attempt == rank.attempt:
                return rank
        return None

    def living_members(self) -> list[Rank]:
        """Members of the current generation whose process is not gone, in their order."""
        found: list[Rank] = []
        for member in self.members:
            rank = self.ranks.get(member.rank)
            if rank is not None and rank.attempt == member.attempt:
                found.append(rank)
        return found

    @property
    def seats_at(self) -> dict[int, Slot]:
        """Where the target has each rank: whose process is there has a seat."""
        return {seat.rank: seat.slot for seat in self.target}
