"""The bodies of decisions other than orders: incidents, plans, placements."""

from typing import Literal

from msgspec import Struct

from .types import Body, Origin, Outcome, Seat, Severity


class IncidentOpened(Body, frozen=True):
    """The seq of this record is the id of the incident. `evidence` lists the seqs of reports.
    `status` is a row of the status table of the Unicron paper (events/records/statuses.py)."""

    severity: Severity
    status: str
    task: int
    """0: no task is affected."""
    node: str
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]
    keeps_slots: bool = False
    """Whether its ranks' slots stay in use although it is SEV1: only processes blame them."""


class IncidentEscalated(Body, frozen=True):
    """New evidence of an open incident; `severity`, `status` and `node` are those of the new fault.

    They replace those of the incident if the new fault is more severe or is the root cause. `root`:
    the new fault is the root cause, and so far the incident was based on indirect evidence.
    """

    of: int
    severity: Severity
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]
    status: str = ""
    node: str = ""
    root: bool = False
    keeps_slots: bool = False
    """As in IncidentOpened."""
    num_times: int = 0
    """The same fault has come back while the incident was recovering: for the how manieth time it
    is there now. 0: it is the same occurrence."""


class IncidentRecovering(Body, frozen=True):
    """The task trains again on the slots of the plan. Its incident stays open, without need of
    anything, until the task has trained `restart_iterations` beyond the fault, or has not met it
    again for `passing_s_max` (IncidentClosed). The same fault before that is the same incident
    (IncidentEscalated.num_times)."""

    of: int
    """The incident."""
    until_iteration: int
    """It closes when the task has finished so many iterations."""
    pause_s: float
    """From detection to the first step, so far: of all occurrences of the fault."""
    iterations_lost: int | None
    """As in IncidentClosed, so far."""
    why: str
    """How the task trains, for people."""


PlaceKind = Literal["host", "link", "rack", "switch"]


class Suspicion(Struct, frozen=True):
    """A place that explains faults without a name."""

    kind: PlaceKind
    """A node, the link between two, or the nodes with one label."""
    name: str
    """A node, two nodes, or a label."""
    num: int
    """How many such faults of the last 24 h, of all tasks, it explains."""


class ExperimentBegun(Body, frozen=True):
    """Ranks that failed again and again are tried on other slots. No device error explains their
    failures, so either their slots are at fault or the task is: what fails elsewhere tells."""

    task: int
    suspects: tuple[Seat, ...]
    """The ranks, each with the slot that it leaves."""
    status: str
    """How they failed (events/records/statuses.py)."""
    why: str
    """What is tried, and why, for people."""
    seats: tuple[Seat, ...] = ()
    """All seats of the task from now on: the ranks have free slots, or those of other ranks in
    exchange. Empty: there are none, and the plan lets the task go on with fewer slots."""
    considered: tuple[Suspicion, ...] = ()
    """Of a fault without a name: what else may be at fault, the most suspected first."""


Verdict = Literal["slot", "task", "open", "cleared"]
"""What an experiment has shown (SlotsJudged)."""


class SlotsJudged(Body, frozen=True):
    """What an experiment has shown, or that none was possible.

    `slot`: the ranks make progress elsewhere, so the slots are taken out until the task ends.
    `task`: the ranks fail elsewhere in the same way, so no slot is blamed. `open`: no experiment
    was possible, or what it shows may be chance. The slots stay in use; whether the next task
    trains there will show it. `cleared`: a fault without a name came back without the slots; those
    that are out for it return.
    """

    task: int
    suspects: tuple[Seat, ...]
    """The ranks, each with the slot that is judged; rank -1: the slot was out already."""
    verdict: Verdict
    """As above."""
    why: str
    """What the experiment has shown, for people."""
    slots_max: int = 0
    """The task goes on without these ranks, on at most so many slots. 0: no such limit."""


class IncidentClosed(Body, frozen=True):
    """`healed`: the task steps again on the slots of the plan and has lost no iteration. `set
    back`: it steps again and has lost iterations. From decider version 26 on, both only when the
    fault has stayed away (IncidentRecovering). `pause_s` is from detection to the first step.

    Of the micro-batches of the interrupted iteration, the gradients of `kept` were kept, and
    `dealt` were reassigned. `iterations_lost` counts steps that were done again (None: a command
    has not printed its iteration yet). `ckpt_read`: a checkpoint was read. `origin` is the most
    remote source of a member's state in the successful attempt, with its node, path, step version
    and bytes. `received_bytes` is all state that members received, in all attempts. `peer_bytes` of
    it came from other members, and `near_bytes` of those from members on the same node.
    """

    of: int
    outcome: Outcome
    pause_s: float
    iterations_lost: int | None
    kept: int
    dealt: int
    ckpt_read: bool
    why: str
    origin: Origin = ""
    origin_node: str = ""
    origin_step_version: int = 0
    origin_path: str = ""
    origin_bytes: int = 0
    received_bytes: int = 0
    peer_bytes: int = 0
    near_bytes: int = 0


class ThroughputSet(Body, frozen=True):
    """T(t, x) in FLOP/s for each candidate size, and its origin."""

    task: int
    origin: Literal["declared", "modelled", "measured"]
    sizes: tuple[int, ...]
    rates_flops: tuple[float, ...]
    noise: tuple[float, ...] = ()
    """By size: by which share a measured rate may differ from this one without being another: the
    spread of the times that it is the median of. 0: not measured. Empty: no size was."""


class LossSpiked(Body, frozen=True):
    """For `loss_iterations` the loss is far above the band of those before: a median and a robust
    standard deviation of up to 64."""

    task: int
    iteration: int
    """The first of these iterations."""
    num: int
    """How many there are so far."""
    loss: float
    """The largest of these losses."""
    median: float
    """The median of the losses before."""
    deviation: float
    """The standard deviation of the losses before, by the median of absolute deviations."""


class Allocation(Struct, frozen=True):
    """The slots that a plan gives one task. WAF is weight times FLOP/s."""

    task: int
    slots_before: int
    slots: int
    waf: float
    waf_before: float = 0.0
    """Its WAF on `slots_before`, by the same throughput table."""
    transition_s: float = 0.0
    """D_transition: for so long the plan charges `waf_before`; 0: the task does not change."""


class Alternative(Struct, frozen=True):
    """A plan that was not chosen."""

    what: str
    slots: tuple[tuple[int, int], ...]
    waf: float
    objective: int
    behind_flop: float = 0.0
    """How far its objective is below that of the chosen plan; negative if limits excluded it."""
    transition_flop: float = 0.0
    """The cost of the changes that this plan makes, in weighted FLOP."""
    behind_share: float = 0.0
    """With alpha: the difference of objectives, as the share by which all tasks would have to slow
    down alike; also 0 if other tasks wait than in the chosen plan (objective -2^53)."""


Binding = Literal["", "slots", "max", "min", "gain_min", "limits", "floor", "spare", "nothing"]
"""The constraint that limits the plan's WAF ("": not recorded). `limits`: moves_max, a quota or a
priority."""


class HotSpare(Struct, frozen=True, kw_only=True):
    """Whether the slots of one node stay idle as a hot spare; FLOP are weighted."""

    num_slots: int
    """Slots of that node."""
    verdict: Literal["kept", "not kept", "idle anyway", "not priced"]
    """`idle anyway`: the plan leaves as many slots idle. `not priced`: too many tasks."""
    cost_flop: float = 0.0
    """Loss of objective value until the next fault, compared with the best plan without a spare."""
    saves_flop: float = 0.0
    """Expected gain after the next fault, if this fault takes a node."""


class PlanChosen(
    Body, frozen=True, rename={"binding": "bound", "below_floor": "short", "hot_spare": "spare"}
):
    """Slots per task for the whole cluster. `objective` is G scaled to an integer (law 10).

    G is the weighted FLOP of the plan within `running_s`, less the cost of its changes. For each
    healthy task that changes, the share `gain_min` of the task's FLOP in that time is subtracted
    too. `why`: the reason in one sentence.
    """

    trigger: str
    num_slots: int
    allocations: tuple[Allocation, ...]
    waf: float
    objective: int
    alternatives: tuple[Alternative, ...]
    ideal_waf: float = 0.0
    """WAF of the best plan on all slots of all nodes that have not left."""
    input: int = 0
    """A 52-bit digest of the planner's input; up to decider version 15, how often it changed."""
    objective_flop: float = 0.0
    """The objective in weighted FLOP."""
    transition_flop: float = 0.0
    """Cost of the plan's changes: weighted FLOP not achieved during the transitions."""
    running_s: float = 0.0
    """D_running: how long the plan is expected to last."""
    binding: Binding = ""
    bound_tasks: tuple[int, ...] = ()
    """The tasks whose max, min or floor binds. Up to decider version 15 also those that `gain_min`
    left unchanged."""
    why: str = ""
    paid_back_s: float = 0.0
    """Up to decider version 15: the time after which the plan's gain exceeded the cost of its
    changes. It is now computed on request."""
    alpha: float = 0.0
    """The alpha of alpha-fairness. Above 0 `objective` is the sum of utilities; `waf`,
    `objective_flop` and other FLOP fields describe the resulting plan."""
    below_floor: tuple[int, ...] = ()
    """Tasks with fewer slots than their floor, because the floors of others take the slots."""
    hot_spare: HotSpare | None = None
    """None: the policy does not request one."""
    kept: tuple[Allocation, ...] = ()
    """Tasks left unchanged because one of their nodes is unreachable; only `ideal_waf` includes
    them."""


class TaskPlaced(Body, frozen=True):
    """The target assignment of the task's ranks to slots."""

    task: int
    seats: tuple[Seat, ...]
    why: str


class TaskWaiting(Body, frozen=True):
    """Why the task has no slots. What it needs to run is computed on request.

    The other fields were set up to decider version 15. `cost_waf` is the WAF that the other tasks
    would lose if this task ran, less its own WAF. With a weight of `weight_from` or more, the plan
    would give it slots. Both are 0 if there are not enough slots.
    """

    task: int
    why: str
    needs: str = ""
    cost_waf: float = 0.0
    weight_from: float = 0.0


class OrderSuppressed(Body, frozen=True):
    """An action that does not start, because healing is frozen or the policy only observes."""

    task: int
    what: str
    why: str


class TaskEnded(Body, frozen=True):
    task: int
    outcome: Literal["finished", "failed", "cancelled"]
    why: str


class NodeQuarantined(Body, frozen=True):
    """The node gets no tasks until `until_s`, even if its agent joins again. `why` names the
    faults; `incidents` lists those that were counted."""

    node: str
    until_s: float
    why: str
    incidents: tuple[int, ...]


class StragglerCostEstimated(Body, frozen=True):
    """The cost of a degraded node, and the gain of draining it. For information only.

    The node slows down `tasks`, each to `1 / ratios[i]` of its speed.
    """

    node: str
    tasks: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_waf: float
    """WAF that the degraded node costs now."""
    drain_waf: float
    """How much more WAF the best plan without the node has than now; negative: less."""
    why: str
    now_waf: float = 0.0
    """WAF achieved now, the reference of `drain_waf`; 0: not recorded."""
