"""GET /v1/timeline, /v1/tasks/{task}/curves and /v1/incidents/{incident}/phases: answers from the
timeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import fsum

from msgspec import Struct

from ..history.history import IncidentHistory
from ..history.timeline import Generation, Span, Timeline
from .messages import TimelineQuery
from .requests import Refusal


class Row(Struct):
    """What the slots of a task did. Times are in seconds since 1970."""

    task: int
    name: str
    spans: list[Span]


class Mark(Struct):
    """An incident; of several that are too close to be drawn, the first, and how many."""

    id: int
    at_s: float
    until_s: float
    """0: it is open."""
    task: int
    node: str
    severity: str
    outcome: str
    why: str
    num: int


class TimelineAnswer(Struct, kw_only=True):
    """A window of the log. The log begins with record `first_seq` at `first_s`; it was read until
    `read_seq`, of `last_seq`: if that is less, ask again."""

    first_seq: int
    first_s: float
    read_seq: int
    read_s: float
    last_seq: int
    from_s: float
    to_s: float
    rows: list[Row]
    num_tasks: int
    """Tasks with slots in the window; `rows` has those with most slot time."""
    free: list[Span]
    """The slots of no task."""
    incidents: list[Mark]


class Phases(Struct, kw_only=True):
    """When an incident reached each phase, in seconds since 1970; None: not reached."""

    id: int
    task: int
    fault_s: float
    detected_s: float
    decided_s: float
    ordered_s: float | None
    rebuilt_s: float | None
    resumed_s: float | None
    stepped_s: float | None
    closed_s: float | None
    first_seq: int
    closed_seq: int
    iteration: int | None
    layouts: list[str]
    evidence: list[int]
    num_slots: int
    slot_s: float
    """Slot seconds without progress."""


class Point(Struct, array_like=True):
    """Of an iteration, or of several as the last loss and the longest time."""

    iteration: int
    loss: float | None
    step_s: float | None


class Fault(Struct):
    incident: int
    at_s: float
    iteration: int
    severity: str


class Curves(Struct, kw_only=True):
    """A task's iterations, layouts, and the iterations that faults interrupted."""

    name: str
    points: list[Point]
    layouts: list[Generation]
    faults: list[Fault]


def timeline(of: Timeline, query: TimelineQuery, last_seq: int = 0, now_s: float = 0.0
             ) -> TimelineAnswer:
    """The window that was asked for, until `now_s` if all is read. Raises Refusal if it ends before it begins."""
    from_s = query.from_s or of.first_s
    until_s = max(now_s if of.seq >= last_seq else 0.0, of.at_s)
    to_s = query.to_s or max(until_s, from_s + 1e-3)
    if to_s <= from_s:
        raise Refusal(400, "the window ends before it begins", "from < to")
    rows: list[tuple[float, Row]] = []
    for task in [query.task] if query.task else of.spans.tasks():
        spans = of.spans.of(task, from_s, min(to_s, until_s), query.buckets)
        if spans:
            slot_s = fsum((one.to_s - one.from_s) * fsum(one.slots.values()) for one in spans)
            name = of.tasks[task].name if task in of.tasks else str(task)
            rows.append((slot_s, Row(task, name, spans)))
    most = sorted(rows, key=lambda row: -row[0])[:query.rows]
    return TimelineAnswer(
        first_seq=of.first_seq, first_s=of.first_s, read_seq=of.seq, read_s=until_s,
        last_seq=max(last_seq, of.seq), from_s=from_s, to_s=to_s, num_tasks=len(rows),
        rows=sorted((row for _, row in most), key=lambda row: row.task),
        free=[] if query.task else of.spans.of(0, from_s, min(to_s, until_s), query.buckets),
        incidents=list(_marks(of, query, from_s, to_s)))


def _marks(of: Timeline, query: TimelineQuery, from_s: float, to_s: float) -> Iterator[Mark]:
    within = [one for one in of.incidents.values() if one.fault_s <= to_s
              and (one.closed_s is None or one.closed_s >= from_s)
              and query.task in (0, one.task)]
    within.sort(key=lambda one: one.fault_s)
    width_s = (to_s - from_s) / query.buckets
    for _, near in groupby(within, key=lambda one: (one.fault_s - from_s) // width_s):
        first, *others = near
        known = first.incident
        yield Mark(first.id, first.fault_s, first.closed_s or 0.0, first.task, known.node,
                   known.severity, known.outcome, known.why, 1 + len(others))


def curves(of: Timeline, task: int, points_num_max: int) -> Curves:
    """Raises Refusal if there is no such task."""
    past = of.tasks.get(task)
    if past is None:
        raise Refusal(404, f"there is no task {task} in the log", "GET /v1/tasks")
    steps, iterations = of.step_s[task], sorted({*past.losses, *of.step_s[task]})
    points: list[Point] = []
    every = -(-len(iterations) // points_num_max) or 1
    for begin in range(0, len(iterations), every):
        some = iterations[begin:begin + every]
        points.append(Point(
            some[-1], next((past.losses[i] for i in reversed(some) if i in past.losses), None),
            max((steps[i] for i in some if i in steps), default=None)))
    return Curves(name=past.name, points=points, layouts=of.layouts[task], faults=[
        Fault(one.id, one.fault_s, one.iteration, one.incident.severity)
        for one in of.incidents.values() if one.task == task and one.iteration is not None])


def phases(of: Timeline, incident: int) -> Phases:
    """Raises Refusal if there is no such incident."""
    one = of.incidents.get(incident)
    if one is None:
        raise Refusal(404, f"there is no incident {incident} in the log", "GET /v1/timeline")
    return Phases(id=one.id, task=one.task, **{
        name: getattr(one, name) for name in Phases.__struct_fields__
        if name in IncidentHistory.__struct_fields__})
