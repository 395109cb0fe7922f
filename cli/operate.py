"""What operators ask of a running cluster: asked, then what followed, and what to type next."""

from __future__ import annotations

import getpass
import json
import math
import os
from itertools import takewhile
from typing import Any

from msgspec import Struct

from ..events.errors import UnicronError, UsageError
from . import say
from .client import Client, connect
from .figures import number_of, scaled, span
from .state_dir import StateDir
from .tasks import option_for, pick

Plain = dict[str, Any]
NAME_COLUMNS_MIN = 8


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
        return json.dumps({name: getattr(self, name) for name in self.__struct_fields__})


def _ask(client: Client, path: str, body: Plain) -> Followed:
    """Write the request; then read what the log has behind it with it as the cause."""
    seq = int(client.post(path, body)["seq"])
    found = list(takewhile(lambda record: record["cause"] == seq,
                           client.records(seq, follow=False)))

    def bodies(kind: str) -> list[Plain]:
        return [record["body"] for record in found if record["kind"] == kind]

    return Followed(
        seq=seq, plan=next(reversed(bodies("PlanChosen")), None), placed=bodies("TaskPlaced"),
        waiting=bodies("TaskWaiting"), withheld=bodies("OrderWithheld"),
        orders=[record["kind"] for record in found if "nodes" in record["body"]])


# --- the commands: each raises UsageError -------------------------------------------------------
def set_weight(state: StateDir, url: str | None, task: str, weight: float, reason: str, *,
               as_json: bool) -> None:
    """Make a task worth more or less."""
    if not math.isfinite(weight):
        raise UsageError(f"{weight} is not a weight", "for example unicron set-weight alpha 2")
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    found = pick(view["tasks"], task)
    followed = _ask(client, f"/v1/tasks/{found['id']}/weight",
                    {"weight": weight, "reason": _reason(reason)})
    head = (f"{_who(found)}  weight {found['weight']:g} -> {weight:g}"
            if weight != found["weight"] else f"{_who(found)}  weight {weight:g}, as before")
    _tell(state, head, followed, view, as_json=as_json)


def drain(state: StateDir, url: str | None, node: str, reason: str, *, as_json: bool) -> None:
    """Have tasks leave a node."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    found = _node(view, node)
    followed = _ask(client, f"/v1/nodes/{node}/drain", {"reason": _reason(reason)})
    on_it = {slot["task"] for slot in found["slots"] if slot["task"]}
    names = ", ".join(task["name"] for task in view["tasks"] if task["id"] in on_it)
    _tell(state, f"{node}  drained; {f'{names} shall leave it' if names else 'it was empty'}",
          followed, view, f"undo     unicron undrain {node}{option_for(state)}", as_json=as_json)


def undrain(state: StateDir, url: str | None, node: str, reason: str, *, as_json: bool) -> None:
    """Let a node have tasks again."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    _node(view, node)
    followed = _ask(client, f"/v1/nodes/{node}/undrain", {"reason": _reason(reason)})
    _tell(state, f"{node}  may have tasks again", followed, view, as_json=as_json)


def freeze(state: StateDir, url: str | None, reason: str, *, as_json: bool) -> None:
    """Hold healing."""
    why = _reason(reason)
    followed = _ask(connect(state, url), "/v1/freeze", {"reason": why})
    if as_json:
        say.out(followed.as_json())
        return
    say.out(f"healing is frozen: {why} (seq {followed.seq})")
    say.out("         tasks train on; what has begun is completed; of what comes, nothing is "
            "ordered")
    _next(state, f"undo     unicron unfreeze{option_for(state)}")


def unfreeze(state: StateDir, url: str | None, reason: str, *, as_json: bool) -> None:
    """Heal again."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    followed = _ask(client, "/v1/unfreeze", {"reason": _reason(reason)})
    observes = client.get("/v1/state")["cluster"]["healing"]
    view["cluster"]["healing"] = observes
    head = "healing is on" if observes == "on" else f"no longer frozen, but {observes}"
    waited = [f"waited   {task['name']}: {task['withheld']}" for task in view["tasks"]
              if task["withheld"]]
    _tell(state, head, followed, view, waited=waited, as_json=as_json)


def inject_rank(state: StateDir, url: str | None, task: str, rank: int | None, reason: str, *,
                as_json: bool, stop_s: float | None = None) -> None:
    """Kill one rank, or stop it for `stop_s` (0: for good). None: the highest that trains."""
    client = connect(state, url)
    found = pick(client.get("/v1/state")["tasks"], task)
    running = {int(one["rank"]): one for one in found["ranks"] if one["pid"]}
    members = [number for number, one in running.items() if one["state"] == "member"]
    if not running:
        raise UsageError(f"{_who(found)} runs no rank", f"unicron status {found['id']}")
    number = max(members or running) if rank is None else rank
    followed = _ask(client, "/v1/inject", {
        "what": "rank" if stop_s is None else "stop", "task": found["id"], "rank": number,
        "stop_s": stop_s or 0.0, "reason": _reason(reason)})
    place = running.get(number)
    where = f" on {place['node']}/{place['slot']}, pid {place['pid']}," if place else ""
    how = "will be killed" if stop_s is None else (
        f"will be stopped for {span(stop_s)}" if stop_s else "will be stopped for good")
    _tell_fault(state, followed, f"{_who(found)}  rank {number}{where} {how} on purpose",
                f"unicron tail -f --task {found['name']}", as_json=as_json)


def inject_node(state: StateDir, url: str | None, node: str, reason: str, *,
                as_json: bool) -> None:
    """Kill a node's agent with all its ranks."""
    client = connect(state, url)
    found = _node(client.get("/v1/state"), node)
    followed = _ask(client, "/v1/inject", {"what": "node", "node": node,
                                           "reason": _reason(reason)})
    num = sum(1 for slot in found["slots"] if slot["task"])
    _tell_fault(state, followed, f"{node}  the agent (pid {found['pid']}) and its "
                f"{number_of(num, 'rank')} will be killed on purpose", "unicron status nodes",
                as_json=as_json)


# --- answers ------------------------------------------------------------------------------------
def _tell(state: StateDir, head: str, followed: Followed, view: Plain, undo: str = "", *,
          waited: list[str] | None = None, as_json: bool) -> None:
    """What was asked, the plan that followed with what it beat, and who moves where."""
    if as_json:
        say.out(followed.as_json())
        return
    say.out(f"{head} (seq {followed.seq})")
    for line in [*(waited or []), *plan_lines(followed, view)]:
        say.out(line)
    held = view["cluster"]["healing"]
    if held != "on":
        way = "unicron down, then unicron up --act" if held == "observing" else "unicron unfreeze"
        say.out(f"held     {held}; planned, and nothing ordered. To act: {way}")
    _next(state, undo)


def plan_lines(followed: Followed, view: Plain) -> list[str]:
    """The plan against the one before, then a line for each task that it changes.

    `view` is the state before the request, as of GET /v1/state.
    """
    plan, before = followed.plan, view["plan"]
    if plan is None:
        return ["plan     as it was"]
    waf = f"{scaled(plan['waf'], 'FLOP/s')}"
    was = f"{scaled(before['waf'], 'FLOP/s')} -> " if before else ""
    beaten = [f"{one['what']}: {scaled(one['waf'], 'FLOP/s')}" for one in plan["alternatives"][:2]]
    lines = [f"plan     {number_of(plan['num_slots'], 'slot')}, WAF {was}{waf}",
             *([f"beat     {'; '.join(beaten)}"] if beaten else [])]
    tasks = {task["id"]: task for task in view["tasks"]}
    placed = {body["task"]: body["seats"] for body in followed.placed}
    waiting = {body["task"]: body for body in followed.waiting}
    changed = [one["task"] for one in plan["allocations"]
               if one["task"] in placed or one["slots"] != one["slots_before"]]
    width = max([NAME_COLUMNS_MIN, *(len(tasks[number]["name"]) for number in changed)])
    for one in plan["allocations"]:
        if one["task"] in changed:
            task = tasks[one["task"]]
            lines.append(f"{task['name']:<{width}} {one['slots_before']} -> "
                         + number_of(one['slots'], "slot")
                         + _way(task, placed.get(one["task"]), waiting.get(one["task"])))
    return lines if changed else [*lines, "         no task moves"]


def _way(task: Plain, seats: list[Plain] | None, waits: Plain | None) -> str:
    """Where a task goes, or how it stops."""
    if seats is None:
        return ""
    if not seats:
        first = ("stopped" if task["tier"] == "command" else
                 "saved first, no iteration lost" if task["iteration"] else "stopped")
        needs = f", needs {waits['needs']}" if waits is not None else ""
        return f": {first}; then it waits{needs}"
    places = " ".join(f"{seat['slot']['node']}/{seat['slot']['index']}" for seat in seats)
    stays = {seat["slot"]["node"] for seat in seats}
    leaves = sorted({str(rank["node"]) for rank in task["ranks"]} - stays)
    again = "; it starts again" if task["tier"] == "command" and task["ranks"] else ""
    return f": {places}{f', leaves {chr(32).join(leaves)}' if leaves else ''}{again}"


def _tell_fault(state: StateDir, followed: Followed, head: str, look: str, *,
                as_json: bool) -> None:
    if "InjectFault" not in followed.orders:
        raise UnicronError("it was gone before it could be broken; nothing was done")
    if as_json:
        say.out(followed.as_json())
        return
    say.out(f"{head} (seq {followed.seq})")
    say.out(f"look     {look}{option_for(state)}   unicron status -w{option_for(state)}")


def _next(state: StateDir, undo: str) -> None:
    say.out(f"look     unicron status -w{option_for(state)}")
    if undo:
        say.out(undo)


def _who(task: Plain) -> str:
    return f"{task['name']} (task {task['id']})"


def _node(view: Plain, name: str) -> Plain:
    """The node of that name. Raises UsageError naming those there are."""
    found = [node for node in view["nodes"] if node["id"] == name]
    if found:
        return dict(found[0])
    names = ", ".join(str(node["id"]) for node in view["nodes"][:8])
    raise UsageError(f"no node {name!r}", f"there is {names}" if names else
                     "there are none yet: unicron up, or unicron agent --url URL")


def _reason(given: str) -> str:
    """The reason as given; else who asks."""
    if given:
        return given
    try:
        return f"by {getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name
        return f"by user {os.getuid()}"
