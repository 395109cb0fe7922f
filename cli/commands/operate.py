"""Operator requests to a running cluster: the request, the resulting plan, and the next command."""

import getpass
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from urllib.parse import quote

import msgspec

from ...control_plane.api import needs
from ...events.errors import UnicronError, UsageError
from ...events.spec.job import is_url
from ..cluster.client import Client, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, listed, number_of, span, way_to_act
from .names import SHOWN_NUM, chosen, is_pattern, pick
from .outputs import check_free, check_possible
from .request_outcome import Outcome, outcome_of, plan_lines
from .tasks import incident_id, option_for

POLL_S = 0.05
LIFT_S_MAX = 60.0
"""The agents of the nodes check devices before the answer."""
WEIGHT, WEIGHT_HINT = "a weight is above 0", "for example unicron set-weight alpha 2"


def _request(client: Client, path: str, reason: str, **body: object) -> Outcome:
    """Send the request; return the decisions that follow from it."""
    answer = client.post(path, {**body, "reason": reason_or_user(reason)})
    return outcome_of(client, int(answer["seq"]))


def _node_request(
    state: StateDir, url: Urls, words: Sequence[str], act: str, reason: str, **body: object
) -> tuple[Plain, list[Plain], str, Outcome]:
    """Request `act` of these nodes, in one append. Returns the view before it, the nodes in that
    view, their names with commas between, and the decisions that follow."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    nodes = pick_nodes(view["nodes"], words)
    names = ",".join(one["id"] for one in nodes)
    return view, nodes, names, _request(client, f"/v1/nodes/{names}/{act}", reason, **body)


# --- Commands. Each raises UsageError. ---
def set_weight(
    state: StateDir, url: Urls, task: str, weight: float, reason: str, *, as_json: bool
) -> None:
    """Set the weight of a task."""
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"{weight:g} is not a weight: {WEIGHT}", WEIGHT_HINT)
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    found = pick(view["tasks"], task)
    followed = _request(client, f"/v1/tasks/{found['id']}/weight", reason, weight=weight)
    head = (
        f"{_who(found)}  weight {found['weight']:g} -> {weight:g}"
        if weight != found["weight"]
        else f"{_who(found)}  weight {weight:g}, as before"
    )
    _show(state, head, followed, _effects(state, followed, view), as_json=as_json)


def move_checkpoints(
    state: StateDir, url: Urls, task: str, to: str, reason: str, *, as_json: bool
) -> None:
    """Save the checkpoints of a task to another folder from now on."""
    if not to:
        raise UsageError("--to names no folder", "for example --to /data/run-2")
    client = connect(state, url)
    view = pick(client.get("/v1/state")["tasks"], task)
    output = to if is_url(to) else os.path.abspath(to)
    check_free(output, "--to", client)
    check_possible(output, "--to", url)
    followed = _request(client, f"/v1/tasks/{view['id']}/checkpoint", reason, output=output)
    head = f"{_who(view)}  saves to {output}; until now to {view['output']}"
    look = f"unicron status {view['name']}{option_for(state)}   "
    _show(state, head, followed, look=look, as_json=as_json)


def drain(
    state: StateDir,
    url: Urls,
    node: Sequence[str],
    reason: str,
    *,
    as_json: bool,
    down: bool = False,
) -> None:
    """Remove the tasks from nodes; with `down` also what counts as lost there, for it is off."""
    view, nodes, names, followed = _node_request(
        state, url, node, "drain", reason, **({"down": True} if down else {})
    )
    there = {slot["task"] for found in nodes for slot in found["slots"] if slot["task"]}
    leave = ", ".join(task["name"] for task in view["tasks"] if task["id"] in there)
    it, they_were = ("them", "they were") if len(nodes) > 1 else ("it", "it was")
    head = f"{names}  drained; {f'{leave} shall leave {it}' if leave else f'{they_were} empty'}"
    _show(
        state,
        head,
        followed,
        _effects(state, followed, view),
        undo=f"undo     unicron undrain {names}{option_for(state)}",
        as_json=as_json,
    )


def undrain(state: StateDir, url: Urls, node: Sequence[str], reason: str, *, as_json: bool) -> None:
    """Allow tasks on a drained node again, or on several."""
    view, nodes, names, followed = _node_request(state, url, node, "undrain", reason)
    head = f"{names}  may have tasks again{_unhealthy_note(nodes)}"
    _show(state, head, followed, _effects(state, followed, view), as_json=as_json)


def lift(state: StateDir, url: Urls, node: Sequence[str], reason: str, *, as_json: bool) -> None:
    """Give back slots, or all that keeps nodes out: their quarantines and slots."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    names = _picked_slots(view["nodes"], node)
    path = quote(",".join(names).replace("/", ":"), safe=":,")
    answer = client.post(f"/v1/nodes/{path}/lift", {"reason": reason_or_user(reason)}, LIFT_S_MAX)
    followed = outcome_of(client, int(answer["seq"]))
    if as_json:
        console.data(msgspec.structs.asdict(followed))
        return
    whole = [one for one in view["nodes"] if one["id"] in names]
    now = {one["id"]: one for one in client.get("/v1/state")["nodes"]}
    named = [now[name.partition("/")[0]] for name in names]
    notes = [_unhealthy_note(whole)]
    notes += [
        f"; slot {name} is usable when {one['id']} is: unicron {act} {one['id']}"
        for name, one in zip(names, named, strict=True)
        if "/" in name
        for act in ("lift",) * bool(one["quarantine"]) + ("undrain",) * one["drained"]
    ]
    notes += [
        f"; {one['id']} {found[0]}: to see why, unicron lift {one['id']}/SLOT"
        for one in named
        if one["id"] in names and (found := needs.disabled(one))
    ]
    head = f"{','.join(names)}  may have tasks again; the next fault is the first{''.join(notes)}"
    _show(state, head, followed, _effects(state, followed, view), as_json=as_json)


def _picked_slots(nodes: list[Plain], words: Sequence[str]) -> list[str]:
    """The nodes of names and patterns, and slots as n1/0 or of a pattern of names of slots that are
    out. A slot of a node that is named as a whole is left out. Raises UsageError."""
    found: list[str] = []
    out = [f"{one['id']}/{slot['index']}" for one in nodes for slot in one["slots"] if slot["out"]]
    for word in ",".join(words).split(","):
        name, is_slot, digits = word.partition("/")
        if not is_slot:
            found += [one["id"] for one in pick_nodes(nodes, [word])]
        elif is_pattern(word):
            if not (like := [slot for slot in out if fnmatchcase(slot, word)]):
                raise UsageError(
                    f"no slot that is out has a name like {word!r}",
                    f"there is {listed(out, SHOWN_NUM)}" if out else "unicron status nodes",
                )
            found += like
        else:
            found.append(f"{pick(nodes, name, 'node')['id']}/{digits}")
    return [
        name
        for name in dict.fromkeys(found)
        if name.partition("/")[0] not in found or "/" not in name
    ]


def ack(state: StateDir, url: Urls, incident: str, reason: str, *, as_json: bool) -> None:
    """Say that a person knows of an incident."""
    number = incident_id(incident)
    followed = _request(connect(state, url), f"/v1/incidents/{number}/ack", reason)
    _show(
        state,
        f"inc-{number}  acknowledged; it is no longer among what needs you",
        followed,
        look=f"unicron incident {number}{option_for(state)}   ",
        as_json=as_json,
    )


def _unhealthy_note(nodes: list[Plain]) -> str:
    """A note that a failed check still keeps slots without tasks; else empty."""
    recovers = next((one["recovers"] for one in nodes if one["recovers"]), None)
    if not recovers:
        return ""
    return (
        f"; a check has taken slots out, they are used {recovers['after_s']:g} s after it says "
        "healthy"
    )


def freeze(state: StateDir, url: Urls, reason: str, *, as_json: bool) -> None:
    """Pause healing."""
    why = reason_or_user(reason)
    followed = _request(connect(state, url), "/v1/freeze", why)
    _show(
        state,
        f"healing is frozen: {why}",
        followed,
        ["         tasks train on; what has begun is completed; of what comes, nothing is ordered"],
        undo=f"undo     unicron unfreeze{option_for(state)}",
        as_json=as_json,
    )


def handover(state: StateDir, url: Urls, *, as_json: bool) -> None:
    """Let another control plane lead; returns when it does."""
    client = connect(state, url)
    before: Plain = client.get("/v1/state")["cluster"]
    leader: str = client.post(f"/v1/handover?epoch={before['epoch']}", {})["leader"]
    while (epoch := client.get("/v1/health")["epoch"]) <= before["epoch"]:
        time.sleep(POLL_S)
    console.show(
        {"leader": leader, "epoch": epoch},
        [f"{leader or 'another control plane'} leads now, epoch {epoch}"],
        as_json=as_json,
    )


def unfreeze(state: StateDir, url: Urls, reason: str, *, as_json: bool) -> None:
    """Resume healing."""
    client = connect(state, url)
    view: Plain = client.get("/v1/state")
    followed = _request(client, "/v1/unfreeze", reason)
    observes = client.get("/v1/state")["cluster"]["healing"]
    view["cluster"]["healing"] = observes
    head = "healing is on" if observes == "on" else f"no longer frozen, but {observes}"
    waited = [
        f"waited   {task['name']}: {task['withheld']}" for task in view["tasks"] if task["withheld"]
    ]
    _show(state, head, followed, chain(waited, _effects(state, followed, view)), as_json=as_json)


def inject_rank(
    state: StateDir,
    url: Urls,
    task: str,
    rank: int | None,
    reason: str,
    *,
    as_json: bool,
    stop_s: float | None = None,
) -> None:
    """Kill one rank, or stop it for `stop_s` (0: for good). rank=None: the highest member."""
    client = connect(state, url)
    found = pick(client.get("/v1/state")["tasks"], task)
    running = {int(one["rank"]): one for one in found["ranks"] if one["pid"]}
    members = [number for number, one in running.items() if one["state"] == "member"]
    if not running:
        raise UsageError(
            f"{_who(found)} runs no rank", f"unicron status {found['id']}{option_for(state)}"
        )
    number = max(members or running) if rank is None else rank
    followed = _request(
        client,
        "/v1/inject",
        reason,
        what="rank" if stop_s is None else "stop",
        task=found["id"],
        rank=number,
        stop_s=stop_s or 0.0,
    )
    place = running.get(number)
    where = f" on {place['node']}/{place['slot']}, pid {place['pid']}," if place else ""
    how = (
        "will be killed"
        if stop_s is None
        else (f"will be stopped for {span(stop_s)}" if stop_s else "will be stopped for good")
    )
    _print_fault(
        state,
        followed,
        f"{_who(found)}  rank {number}{where} {how} on purpose",
        f"unicron tail -f --task {found['name']}",
        as_json=as_json,
    )


def inject_node(state: StateDir, url: Urls, node: str, reason: str, *, as_json: bool) -> None:
    """Kill the agent of a node and all its ranks."""
    client = connect(state, url)
    found = pick(client.get("/v1/state")["nodes"], node, "node")
    followed = _request(client, "/v1/inject", reason, what="node", node=node)
    num = sum(1 for slot in found["slots"] if slot["task"])
    _print_fault(
        state,
        followed,
        f"{node}  the agent (pid {found['pid']}) and its "
        f"{number_of(num, 'rank')} will be killed on purpose",
        "unicron status nodes",
        as_json=as_json,
    )


# --- Output. ---
def _show(
    state: StateDir,
    head: str,
    followed: Outcome,
    lines: Iterable[str] = (),
    *,
    look: str = "",
    undo: str = "",
    as_json: bool,
) -> None:
    if as_json:
        console.data(msgspec.structs.asdict(followed))
        return
    watch = f"look     {look}unicron status -w{option_for(state)}"
    console.lines([f"{head} (seq {followed.seq})", *lines, watch, *([undo] if undo else [])])


def _effects(state: StateDir, followed: Outcome, view: Plain) -> Iterator[str]:
    """The resulting plan with its alternatives, and the tasks that change."""
    yield from plan_lines(followed, view)
    yield from paused_lines(view, option_for(state))


def paused_lines(view: Plain, option: str) -> list[str]:
    """Lines that healing is paused and nothing was ordered, or that no process is started, and what
    to do; else empty."""
    healing, no_room = view["cluster"]["healing"], view["cluster"].get("no_room")
    lines = [f"held     {no_room}; no process is started until there is room"] if no_room else []
    if healing != "on":
        how = way_to_act(healing, option)
        lines.append(f"paused   {healing}; nothing is ordered. To act: {how}")
    return lines


def _print_fault(
    state: StateDir, followed: Outcome, head: str, look: str, *, as_json: bool
) -> None:
    if "InjectFault" not in followed.orders:
        raise UnicronError("the target exited before the fault; nothing was done")
    _show(state, head, followed, look=f"{look}{option_for(state)}   ", as_json=as_json)


def _who(task: Plain) -> str:
    return f"{task['name']} (task {task['id']})"


def pick_nodes(nodes: list[Plain], words: Sequence[str]) -> list[Plain]:
    """The nodes of these names and patterns. Raises UsageError."""
    there = [one for one in nodes if one["contact"] != "left"]
    return chosen(words, nodes, there, "node")


def reason_or_user(given: str) -> str:
    """The reason on one line, as the log stores it; without a reason, the user's name."""
    if reason := " ".join(given.split()):
        return reason
    try:
        return f"by {getpass.getuser()}"
    except (KeyError, OSError):  # the user has no name
        return f"by user {os.getuid()}"
