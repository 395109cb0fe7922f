"""`explain`: what a decision rests on, what it was preferred to, and what followed from it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ...control_plane.api.dry_run import explain_present_plan
from ...control_plane.api.incident_facts import plan_facts, rule
from ...control_plane.history.history import PROGRESS, History, history
from ...control_plane.state.cluster import encode_state
from ...events.errors import UsageError
from ...events.records.codec import to_plain
from ...events.records.decisions import IncidentEscalated, IncidentOpened, PlanChosen, TaskWaiting
from ...events.records.envelope import Record
from ...events.records.in_words import line
from ..cluster.client import Urls
from ..cluster.state_dir import StateDir
from ..screens import incident as incident_screen
from ..terminal import console
from ..terminal.format import Plain
from .offline import Log
from .replay import foldable, open_log
from .tasks import option_for

IDENTITY = ("task", "rank", "attempt", "generation")
"""An order and the reports that answer it have these fields in common."""
LINES_NUM_MAX = 40


def explain(state: StateDir, url: Urls, seq: int, path: Path | None, *,
            as_json: bool) -> None:
    """Print what the log knows about one record. Raises UsageError, NewerLog."""
    log = open_log(state, url, path)
    one = next((x for x in log.read() if x.seq == seq), None)
    if one is None:
        raise UsageError(f"the log has no record {seq}", "unicron tail shows which it has")
    with foldable(path):
        found = facts(one, log)
    page = f"replay {path} --incident" if path is not None else "incident"
    more = f"next: unicron {page} {one.incident}{option_for(state)}"
    console.show(found, [*_page(found), *[more] * bool(one.incident)], as_json=as_json)


def facts(one: Record, log: Log) -> Plain:
    """The records and reasons of `one`, read only as far as something follows from it."""
    wanted = {one.cause, one.incident, *getattr(one.body, "evidence", ())}
    past, basis, followed = history((), log.state()), list[Record](), list[Record]()
    why, plan = "", None
    for x in log.read():
        if x.seq < one.seq:
            planned = x.cause == one.cause != 0 and isinstance(x.body, PlanChosen)
            if planned or x.seq in wanted:
                basis.append(x)
        elif x.seq > one.seq:
            is_open = one.seq in past.state.orders or one.seq in past.open
            if not x.cause and not is_open:
                break
            if _follows(one, x):
                followed.append(x)
        past.add(x)
        if x.seq == one.seq:
            why, plan = _reasons(x, past)
    return {"record": to_plain(one), "basis": [*map(to_plain, basis)], "why": why, "plan": plan,
            "followed": [*map(to_plain, followed)]}


def _reasons(one: Record, past: History) -> tuple[str, Plain | None]:
    """Why it was decided so, and for a plan what it was preferred to; in part computed now."""
    if isinstance(one.body, IncidentOpened | IncidentEscalated):
        return f"by the rule: {rule(one.body)}", None
    if not isinstance(one.body, PlanChosen | TaskWaiting):
        return "", None
    found = explain_present_plan(encode_state(past.state))
    if isinstance(one.body, PlanChosen):
        return "", plan_facts(past, replace(one, body=found.plan or one.body))
    return next((f"computed by decider version {found.computed_by}: {task.waits}"
                 for task in found.tasks if task.task == one.body.task), ""), None


def _page(found: Plain) -> list[str]:
    basis, why, plan, followed = (found[name] for name in ("basis", "why", "plan", "followed"))
    left = len(followed) - LINES_NUM_MAX
    return [line(found["record"]), "", "rests on", *map(line, basis), *[why] * bool(why),
            *(incident_screen.plan_lines(plan) if plan else ()), "", "then followed",
            *map(line, followed[:LINES_NUM_MAX]),
            *[f"and {left} more: -o json has all"] * (left > 0)]


def _follows(one: Record, x: Record) -> bool:
    """Decisions of the same report or incident, and what answers an order."""
    if x.cause:
        return x.cause in (one.cause or one.seq, one.seq) or one.seq == x.incident
    shared = [name for name in IDENTITY if hasattr(one.body, name)]
    return getattr(x.body, "order", 0) == one.seq or (
        len(shared) > 1 and not isinstance(x.body, PROGRESS)
        and all(getattr(x.body, name, None) == getattr(one.body, name) for name in shared))
