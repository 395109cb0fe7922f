"""What was decided: the bodies of decisions that are no orders, frozen."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from .types import Body, Origin, Outcome, Seat, Severity


# --- decisions ----------------------------------------------------------------------------------
class IncidentOpened(Body, frozen=True):
    """Its seq is the incident's id. `evidence` are seqs; `status` is a row of the paper's table."""

    severity: Severity
    status: str
    task: int
    """0 when no task is hurt."""
    node: str
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]


class IncidentEscalated(Body, frozen=True):
    """More of the same incident, by which evidence; severity, status, node: of what is told now.

    Where that is graver than what was known, or is its cause (`root`: till now there were only
    others' words for it), it is what the incident is called from now on.
    """

    of: int
    severity: Severity
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]
    status: str = ""
    node: str = ""
    root: bool = False


class IncidentClosed(Body, frozen=True):
    """`healed`: the task steps again with what the plan gives it, and no iteration was lost; where
    some were, it was `set back`. `pause_s`: detected to stepped.

    `kept` and `dealt` count micro-batches of the interrupted iteration; `iterations_lost` those
    that were stepped and done again (None: a command has yet to print how far it is); `ckpt_read`:
    a checkpoint was needed. `origin` is the farthest that a member's state came from: which node,
    which path, after how many steps and how many bytes, not what a try found that came to nothing.
    `received_bytes` of state came to all members in all tries, `peer_bytes` of it from each other,
    `near_bytes` of that from members on the same node.
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
    """T(t, x) in FLOP/s for each candidate size, and where it comes from."""

    task: int
    origin: Literal["declared", "modelled", "measured"]
    sizes: tuple[int, ...]
    rates_flops: tuple[float, ...]


class Allocation(Struct, frozen=True):
    """What one plan gives one task. WAF is weight times FLOP/s."""

    task: int
    slots_before: int
    slots: int
    waf: float
    waf_before: float = 0.0
    """What it would earn on what it had, by the same table."""
    transition_s: float = 0.0
    """D_transition, for which the plan charges `waf_before`; 0: it goes on as it is."""


class Alternative(Struct, frozen=True):
    """A plan that was beaten, in words and in numbers."""

    what: str
    slots: tuple[tuple[int, int], ...]
    waf: float
    objective: int
    behind_flop: float = 0.0
    """How far its objective is below the chosen plan's; below 0 where limits kept it out."""
    transition_flop: float = 0.0
    """What its changes cost, in weighted FLOP."""
    behind_share: float = 0.0
    """With alpha: how far its objective is below the chosen plan's, as if each task ran by this
    share slower; 0 also where other tasks wait (objective -2^53)."""


Binding = Literal["", "slots", "max", "min", "gain_min", "limits", "floor", "spare", "nothing"]
"""What keeps a plan from earning more ("": not told). `limits`: moves_max, a quota, a priority."""


class HotSpare(Struct, frozen=True, kw_only=True):
    """Whether the slots of one node stay idle for the next fault; FLOP are weighted."""

    num_slots: int
    """Of one node."""
    verdict: Literal["kept", "not kept", "idle anyway", "not priced"]
    """`idle anyway`: the plan has no use for so many. `not priced`: there are too many tasks."""
    cost_flop: float = 0.0
    """How much less the best plan with it is worth, until the next fault."""
    saves_flop: float = 0.0
    """How much more is expected of it after the next fault, if that takes a node."""


class PlanChosen(Body, frozen=True, rename={
        "binding": "bound", "below_floor": "short", "hot_spare": "spare"}):
    """Slots per task for the whole cluster. `objective` is scaled to an integer (law 10).

    The objective is what the plan earns within `running_s`, less what its changes cost, less
    `gain_min` of what each healthy task that changes earns in that time. `why`: in one sentence.
    """

    trigger: str
    num_slots: int
    allocations: tuple[Allocation, ...]
    waf: float
    objective: int
    alternatives: tuple[Alternative, ...]
    ideal_waf: float = 0.0
    """What the best plan would earn with every slot of every node that has not left."""
    input: int = 0
    """A digest of all that the plan follows from, 52 bits; to heart 15 a count of its changes."""
    objective_flop: float = 0.0
    """The objective in weighted FLOP."""
    transition_flop: float = 0.0
    """What its changes cost: weighted FLOP that are not achieved meanwhile."""
    running_s: float = 0.0
    """D_running: how long the plan is expected to hold."""
    binding: Binding = ""
    bound_tasks: tuple[int, ...] = ()
    """Whose max, min or floor binds. Up to decider version 15 `bound` could be `gain_min`."""
    why: str = ""
    paid_back_s: float = 0.0
    """Up to decider version 15: when its changes had paid for themselves. Now computed on request.
    """
    alpha: float = 0.0
    """Of alpha-fairness; above 0 `objective` is the sum of utilities, and `waf`, `objective_flop`
    and all else in FLOP is what the plan earns by that."""
    below_floor: tuple[int, ...] = ()
    """Tasks that have fewer slots than their floor: it does not fit beside those before it."""
    hot_spare: HotSpare | None = None
    """None: the policy asks for none."""
    kept: tuple[Allocation, ...] = ()
    """Tasks that it leaves alone (a node of theirs is silent): only in `ideal_waf` beside this."""


class TaskPlaced(Body, frozen=True):
    """The seats that the task should fill from now on: its target."""

    task: int
    seats: tuple[Seat, ...]
    why: str


class TaskWaiting(Body, frozen=True):
    """The task has no slots; why, as far as it follows from the counts of the plan.

    What it needs is computed on request. The other fields are of old logs and no longer written:
    `cost_waf` is what the other tasks would earn less if it ran, beyond what it earns itself;
    from `weight_from` on the plan would give it slots (both 0 where slots are simply missing).
    """

    task: int
    why: str
    needs: str = ""
    cost_waf: float = 0.0
    weight_from: float = 0.0


class OrderSuppressed(Body, frozen=True):
    """What would be ordered for this task now, had healing not been frozen, or only observed."""

    task: int
    what: str
    why: str


class TaskEnded(Body, frozen=True):
    task: int
    outcome: Literal["finished", "failed", "cancelled"]
    why: str


class NodeQuarantined(Body, frozen=True):
    """The node gets no tasks until `until_s`, also when its agent joins again; `why` names what
    it did, `incidents` are those that count against it."""

    node: str
    until_s: float
    why: str
    incidents: tuple[int, ...]


class StragglerCostEstimated(Body, frozen=True):
    """What a degraded node costs, and what it would earn to drain it; nothing is done about it.

    `tasks` run there and are slowed down, each to `1 / ratios[i]` of its pace.
    """

    node: str
    tasks: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_waf: float
    """WAF that is not achieved for it, now."""
    drain_waf: float
    """How much more WAF than now the best plan without the node has; below 0: less."""
    why: str
    now_waf: float = 0.0
    """WAF that is achieved now, of which `drain_waf` is a share; 0: not told."""
