"""Dry runs: the plan after a hypothetical change, and the explained present plan.

A dry run folds the reports of the change into a copy of the state and runs the decider. So the
change leads to the same plan when it is carried out, as long as the plan's input is the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import Allocation, PlanChosen, StragglerCostEstimated
from ...events.records.envelope import Record, Report
from ...events.records.order_format import ORDER_FORMAT_VERSION
from ...events.records.types import Seat
from ...events.spec.job import parse
from ...events.spec.parallelism import layout_label
from ..decide.advance import decision_record, report_record
from ..decide.decide import decide
from ..decide.memory_checkpoints import assign_stores, assigned_bytes, bytes_max_of
from ..fold.fold import fold
from ..placement.usable_slots import fails_by_itself
from ..planner import explain
from ..planner.hot_spare import with_hot_spare
from ..planner.pending import WaitExplanation, explain_waiting, work_under_limits
from ..planner.problem import PlanProblem, TaskDemand, transition_cost_s, waf_of
from ..planner.problem_of_state import input_digest, node_slots, planning_snapshot
from ..planner.straggler_cost import node_cost
from ..state.cluster import DECIDER_VERSION, ClusterState, decode_state, live_tasks
from ..state.node import Node
from ..state.task import Task
from ..throughput.table import axes, candidates, origin
from . import requests
from .requests import Refusal

MORE_NUM_MAX = 100_000
"""The most slots that a dry run may add."""
LIFTED_WORK_NUM_MAX = 1 << 28
"""Most work of one plan under limits, as states times candidates: 0.5 s. There are up to eight."""
_NODE_SLOTS_NUM = 8
"""Slots of an added node if the cluster has no node."""


class Change(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hypothetical change; its parts apply in this order."""

    slots: int = 0
    """Additional slots, in new nodes of the most frequent size that join together."""
    without: tuple[str, ...] = ()
    """Nodes to drain, one after the other."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Task id, as text -> new weight."""
    undrain: tuple[str, ...] = ()
    lift: tuple[str, ...] = ()
    """Nodes whose quarantines end and whose slots return, or slots, as `n1/0`. A dry run assumes
    that each device is found healthy."""
    cancel: tuple[str, ...] = ()
    """Ids of tasks to cancel; a dry run has them end at once."""
    unfreeze: bool = False
    submit: (
        Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/JobSpec"})]
        | None
    ) = None
    """A job spec."""

    def __post_init__(self) -> None:
        if self.submit is not None:
            parse(self.submit)  # what can never do is refused before the state is looked at


class TaskDiff(Struct, frozen=True, kw_only=True):
    """One task before and after the change."""

    task: int
    """0: the change submits this task."""
    name: str
    tier: str
    weight: float
    slots_before: int
    slots: int
    waf_before: float
    """The WAF on the task's present slots, by its throughput table and the dry run's weight."""
    waf: float
    pause_s: float
    """The expected downtime of the change from `slots_before` to `slots`, however many plans lie
    between. If both are the same: the longest downtime that one of these plans expects."""
    origin: str
    """The origin of its throughput table."""
    seats_before: tuple[Seat, ...]
    seats: tuple[Seat, ...]
    iteration: int
    waits: str = ""
    """Why it has no slots, and what it needs; computed for this answer."""
    fails: str = ""
    """Which slots it does not get because its own processes fail; empty: they do not."""
    layout_before: str = ""
    layout: str = ""
    """Empty for a task without a layout."""
    copies_bytes: int = 0
    """Of a submitted task: the most host memory that its in-memory checkpoints take on one node; 0:
    it makes none, or the bytes of its state are not known yet."""
    copies_max: int = 0
    """What in-memory checkpoints of all tasks may take on that node; 0: not known."""
    no_copies: str = ""
    """Of a submitted task: why it makes none."""


class DryRunResult(Struct, frozen=True, kw_only=True):
    """The result of a dry run, or the explained present plan."""

    tried: bool
    """True for a dry run, False for the present plan."""
    input: int
    """Digest of the plan's input before the change."""
    plan: PlanChosen | None
    """The last plan of the change; None if there is nothing to plan. Unlike the record in the log,
    it has the plans without each limit, and `paid_back_s`."""
    planned: bool
    """True if the change leads to a plan; otherwise `plan` is the present one."""
    plan_s: float
    plan_seq: int
    """The present plan's record."""
    num_slots_before: int
    tasks: tuple[TaskDiff, ...]
    num_plans: int
    """The number of plans; each request of the change may lead to one."""
    transition_flop: float
    """The cost of all transitions, each task counted once."""
    more_slots: int
    """The slots of one more node."""
    more_waf: float
    """The additional WAF of the best plan with `more_slots`."""
    held: str
    """Why healing is paused; empty if it is on."""
    seq: int = 0
    """The last record of the state before the change."""
    at_s: float = 0.0
    """The time of that record."""
    took_s: float = 0.0
    """For how long it was computed, over HTTP; else 0."""
    computed_by: int = DECIDER_VERSION
    """The decider version that computed what is not in the log."""
    is_cut: bool = False
    """True if the plans without each limit are left out because they would take too long."""
    degraded: tuple[StragglerCostEstimated, ...] = ()
    """Those nodes to drain that slow down tasks now, each with its cost as if only it were drained.
    The throughput tables of the plans do not include stragglers."""


def run_dry(data: bytes, change: Change) -> DryRunResult:
    """Run the change on a copy of the state. Raises what an operator's request would raise."""
    old, state = decode_state(data), decode_state(data)
    problem = planning_snapshot(state).problem
    plans: list[PlanChosen] = []
    first: dict[int, TaskDemand] = {}
    for report in _reports(state, change):
        for body in _decisions(state, report):
            if isinstance(body, PlanChosen):
                problem = planning_snapshot(state).problem
                first = {demand.task: demand for demand in problem.demands} | first
                plans.append(body)
    # The costs in the log may be a minute old.
    costs = [node_cost(old, name) for name in change.without if name in old.degraded]
    return replace(
        _result(old, state, problem, plans, first),
        degraded=tuple(cost for cost in costs if cost.cost_waf > 0),
    )


def explain_present_plan(data: bytes) -> DryRunResult:
    """Explain the present plan of the state `data` (of `encode_state`)."""
    state = decode_state(data)
    return _result(state, state, planning_snapshot(state).problem, [], {})


def of_problem(problem: PlanProblem, more: int) -> DryRunResult:
    """Plan a problem that comes from no cluster. `more`: additional slots for `more_waf`."""
    choice = with_hot_spare(problem)
    most = {demand.task: demand.sizes[-1] for demand in problem.demands if demand.sizes}
    plan = _with_explanations(explain.record_of(problem, choice, most), problem)
    wider = with_hot_spare(replace(problem, num_slots=problem.num_slots + more)).plan.waf
    return DryRunResult(
        tried=True,
        input=0,
        plan=plan,
        planned=True,
        plan_s=0.0,
        plan_seq=0,
        num_slots_before=problem.num_slots,
        tasks=tuple(
            TaskDiff(
                task=demand.task,
                name=demand.name,
                tier="",
                weight=demand.weight,
                slots_before=demand.now,
                slots=x,
                waf_before=waf_of(demand, demand.now),
                waf=waf_of(demand, x),
                pause_s=transition_cost_s(demand, x),
                origin="",
                seats_before=(),
                seats=(),
                iteration=0,
            )
            for demand, x in zip(problem.demands, choice.plan.slots, strict=True)
        ),
        num_plans=1,
        transition_flop=plan.transition_flop,
        more_slots=more,
        more_waf=max(wider - plan.waf, 0.0),
        held="",
    )


def operator_requests(data: bytes, change: Change, reason: str) -> list[t.Body]:
    """The requests that carry out the change. Raises what `run_dry` raises; Refusal for slots."""
    if change.slots:
        raise Refusal(
            422,
            "slots that are not there cannot be applied",
            "unicron agent, on a new machine, has it join",
        )
    state, found = decode_state(data), list[t.Body]()
    for report in _reports(state, change, reason):
        found.append(report)
        for _ in _decisions(state, report):
            pass
    if not found:
        raise Refusal(422, "there is nothing to apply", "name a node, a weight or a job")
    return found


# --- the change on a copy of the state ---
def _reports(state: ClusterState, change: Change, reason: str = "") -> Iterator[t.Body]:
    """The reports of the change. The caller folds each report before it takes the next one."""
    if change.slots:
        yield _add_nodes(state, change.slots)
    for node in change.without:
        yield requests.drain(state, requests.Drain(reason), node)
    for task, weight in change.weights.items():
        yield requests.set_weight(state, requests.Weight(weight, reason), task)
    for make, names in (
        (requests.undrain, change.undrain),
        (requests.cancel, change.cancel),
        (requests.lift, change.lift),
        (requests.unfreeze, ("",) * change.unfreeze),
    ):
        for name in names:
            yield make(state, requests.Reason(reason), name)
    if change.submit is not None:
        yield requests.submit(state, parse(change.submit), "")


def _decisions(state: ClusterState, body: t.Body) -> Iterator[t.Body]:
    """Fold one report, then yield each decision before it is folded (as in `advance`)."""
    report = Report(
        source="operator/dry-run",
        source_seq=state.sources.get("operator/dry-run", 0) + 1,
        occurred_s=state.at_s,
        body=body,
    )
    record = report_record(state, report, epoch=state.epoch, at_s=state.at_s)
    fold(state, record)
    yield from _decide(state, record)
    if isinstance(body, r.TaskCancelRequested):  # as if its processes had exited
        state.tasks[body.task].ranks.clear()
        yield from _decide(state, record)


def _decide(state: ClusterState, record: Record) -> Iterator[t.Body]:
    for answer in decide(state, record):
        yield answer
        fold(state, decision_record(state, answer, cause=record))


def _add_nodes(state: ClusterState, num: int) -> t.Body:
    """Add all new nodes but the last to the state; return the last one's NodeJoined."""
    if not 1 <= num <= MORE_NUM_MAX:
        raise Refusal(
            422,
            f"slots: {num} is not from 1 to {MORE_NUM_MAX:,}",
            "slots that would be there besides those that are",
        )
    each = node_slots(state) or _NODE_SLOTS_NUM
    number = 1
    while True:
        name = f"new-{number}"
        number += 1
        if name in state.nodes:
            continue
        part = min(each, num)
        num -= part
        if not num:
            return r.NodeJoined(
                node=name,
                incarnation=1,
                host="",
                pid=0,
                num_slots=part,
                order_format=ORDER_FORMAT_VERSION,
            )
        state.nodes[name] = Node(
            name=name,
            incarnation=1,
            host="",
            pid=0,
            num_slots=part,
            accelerator="",
            order_format=ORDER_FORMAT_VERSION,
        )


# --- the result ---
def _result(
    old: ClusterState,
    state: ClusterState,
    problem: PlanProblem,
    plans: Sequence[PlanChosen],
    first: Mapping[int, TaskDemand],
) -> DryRunResult:
    """`problem` is that of the last plan. `first`: task -> its demand in its first plan."""
    plan = plans[-1] if plans else old.plan if live_tasks(state) else None
    plan = _with_explanations(plan, problem) if plan is not None else None
    given = {x.task: x.slots for x in plan.allocations} if plan is not None else {}
    allocations: dict[int, list[Allocation]] = {}
    for one in plans:
        for x in one.allocations:
            allocations.setdefault(x.task, []).append(x)
    pauses_s = {task: _pause_s(demand, allocations[task]) for task, demand in first.items()}
    more, waits = node_slots(old) or _NODE_SLOTS_NUM, explain_waiting(state)
    wider = with_hot_spare(replace(problem, num_slots=problem.num_slots + more)).plan.waf
    return DryRunResult(
        tried=old is not state,
        input=input_digest(old),
        plan=plan,
        planned=bool(plans),
        plan_s=old.plan_s,
        plan_seq=old.plan_seq,
        num_slots_before=len(planning_snapshot(old).slots),
        tasks=tuple(
            _diff(
                state,
                old.tasks.get(task.id),
                task,
                given.get(task.id, len(task.target)),
                pauses_s.get(task.id, 0.0),
                waits.get(task.id),
            )
            for task in live_tasks(state)
        ),
        num_plans=len(plans),
        transition_flop=math.fsum(
            waf_of(demand, first[demand.task].now) * pauses_s[demand.task]
            for demand in problem.demands
            if plans
        ),
        more_slots=more,
        more_waf=max(wider - plan.waf, 0.0) if plan is not None else 0.0,
        held=state.held,
        seq=old.seq,
        at_s=old.at_s,
        is_cut=exceeds_work_limit(problem),
    )


def _with_explanations(plan: PlanChosen, problem: PlanProblem) -> PlanChosen:
    """The plan with the plans without each limit and `paid_back_s`. Returned unchanged if that
    would take too long, or if the plan does not fit the problem."""
    given = {x.task: x.slots for x in plan.allocations}
    slots = tuple(given.get(demand.task, demand.now) for demand in problem.demands)
    known = [other.slots for other in plan.alternatives]
    fits = sum(slots) <= problem.num_slots and all(
        not x or x in demand.sizes for demand, x in zip(problem.demands, slots, strict=True)
    )
    if not fits or exceeds_work_limit(problem):
        return plan
    more = (
        other for other in explain.without_each_limit(problem, slots) if other.slots not in known
    )
    return replace(
        plan,
        alternatives=(*plan.alternatives, *more),
        paid_back_s=plan.paid_back_s or explain.paid_back_s(problem, slots),
    )


def exceeds_work_limit(problem: PlanProblem) -> bool:
    """True if the plans without each limit would take too long."""
    return problem.limits is not None and work_under_limits(problem) > LIFTED_WORK_NUM_MAX


def _pause_s(demand: TaskDemand, allocations: Sequence[Allocation]) -> float:
    """The downtime of one task, by its `allocations` in each plan. All requests are in one append,
    so the task stops once. A task without slots before and after has no downtime."""
    charge_s = transition_cost_s(demand, allocations[-1].slots)
    if charge_s or not demand.now:
        return charge_s
    return max(x.transition_s for x in allocations)


def _diff(
    state: ClusterState,
    old: Task | None,
    task: Task,
    slots: int,
    pause_s: float,
    waits: WaitExplanation | None,
) -> TaskDiff:
    seats = old.target if old is not None else ()
    diff = TaskDiff(
        task=task.id if old is not None else 0,
        name=task.spec.name,
        tier="train" if task.heals_in_memory else "command",
        weight=task.weight,
        slots_before=len(seats),
        slots=slots,
        waf_before=_waf(task, len(seats)),
        waf=_waf(task, slots),
        pause_s=pause_s,
        origin=origin(task.spec, task.throughput, task.modelled),
        seats_before=seats,
        seats=task.target,
        iteration=task.iteration,
        waits=f"{waits.why}; needs {waits.needs}" if waits is not None and not slots else "",
        fails=_fails(state, task),
        layout_before=_layout(task, len(seats)),
        layout=_layout(task, slots),
    )
    return diff if old is not None or not task.target else _with_copies(diff, state, task)


def _fails(state: ClusterState, task: Task) -> str:
    """What failures of the task's own processes mean for its plan."""
    words = [f"at most {task.slots_max} slots, more ranks fail"] * bool(task.slots_max)
    if task.failures is not None and fails_by_itself(state, task):
        words.append(f"it takes no slot from another task: {task.failures.why}")
    words += [
        f"{suspect.slot.node}/{suspect.slot.index} is suspected: {suspect.why}"
        for suspect in task.suspects.values()
    ]
    return "; ".join(words)


def _with_copies(diff: TaskDiff, state: ClusterState, task: Task) -> TaskDiff:
    """The host memory of a submitted task's in-memory checkpoints on its planned slots."""
    nodes = [seat.slot.node for seat in task.target]
    found = assign_stores(state, task, nodes)
    charged = assigned_bytes(task, nodes, found.stores)
    most = max(sorted(charged), key=lambda name: charged[name], default="")
    return replace(
        diff,
        copies_bytes=charged.get(most, 0),
        no_copies=found.why,
        copies_max=bytes_max_of(state, state.nodes[most]) if most else 0,
    )


def _layout(task: Task, slots: int) -> str:
    """The layout in short form: `TP2xDP2`."""
    on = axes(task.spec, task.modelled, slots) if slots else None
    return layout_label(on) if on is not None else ""


def _waf(task: Task, slots: int) -> float:
    """The WAF as the planner computes it: slots may idle. A nominal rate earns nothing."""
    table = task.throughput
    if table is None or not slots or origin(task.spec, table, task.modelled) == "nominal":
        return 0.0
    return task.weight * dict(candidates(table, slots)).get(slots, 0.0)
