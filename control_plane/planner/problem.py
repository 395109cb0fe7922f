"""The planner's problem: demand, value and transition cost of each task, and limits of a plan."""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from ...events.records.decisions import Allocation
from ..throughput.transition_cost import Transition

NUM_KINDS = 6
SAME, SHRINK, GROW, STOP, RESHAPE, NO_CHANGE = range(NUM_KINDS)
"""Kinds of change. SAME: a faulted task keeps its slots."""


class PlanLimits(Struct, frozen=True, kw_only=True):
    """The constraints of a plan beside the number of slots. One row is one task."""

    now: tuple[int, ...]
    """By row: the task's current slots."""
    healthy: tuple[bool, ...]
    """By row: the task trains without a fault, so a change of its slots is a move."""
    moves_max: int | None
    teams: tuple[tuple[tuple[int, ...], int], ...]
    """(rows, quota): these rows may have `quota` slots together. A row is in at most one team."""
    priorities: tuple[int, ...]
    """By row: the task's priority, higher ones first. Empty: all tasks have the same priority."""

    def allow(self, slots: Sequence[int]) -> bool:
        return self.allow_moves(slots) and self.allow_quotas(slots)

    def allow_moves(self, slots: Sequence[int]) -> bool:
        return self.moves_max is None or self.moves_max >= sum(
            healthy and x != now
            for x, now, healthy in zip(slots, self.now, self.healthy, strict=True)
        )

    def allow_quotas(self, slots: Sequence[int]) -> bool:
        return all(sum(slots[row] for row in rows) <= quota for rows, quota in self.teams)


class TaskDemand(Struct, frozen=True, kw_only=True):
    """One task as the planner sees it: `wafs[i]` is F(t, sizes[i]); F(t, 0) is 0."""

    task: int
    name: str
    now: int
    faulted: bool
    """A worker of the task failed, so every number of slots costs a transition."""
    transition: Transition
    sizes: tuple[int, ...]
    """Ascending, distinct, above 0."""
    wafs: tuple[float, ...]
    priority: int = 0
    team: str = ""
    weight: float = 1.0
    """It is already included in `wafs`."""
    shapes: tuple[int, ...] = ()
    """By size: a number for the replica shape of its layout. Empty: all sizes have one shape."""
    floor: int = 0
    """The fewest slots that the job requests; 0: no floor."""


class PlanProblem(Struct, frozen=True, kw_only=True):
    demands: tuple[TaskDemand, ...]
    """The planner breaks ties in favour of the first task."""
    num_slots: int
    """The paper's n'."""
    mtbf_gpu_s: float
    gain_min: float = 0.0
    """Hysteresis: a change of a healthy task must gain this share of its WAF."""
    moves_max: int | None = None
    """The most healthy tasks that a plan may change."""
    quotas: tuple[tuple[str, int], ...] = ()
    """(team, the most slots that its tasks may have together)."""
    floor: bool = False
    """Each task has a floor: its smallest size with a WAF above 0."""
    alpha: float = 0.0
    """The alpha of alpha-fairness (objective.py). 0: the sum of all WAF is maximised."""
    spare_slots: int = 0
    """Size of a hot spare (hot_spare.py): the slots of one node. 0: never keep a hot spare."""
    repair_s: float = 0.0
    """The time until a lost node is back."""
    kept_slots: int = 0
    """Idle slots beside `num_slots`. They fail as often as the others."""

    @property
    def running_s(self) -> float:
        """D_running(n')."""
        return self.mtbf_gpu_s / max(self.num_slots + self.kept_slots, 1)

    @property
    def limits(self) -> PlanLimits | None:
        """The constraints of the plan beside `num_slots`; None: there are none."""
        priorities = tuple(demand.priority for demand in self.demands)
        teams = tuple(
            (rows, quota)
            for team, quota in self.quotas
            if (rows := tuple(i for i, demand in enumerate(self.demands) if demand.team == team))
        )
        differ = any(priority != priorities[0] for priority in priorities)
        if self.moves_max is None and not teams and not differ:
            return None
        return PlanLimits(
            now=tuple(demand.now for demand in self.demands),
            healthy=tuple(one.now > 0 and not one.faulted for one in self.demands),
            moves_max=self.moves_max,
            teams=teams,
            priorities=priorities if differ else (),
        )


def allocation(demand: TaskDemand, slots: int) -> Allocation:
    return Allocation(
        task=demand.task,
        slots_before=demand.now,
        slots=slots,
        waf=waf_of(demand, slots),
        waf_before=waf_of(demand, demand.now),
        transition_s=transition_cost_s(demand, slots),
    )


def waf_of(demand: TaskDemand, slots: int) -> float:
    """F(t, x) for a candidate x; 0 for 0 slots."""
    at = bisect_left(demand.sizes, slots)
    return demand.wafs[at] if slots in demand.sizes[at : at + 1] else 0.0


def reshapes(demand: TaskDemand) -> tuple[bool, ...]:
    """By size: True if the replica shape differs from the current one, so that all state moves."""
    pairs = zip(demand.sizes, demand.shapes, strict=False)
    known = [kind for size, kind in pairs if size <= demand.now]
    if not known:
        return (False,) * len(demand.sizes)
    return tuple(kind != known[-1] for kind in demand.shapes)


def transition_cost_s(demand: TaskDemand, slots: int) -> float:
    """D_transition from the current slots to `slots`; 0 for a healthy task that keeps its slots."""
    kinds = demand.transition
    if not demand.now or (slots == demand.now and not demand.faulted):
        return 0.0
    if slots and reshapes(demand)[demand.sizes.index(slots)]:
        return kinds.reshape_s
    return (
        kinds.same_s
        if slots == demand.now
        else kinds.grow_s
        if slots > demand.now
        else kinds.shrink_s
        if slots
        else kinds.stop_s
    )
