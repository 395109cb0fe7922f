"""What the calls that read the timeline answer."""

from itertools import groupby

from ..history.timeline import Timeline
from .messages import Curves, Mark, TimelineAnswer, TimelineQuery
from .requests import Refusal


def window(of: Timeline, query: TimelineQuery, last_seq: int = 0, now_s: float = 0.0
           ) -> TimelineAnswer:
    """The window that was asked for, until `now_s` if all is read. Raises Refusal if it ends before
    it begins."""
    read_s = max(now_s if of.past.seq >= last_seq else 0.0, of.past.at_s, of.first_s + 1e-3)
    from_s, to_s = query.from_s or of.first_s, query.to_s or read_s
    if to_s <= from_s:
        raise Refusal(400, "the window ends before it begins", "from < to")
    until_s = min(to_s, read_s)
    rows, num = of.most_used(from_s, until_s, query.buckets, query.rows) if not query.task else (
        [(query.task, of.spans.of(query.task, from_s, until_s, query.buckets))], 1)
    return {"first_seq": of.first_seq, "first_s": of.first_s, "read_seq": of.past.seq,
            "read_s": read_s, "last_seq": max(last_seq, of.past.seq), "from_s": from_s,
            "to_s": to_s, "num_tasks": num, "rows": [
                {"task": task, "name": of.past.tasks[task].name if task in of.past.tasks else "",
                 "spans": spans} for task, spans in rows],
            "free": [] if query.task else of.spans.of(0, from_s, until_s, query.buckets),
            "incidents": _marks(of, query, from_s, to_s)}


def _marks(of: Timeline, query: TimelineQuery, from_s: float, to_s: float) -> list[Mark]:
    """The incidents; of those in one bucket the first, and how many."""
    within = sorted((one for one in of.past.incidents.values() if one.fault_s <= to_s
                     and (one.closed_s is None or one.closed_s >= from_s)
                     and query.task in (0, one.task)
                     and query.node in ("", one.incident.node)), key=lambda one: one.fault_s)
    buckets = (list(near) for _, near in groupby(
        within, key=lambda one: (one.fault_s - from_s) * query.buckets // (to_s - from_s)))
    return [{"id": first.id, "at_s": first.fault_s, "until_s": first.closed_s, "task": first.task,
             "node": first.incident.node, "severity": first.incident.severity,
             "outcome": first.incident.outcome, "why": first.incident.why,
             "iteration": first.iteration, "num": 1 + len(others)} for first, *others in buckets]


def curves(of: Timeline, task: int) -> Curves:
    """Raises Refusal if the log has no such task."""
    if task not in of.past.tasks:
        raise Refusal(404, f"there is no task {task} in the log", "GET /v1/timeline")
    past, step_s = of.past.tasks[task], of.step_s[task]
    iterations = sorted({*past.losses, *step_s})
    return {"name": past.name, "iterations": iterations, "layouts": [
                {"at_s": at_s, "iteration": iteration, "layout": layout}
                for at_s, iteration, layout in of.layouts[task]],
            "losses": [past.losses.get(one) for one in iterations],
            "step_s": [step_s.get(one) for one in iterations]}
