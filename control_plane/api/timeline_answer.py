"""What the calls that read the timeline answer."""

from itertools import groupby
from statistics import median
from typing import cast

import msgspec

from ..history.history import History, IncidentHistory
from ..history.timeline import Timeline
from .incident_facts import cost
from .messages import (
    AllIncidents,
    Curves,
    IncidentInFull,
    IncidentRow,
    Mark,
    Read,
    TaskView,
    TimelineAnswer,
    TimelineQuery,
)
from .requests import Refusal
from .view import task_view


def window(
    of: Timeline, query: TimelineQuery, last_seq: int = 0, now_s: float = 0.0
) -> TimelineAnswer:
    """The window that was asked for, until `now_s` if all is read. Raises Refusal if it ends before
    it begins."""
    read_s = max(now_s if of.past.seq >= last_seq else 0.0, of.past.at_s, of.first_s + 1e-3)
    from_s, to_s = query.from_s or of.first_s, query.to_s or read_s
    if to_s <= from_s:
        raise Refusal(400, "the window ends before it begins", "from < to")
    until_s = min(to_s, read_s)
    rows, num = (
        of.most_used(from_s, until_s, query.buckets, query.rows)
        if not query.task
        else ([(query.task, of.spans.of(query.task, from_s, until_s, query.buckets))], 1)
    )
    return {
        "first_seq": of.first_seq,
        "first_s": of.first_s,
        "read_seq": of.past.seq,
        "read_s": read_s,
        "last_seq": max(last_seq, of.past.seq),
        "from_s": from_s,
        "to_s": to_s,
        "num_tasks": num,
        "rows": [
            {
                "task": task,
                "name": of.past.tasks[task].name if task in of.past.tasks else "",
                "spans": spans,
            }
            for task, spans in rows
        ],
        "free": [] if query.task else of.spans.of(0, from_s, until_s, query.buckets),
        "incidents": _marks(of, query, from_s, to_s),
    }


def _marks(of: Timeline, query: TimelineQuery, from_s: float, to_s: float) -> list[Mark]:
    """The incidents; of those in one bucket the first, and how many."""
    within = sorted(
        (
            one
            for one in of.past.incidents.values()
            if one.fault_s <= to_s
            and (one.closed_s is None or one.closed_s >= from_s)
            and query.task in (0, one.task)
            and query.node in ("", one.incident.node)
        ),
        key=lambda one: one.fault_s,
    )
    buckets = (
        list(near)
        for _, near in groupby(
            within, key=lambda one: (one.fault_s - from_s) * query.buckets // (to_s - from_s)
        )
    )
    return [
        {
            "id": first.id,
            "at_s": first.fault_s,
            "until_s": first.closed_s,
            "task": first.task,
            "node": first.incident.node,
            "severity": first.incident.severity,
            "outcome": "" if first.outcome == "open" else first.outcome,
            "why": first.incident.why,
            "iteration": first.iteration,
            "num": 1 + len(others),
        }
        for first, *others in buckets
    ]


def curves(of: Timeline, wanted: str, last_seq: int = 0, now_s: float = 0.0) -> Curves:
    """The past of the task of that id, or the newest of that name. Raises Refusal if the log has
    none; until `last_seq` is read, the answer is then one without a task (0)."""
    number = max(
        (
            key
            for key, one in of.past.tasks.items()
            if wanted in (one.name, str(key), f"task-{key}")
        ),
        default=0,
    )
    if not number and of.past.seq >= last_seq:
        raise Refusal(404, f"there is no task {wanted[:64]} in the log", "GET /v1/timeline")
    losses = of.past.tasks[number].losses if number else {}
    step_s = of.step_s.get(number, {})
    iterations = sorted({*losses, *step_s})
    return {
        **past_of(of.past, number, now_s),
        **_read(of, last_seq),
        "iterations": iterations,
        "losses": [losses.get(one) for one in iterations],
        "step_s": [step_s.get(one) for one in iterations],
        "layouts": [
            {"at_s": at_s, "iteration": iteration, "layout": layout}
            for at_s, iteration, layout in of.layouts.get(number, ())
        ],
    }


def incidents(
    of: Timeline, since_s: float = 0.0, last_seq: int = 0, now_s: float = 0.0
) -> AllIncidents:
    """All incidents, losses of nodes and outages that lasted beyond `since_s`."""
    return {**incidents_of(of.past, since_s, now_s), **_read(of, last_seq)}


def _read(of: Timeline, last_seq: int) -> Read:
    return {
        "first_seq": of.first_seq,
        "read_seq": of.past.seq,
        "last_seq": max(last_seq, of.past.seq),
    }


# --- of a history, however it was read ---
NO_TASK: Curves = {
    "first_seq": 0,
    "read_seq": 0,
    "last_seq": 0,
    "task": 0,
    "name": "",
    "view": None,
    "iterations": [],
    "losses": [],
    "loss_marks": [],
    "step_s": [],
    "layouts": [],
    "skipped": 0,
    "copied_s": 0.0,
    "pace": None,
    "ended": False,
    "outputs": [],
    "incidents": [],
}


def past_of(history: History, number: int, now_s: float) -> Curves:
    """A task's past without iteration times and layouts; NO_TASK if the history has no such."""
    past = history.tasks.get(number)
    if past is None:
        return NO_TASK
    num, iterations = len(past.task.members), sorted(past.losses)
    own = past.paces_s.get(num, [])
    return {
        **NO_TASK,
        "task": number,
        "name": past.name,
        "view": None
        if number in history.state.tasks
        else cast(TaskView, task_view(history.state, past.task)),
        "iterations": iterations,
        "losses": [past.losses[one] for one in iterations],
        "loss_marks": [
            {"iteration": at, "what": past.loss_marks[at]} for at in sorted(past.loss_marks)
        ],
        "skipped": past.skipped,
        "copied_s": past.copied_s,
        "ended": bool(past.task.outcome),
        "pace": {"slots": num, "num": len(own), "median_s": median(own)} if own else None,
        "outputs": [msgspec.to_builtins(one) for one in past.outputs.values()],
        "incidents": [
            _row(history, one, now_s) for one in history.incidents.values() if one.task == number
        ],
    }


def _row(history: History, one: IncidentHistory, now_s: float) -> IncidentRow:
    known = one.incident
    return {
        "id": one.id,
        "task": one.task,
        "severity": known.severity,
        "status": known.status,
        "ranks": known.ranks,
        "outcome": one.outcome,
        "detected_s": one.detected_s,
        "pause_s": one.pause_s,
        "iterations_lost": known.iterations_lost,
        "slot_s": history.slot_s(one, now_s),
        "iteration": one.iteration,
    }


def incidents_of(history: History, since_s: float, now_s: float) -> AllIncidents:
    """The incidents of a history that lasted beyond a time, with their nodes and outages."""
    shown = [one for one in history.incidents.values() if (one.closed_s or now_s) >= since_s]
    losses = history.absences.of_consequence({one.id: one.incident.evidence for one in shown})
    return {
        "first_seq": 0,
        "read_seq": history.seq,
        "last_seq": history.seq,
        "incidents": [_in_full(history, one, now_s) for one in shown],
        "node_losses": [
            {
                "id": one.id,
                "what": one.what,
                "nodes": one.nodes,
                "since_s": one.since_s,
                "back_s": one.back_s,
                "incidents": one.incidents,
                "in_words": one.in_words,
            }
            for one in losses
        ],
        "outages": [
            {"id": seq, "outage": msgspec.to_builtins(one)}
            for seq, one in history.outages.items()
            if one.since_s + one.length_s >= since_s
        ],
    }


def _in_full(history: History, one: IncidentHistory, now_s: float) -> IncidentInFull:
    """The fields of the state, and the times."""
    found = {
        **msgspec.to_builtins(one.incident),
        **msgspec.to_builtins(one),
        **cost(history, one, now_s),
        "outcome": one.outcome,
        "name": history.name_of(one.task) if one.task else "",
        "counted_s": history.at_s if one.closed_s is None else one.closed_s,
    }
    return cast(IncidentInFull, {key: found[key] for key in IncidentInFull.__annotations__})
