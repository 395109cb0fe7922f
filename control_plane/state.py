"""The cluster as the log tells it: plain data, changed by the fold alone."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from ..events.codec import decode_record
from ..events.model_spec import Axes, Modelled
from ..events.orders import Copy, Keeper, Member, PlanChosen, Seat, Slot, ThroughputSet
from ..events.records import Record
from ..events.reports import Policy
from ..events.spec import JobSpec
from .faults import Fault, Incident, Logged, Series, Standing
from .nodes import Health as Health
from .nodes import Node as Node
from .nodes import Occupant as Occupant
from .noticed import Crawl, Pace, Priced, Slow, Stall
from .roll import Roll
from .seated import Seated

SCHEMA = "unicron-state-6"
NUM_REQUESTS_MAX = 1024
"""Operators' requests whose repetition is still recognised; the oldest are forgotten first."""
NUM_INCIDENTS_MAX = 256
"""Closed incidents that the state keeps; the log keeps all."""
EARNED_S = 1800
"""Length of the spans over which the cluster's achieved work is summed."""
NUM_EARNED_MAX = 48
"""Spans that the state keeps: 24 h."""

Phase = Literal["idle", "starting", "training", "quiescing", "reconfiguring", "ended"]
RankState = Literal["ordered", "started", "ready", "member", "finished"]


class Deadline(Struct):
    """Due at `due_s`; a new epoch arms it again with its full length."""

    due_s: float
    length_s: float


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
    needs: str = ""
    cost_waf: float = 0.0
    weight_from: float = 0.0
    """Of a task that waits: TaskWaiting."""
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
    """DropCopies, while one of them has not answered."""
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


class ClusterState(Struct, kw_only=True, dict=True):
    """All that the heart knows: nothing but the fold of the log. What is found out from it once is
    held beside it, and is no part of it (calm.py)."""

    seq: int = 0
    epoch: int = 0
    at_s: float = 0.0
    nonce: str = ""
    heart: int = 0
    policy: Policy = field(default_factory=Policy)
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    tasks: dict[int, Task] = field(default_factory=dict[int, Task])
    incidents: dict[int, Incident] = field(default_factory=dict[int, Incident])
    sources: dict[str, int] = field(default_factory=dict[str, int])
    deadlines: dict[str, Deadline] = field(default_factory=dict[str, Deadline])
    orders: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Open orders: seq -> the record, encoded."""
    plan: PlanChosen | None = None
    plan_seq: int = 0
    plan_s: float = 0.0
    ailing: list[str] = field(default_factory=list[str])
    """Nodes of which something is still to be decided."""
    num_inputs: int = 0
    """How often that has changed which a plan follows from: not with every record."""
    replan: str = ""
    """What made the last plan out of date; empty: it holds."""
    frozen: str = ""
    """Why an operator froze healing; empty: it is not frozen."""
    earned: dict[int, float] = field(default_factory=dict[int, float])
    """Weighted FLOP of iterations done for the first time, by span: at_s // EARNED_S."""
    slot_flops: float = 0.0
    """What one slot achieves, as measured; 0: nothing was measured."""
    slot_flops_of: int = 0
    """The task that tells so."""
    num_slots_max: int = 0
    """The most slots ever seen at once."""
    num_running: int = 0
    """Processes of all tasks' ranks, those given up left out."""
    observed_slot_s: float = 0.0
    """Their time, added up, while a leader watched."""
    num_faults: int = 0
    """Faults in that time (economics.py says what counts)."""
    mtbf_gpu_s: float = 0.0
    """Time between two faults of one slot, as plans take it."""
    degraded: dict[str, Priced] = field(default_factory=dict[str, Priced])
    """By node that is degraded: what it costs, as last priced."""
    to_price: list[str] = field(default_factory=list[str])
    """Nodes that are to be priced with the next decision."""
    reports_lost: int = 0

    @cached_property
    def calm(self) -> set[int]:
        """Tasks that are known to need no step."""
        return set()

    @cached_property
    def resting(self) -> set[int]:
        """Tasks whose step yielded nothing, since all that concerns them."""
        return set()

    @cached_property
    def seated(self) -> Seated:
        """Who has seats where."""
        return Seated((task.id, task.target) for task in self.tasks.values())

    @cached_property
    def wishes(self) -> dict[int, Any]:
        """Of calm tasks: what a plan follows from, as plan_input.py has it."""
        return {}

    @cached_property
    def roll(self) -> Roll:
        """Slots that a plan may give."""
        return Roll(self.nodes)

    @cached_property
    def is_checked(self) -> bool:
        """Whether a check has something against any node, or had until lately."""
        return any(node.checks or node.slots_sick or node.slots_well or node.sick_why
                   for node in self.nodes.values())

    @property
    def held(self) -> str:
        """Why nothing is acted upon: `observing`, `frozen: REASON`; empty when healing is on."""
        if self.policy.observe:
            return "observing"
        return f"frozen: {self.frozen}" if self.frozen else ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ClusterState)


def encode_state(state: ClusterState) -> bytes:
    """The whole state as msgpack. Maps keep the order in which the log filled them, so one log has
    one encoding, also when the fold went on from a snapshot."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> ClusterState:
    """The inverse of `encode_state`. Raises msgspec.MsgspecError on nonsense."""
    return _decoder.decode(data)


def state_hash(state: ClusterState) -> str:
    """`unicron-state-6:` and 16 hex digits; two folds of one log have the same."""
    return f"{SCHEMA}:{hashlib.blake2b(encode_state(state), digest_size=8).hexdigest()}"


def open_orders(state: ClusterState) -> list[Record]:
    """Orders that somebody may still have to carry out, by seq: the orders streams hold them."""
    return [decode_record(state.orders[seq]) for seq in sorted(state.orders)]


def live_tasks(state: ClusterState) -> list[Task]:
    """Tasks that have not ended, by id."""
    return [state.tasks[key] for key in sorted(state.tasks) if state.tasks[key].phase != "ended"]


def usable_slots(state: ClusterState) -> tuple[Slot, ...]:
    """Slots that a plan may give."""
    return state.roll.every
