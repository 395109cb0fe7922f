"""Dry runs: what the heart would plan if something were so; and the present plan, explained.

A dry run tells the heart, on a copy of the state, what would be told if it were carried out. So it
is what then happens, as long as the plan's input is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import Allocation, PlanChosen, StragglerCostEstimated
from ...events.records.envelope import Report
from ...events.records.types import Seat
from ...events.spec.parallelism import briefly
from ..decide.advance import HEART, decision_record, report_record
from ..decide.decide import decide
from ..fold.fold import fold
from ..planner import explain
from ..planner.hot_spare import choose
from ..planner.pending import Waits, explained, limited_work
from ..planner.problem import PlanInput, Wish, charged_s, waf_of
from ..planner.problem_of_state import input_digest, node_slots, plan_input
from ..planner.straggler_cost import price
from ..state.cluster import ClusterState, decode_state, live_tasks
from ..state.node import Node
from ..state.task import Task
from ..throughput.table import axes, candidates
from . import requests
from .requests import Refusal

MORE_NUM_MAX = 100_000
"""Slots that a dry run may add."""
LIFTED_WORK_NUM_MAX = 1 << 28
"""States times candidates of one plan under limits, of which up to eight more are made: about half
a second for each."""
_NODE_SLOTS_NUM = 8
"""Of a node, where there is none to go by."""


class Change(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What would be so: all of it together, in this order."""

    slots: int = 0
    """So many more, in new nodes as large as most are; they join at the same moment."""
    without: tuple[str, ...] = ()
    """Nodes that are drained, one after the other."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """By the task's id, as text."""
    submit: dict[str, Any] | None = None
    """A job spec."""


class TaskDiff(Struct, frozen=True, kw_only=True):
    """One task as it is and as it would be."""

    task: int
    """0: it would be submitted."""
    name: str
    tier: str
    weight: float
    slots_before: int
    slots: int
    waf_before: float
    """What it earns on what it has, by the table and at the weight of the dry run."""
    waf: float
    pause_s: float
    """What its change is expected to take: the one from before to after, however many plans lead
    there; where it has as many in the end and was interrupted on the way, the longest of those."""
    origin: str
    """Of the table by which it earns."""
    seats_before: tuple[Seat, ...]
    seats: tuple[Seat, ...]
    iteration: int
    waits: str = ""
    """Why it has no slots, and what would let it run; computed for this answer."""
    layout_before: str = ""
    layout: str = ""
    """Of a task that has one."""


class Tried(Struct, frozen=True, kw_only=True):
    """A dry run's outcome; or, where nothing was tried, the present plan."""

    tried: bool
    input: int
    """Of the state that it began with."""
    plan: PlanChosen | None
    """The last one, where one plan follows from another; None: there is nothing to plan. Beside
    what the record holds it has the plans without each limit, and `paid_back_s`."""
    planned: bool
    """Whether the change leads to a plan at all; `plan` else is the present one."""
    plan_s: float
    plan_seq: int
    """Of the present plan."""
    num_slots_before: int
    tasks: tuple[TaskDiff, ...]
    num_plans: int
    """How many plans follow one from another, each request's of the one before."""
    transition_flop: float
    """What all changes cost, each task's once."""
    more_slots: int
    """One node more."""
    more_waf: float
    """What the best plan would earn more with them."""
    held: str
    """Why nothing is acted upon; empty: healing is on."""
    seq: int = 0
    """Of the state that it began with."""
    at_s: float = 0.0
    """Of that state's last record."""
    computed_by: int = HEART
    """The decider's version that computed what the log does not hold: `waits`, `more_waf`, plans
    without limits, and all of a dry run."""
    is_cut: bool = False
    """Whether the plans without each limit are left out: they would take too long."""
    degraded: tuple[StragglerCostEstimated, ...] = ()
    """Of the nodes to be drained: those that slow tasks now, each as if it alone were drained.
    The tables, with which plans are made, do not know that they are slow."""


def attempt(data: bytes, change: Change) -> Tried:
    """What would follow from the change, of a state as of `encode_state`.

    Raises Refusal or SpecError for what an operator could not ask for either.
    """
    old, state = decode_state(data), decode_state(data)
    asked = plan_input(state).asked
    plans: list[PlanChosen] = []
    first: dict[int, Wish] = {}
    for report in _reports(state, change):
        for body in _told(state, report):
            if isinstance(body, PlanChosen):
                asked = plan_input(state).asked
                first = {wish.task: wish for wish in asked.wishes} | first
                plans.append(body)
    return replace(_tried(old, state, asked, plans, first),
                   degraded=tuple(_degraded(old, change.without)))


def present(data: bytes) -> Tried:
    """The plan as it stands, of a state as of `encode_state`."""
    state = decode_state(data)
    return _tried(state, state, plan_input(state).asked, [], {})


def of_input(asked: PlanInput, more: int) -> Tried:
    """The plan of an input that no cluster is behind. `more`: slots whose worth is computed too."""
    choice = choose(asked)
    plan = _filled(explain.of_input(asked, choice, {
        wish.task: wish.sizes[-1] for wish in asked.wishes if wish.sizes}), asked)
    wider = choose(replace(asked, num_slots=asked.num_slots + more)).plan.waf
    tasks = tuple(TaskDiff(
        task=wish.task, name=wish.name, tier="", weight=wish.weight, slots_before=wish.now, slots=x,
        waf_before=waf_of(wish, wish.now), waf=waf_of(wish, x), pause_s=charged_s(wish, x),
        origin="", seats_before=(), seats=(), iteration=0)
        for wish, x in zip(asked.wishes, choice.plan.slots, strict=True))
    return Tried(tried=True, input=0, plan=plan, planned=True, plan_s=0.0, plan_seq=0,
                 num_slots_before=asked.num_slots, tasks=tasks, num_plans=1,
                 transition_flop=plan.transition_flop, more_slots=more,
                 more_waf=max(wider - plan.waf, 0.0), held="")


def bodies(data: bytes, change: Change, reason: str) -> list[t.Body]:
    """The operators' requests that carry the change out, in order.

    Raises what `attempt` does, and Refusal for slots: nobody can ask for those.
    """
    if change.slots:
        raise Refusal(422, "slots that are not there cannot be applied",
                      "unicron agent, on a new machine, has it join")
    state, found = decode_state(data), list[t.Body]()
    for report in _reports(state, change, reason):
        found.append(report)
        for _ in _told(state, report):
            pass
    if not found:
        raise Refusal(422, "there is nothing to apply", "name a node, a weight or a job")
    return found


# --- carried out on a copy ----------------------------------------------------------------------
def _reports(state: ClusterState, change: Change, reason: str = "") -> Iterator[t.Body]:
    """What would be told, one after the other: each is asked for when those before are folded."""
    if change.slots:
        yield _joined(state, change.slots)
    for node in change.without:
        yield requests.drain(state, {"reason": reason}, node)
    for task, weight in change.weights.items():
        yield requests.set_weight(state, {"weight": weight, "reason": reason}, task)
    if change.submit is not None:
        yield requests.submit(state, change.submit, "")


def _told(state: ClusterState, body: t.Body) -> Iterator[t.Body]:
    """The heart's answer to one report, each part of it before it is folded (heart.advance)."""
    report = Report(source="operator/dry-run", source_seq=state.sources.get(
        "operator/dry-run", 0) + 1, occurred_s=state.at_s, body=body)
    record = report_record(state, report, epoch=state.epoch, at_s=state.at_s)
    fold(state, record)
    for answer in decide(state, record):
        yield answer
        fold(state, decision_record(state, answer, cause=record))


def _joined(state: ClusterState, num: int) -> t.Body:
    """Put all the new nodes but the last into the state; the last one joins."""
    if not 1 <= num <= MORE_NUM_MAX:
        raise Refusal(422, f"slots: {num} is not from 1 to {MORE_NUM_MAX:,}",
                      "slots that would be there besides those that are")
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
            return r.NodeJoined(node=name, incarnation=1, host="", pid=0, num_slots=part)
        state.nodes[name] = Node(name=name, incarnation=1, host="", pid=0, num_slots=part,
                                 accelerator="")


# --- the outcome --------------------------------------------------------------------------------
def _tried(old: ClusterState, state: ClusterState, asked: PlanInput,
           plans: Sequence[PlanChosen], first: Mapping[int, Wish]) -> Tried:
    """`asked`: what the last of `plans` was made of; `first`: each task as the first plan that
    knew it had found it."""
    plan = plans[-1] if plans else old.plan if live_tasks(state) else None
    plan = _filled(plan, asked) if plan is not None else None
    given = {x.task: x.slots for x in plan.allocations} if plan is not None else {}
    told: dict[int, list[Allocation]] = {}
    for one in plans:
        for x in one.allocations:
            told.setdefault(x.task, []).append(x)
    pauses_s = {task: _pause_s(wish, told[task]) for task, wish in first.items()}
    more, waits = node_slots(old) or _NODE_SLOTS_NUM, explained(state)
    wider = choose(replace(asked, num_slots=asked.num_slots + more)).plan.waf
    return Tried(
        tried=old is not state, input=input_digest(old), plan=plan, planned=bool(plans),
        plan_s=old.plan_s, plan_seq=old.plan_seq, num_slots_before=len(plan_input(old).slots),
        tasks=tuple(_diff(old.tasks.get(task.id), task, given.get(task.id, len(task.target)),
                          pauses_s.get(task.id, 0.0), waits.get(task.id))
                    for task in live_tasks(state)),
        num_plans=len(plans), transition_flop=math.fsum(
            waf_of(wish, first[wish.task].now) * pauses_s[wish.task]
            for wish in asked.wishes if plans), more_slots=more,
        more_waf=max(wider - plan.waf, 0.0) if plan is not None else 0.0, held=state.held,
        seq=old.seq, at_s=old.at_s, is_cut=is_too_much(asked))


def _filled(plan: PlanChosen, asked: PlanInput) -> PlanChosen:
    """The plan with what its record does not hold: the plans without each limit, and when it has
    paid for its changes. As it is where that would take too long, or where it does not fit."""
    given = {x.task: x.slots for x in plan.allocations}
    slots = tuple(given.get(wish.task, wish.now) for wish in asked.wishes)
    known = [other.slots for other in plan.alternatives]
    fits = sum(slots) <= asked.num_slots and all(
        not x or x in wish.sizes for wish, x in zip(asked.wishes, slots, strict=True))
    if not fits or is_too_much(asked):
        return plan
    more = (other for other in explain.lifted(asked, slots) if other.slots not in known)
    return replace(plan, alternatives=(*plan.alternatives, *more),
                   paid_back_s=plan.paid_back_s or explain.paid_back_s(asked, slots))


def is_too_much(asked: PlanInput) -> bool:
    """Whether the plans without each limit are left out, since they would take too long."""
    return asked.limits is not None and limited_work(asked) > LIFTED_WORK_NUM_MAX


def _degraded(state: ClusterState, names: Sequence[str]) -> Iterator[StragglerCostEstimated]:
    """What is so now: prices that are on record may be of a minute ago."""
    for name in names:
        if name in state.degraded and (priced := price(state, name)).cost_waf > 0:
            yield priced


def _pause_s(wish: Wish, told: Sequence[Allocation]) -> float:
    """`told`: by one plan after the other.

    The requests are told in one append, so what a plan in between orders is interrupted by the
    next one's: a task stands once. One that had nothing, and gets nothing, has nothing to stop.
    """
    charge_s = charged_s(wish, told[-1].slots)
    if charge_s or not wish.now:
        return charge_s
    return max(x.transition_s for x in told)


def _diff(old: Task | None, task: Task, slots: int, pause_s: float,
          waits: Waits | None) -> TaskDiff:
    seats = old.target if old is not None else ()
    return TaskDiff(
        task=task.id if old is not None else 0, name=task.spec.name,
        tier="train" if task.heals_in_memory else "command", weight=task.weight,
        slots_before=len(seats), slots=slots, waf_before=_waf(task, len(seats)),
        waf=_waf(task, slots), pause_s=pause_s,
        origin=task.throughput.origin if task.throughput is not None else "",
        seats_before=seats, seats=task.target, iteration=task.iteration,
        waits=f"{waits.why}; needs {waits.needs}" if waits is not None and not slots else "",
        layout_before=_layout(task, len(seats)), layout=_layout(task, slots))


def _layout(task: Task, slots: int) -> str:
    """In short: `TP2xDP2`."""
    on = axes(task.spec, task.modelled, slots) if slots else None
    return briefly(on) if on is not None else ""


def _waf(task: Task, slots: int) -> float:
    """As the planner counts it: slots may idle."""
    table = task.throughput
    if table is None or not slots:
        return 0.0
    return task.weight * dict(candidates(table, slots)).get(slots, 0.0)
