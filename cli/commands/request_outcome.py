"""What the control plane decided upon one request: its records, and in words."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from msgspec import Struct

from ..cluster.client import Client
from ..terminal.format import labelled, number_of, plan_waf, scaled

Plain = dict[str, Any]
NAME_COLUMNS_MIN = 8
EXPLAINED = ("why", "needs", "cost_waf", "weight_from")
"""Fields of a waiting task that are computed on request."""
TIE_RATIO = 1e-4
"""Two plans that are no further apart count as equal where they are told."""


class Followed(Struct, frozen=True, kw_only=True):
    """What the control plane decided upon one request: records of the same append, as bodies."""

    seq: int
    plan: Plain | None
    placed: list[Plain]
    waiting: list[Plain]
    withheld: list[Plain]
    orders: list[str]
    """The kinds of the orders that went out at once."""

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(msgspec.structs.asdict(self))


def followed_by(client: Client, seq: int) -> Followed:
    """Read what the log has behind a request with it as the cause.

    Requests of one write stand in one append: what followed from each of them is of it.
    """
    found: list[Plain] = []
    source, causes = "", {seq}
    for record in client.records(seq - 1, follow=False):
        source = source or record["source"]
        if record["source"] == source:
            causes.add(record["seq"])
        elif record["cause"] in causes:
            found.append(record)
        else:
            break

    def bodies(kind: str) -> list[Plain]:
        return [record["body"] for record in found if record["kind"] == kind]

    return Followed(
        seq=seq, plan=_joined(bodies("PlanChosen")), placed=bodies("TaskPlaced"),
        waiting=_explained(client, bodies("TaskWaiting")), withheld=bodies("OrderSuppressed"),
        orders=[record["kind"] for record in found if "nodes" in record["body"]])


def _explained(client: Client, waiting: list[Plain]) -> list[Plain]:
    """What each of these tasks needs as of now: the log has only why it waits."""
    if not waiting:
        return []
    tasks = {task["id"]: task for task in client.get("/v1/state", explain=1)["tasks"]}
    return [{**body, **{key: tasks[body["task"]][key] for key in EXPLAINED}}
            if tasks.get(body["task"], {}).get("needs") else body for body in waiting]


def _joined(plans: list[Plain]) -> Plain | None:
    """The last plan, told against what there was before the first."""
    if not plans:
        return None
    before = {one["task"]: one["slots_before"] for plan in reversed(plans)
              for one in plan["allocations"]}
    return {**plans[-1], "allocations": [
        {**one, "slots_before": before[one["task"]]} for one in plans[-1]["allocations"]]}


def plan_lines(followed: Followed, view: Plain) -> list[str]:
    """The plan against the one before, then a line for each task that it changes.

    `view` is the state before the request, as of GET /v1/state.
    """
    plan, before = followed.plan, view["plan"]
    tasks = {task["id"]: task for task in view["tasks"]}
    if plan is None:
        return ["plan     as it was", *_waits(followed.waiting, tasks)]
    waf = scaled(plan_waf(plan), "FLOP/s")
    now = {one["task"] for one in [*plan["allocations"], *plan.get("kept", ())]}
    was = f"{scaled(plan_waf(before, now), 'FLOP/s')} -> " if before else ""
    beaten = [f"{one['what']}: {scaled(one['waf'], 'FLOP/s')}{hidden(one['waf'], plan['waf'])}"
              for one in plan["alternatives"][:2]]
    lines = [f"plan     {number_of(plan['num_slots'], 'slot')}, WAF {was}{waf}",
             *([f"beat     {'; '.join(beaten)}"] if beaten else [])]
    placed = {body["task"]: body["seats"] for body in followed.placed}
    waiting = {body["task"]: body for body in followed.waiting}
    changed = [one for one in plan["allocations"]
               if one["task"] in placed or one["slots"] != one["slots_before"]]
    names = {one["task"]: str(tasks[one["task"]]["name"]) if one["task"] in tasks
             else f"task {one['task']}" for one in changed}
    width = max([NAME_COLUMNS_MIN, *map(len, names.values())])
    for one in changed:
        number = one["task"]
        lines.append(f"{names[number]:<{width}} {one['slots_before']} -> "
                     + number_of(one["slots"], "slot")
                     + _way(tasks.get(number), placed.get(number), waiting.get(number)))
    told = _waits([body for body in followed.waiting if body["task"] not in names], tasks)
    if told:  # else nothing changed for those who wait
        given = {one["task"]: one["slots"] for one in plan["allocations"]}
        rest = [task["name"] for number, task in tasks.items() if number not in waiting
                and number not in names and task["state"] == "waiting" and not given.get(number)]
        told += labelled("waits", f"as before: {', '.join(rest)}", 9) if rest else []
    return [*lines, *([] if changed else ["         no task moves"]), *told]


def hidden(waf: float, chosen: float) -> str:
    """`, 0.3 % less`: how far a beaten plan's WAF is off, where it reads as the chosen one's."""
    if scaled(waf, "") != scaled(chosen, "") or math.isclose(waf, chosen, rel_tol=TIE_RATIO):
        return ""
    return f", {100 * abs(waf / chosen - 1):.1g} % {'less' if waf < chosen else 'more'}"


def view_before(before: Plain, after: Plain) -> Plain:
    """The view before a request, with the tasks that came with it; these had no ranks."""
    known = {task["id"] for task in before["tasks"]}
    return {**before, "tasks": [*before["tasks"], *(
        {**task, "ranks": []} for task in after["tasks"] if task["id"] not in known)]}


def _waits(waiting: list[Plain], tasks: dict[int, Plain]) -> list[str]:
    """Who got nothing before and gets nothing now: why, and what it needs."""
    return [line for body in waiting if body["task"] in tasks for line in labelled(
        "waits", f"{tasks[body['task']]['name']}: {body['why']}{_needs(body, '; needs')}", 9)]


def _needs(body: Plain, words: str) -> str:
    return f"{words} {body['needs']}" if body["needs"] else ""


def _way(task: Plain | None, seats: list[Plain] | None, waits: Plain | None) -> str:
    """Where a task goes, or how it stops; not of one that came with the request or after it."""
    if seats is None or task is None:
        return ""
    if not seats:
        first = ("stopped" if task["tier"] == "command" else
                 "saved first, no iteration lost" if task["iteration"] else "stopped")
        needs = _needs(waits, ", needs") if waits is not None else ""
        return f": {first}; then it waits{needs}"
    places = " ".join(f"{seat['slot']['node']}/{seat['slot']['index']}" for seat in seats)
    stays = {seat["slot"]["node"] for seat in seats}
    leaves = " ".join(sorted({str(rank["node"]) for rank in task["ranks"]} - stays))
    again = "; it starts again" if task["tier"] == "command" and task["ranks"] else ""
    return f": {places}{f', leaves {leaves}' if leaves else ''}{again}"
