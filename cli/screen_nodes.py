"""The status screen of the nodes: a letter for each slot, then a line for each node."""

from __future__ import annotations

from typing import Any, Literal

from .figures import SCREEN_COLUMNS, clipped, command, labelled, number_of, ranks, span, table
from .screen_degraded import degraded_news, node_degraded
from .screen_out import named, why_out
from .screen_quarantine import quarantine, until, why_quarantined
from .screen_sick import recovers, sick_why, why_unhealthy

Plain = dict[str, Any]
SlotUse = Literal["train", "idle", "drained", "out", "unreachable", "left"]
DEGRADED = "!"
RUNS_COLUMNS = 28
SIGNS = {"idle": ".", "drained": "-", "out": "x", "unreachable": "?", "left": "_"}


def nodes(view: Plain, *, now_s: float, option: str = "") -> list[str]:
    """All nodes: a map of the slots, then health, scheduling and what runs there."""
    tasks = {task["id"]: task["name"] for task in view["tasks"]}
    letters = _letters({slot["task"]: tasks.get(slot["task"], "?") for node in view["nodes"]
                        for slot in node["slots"] if slot["task"]})
    here = [node for node in view["nodes"] if node["contact"] != "left"]
    head = (f"{number_of(len(here), 'node')}, "
            f"{number_of(sum(node['num_slots'] for node in here), 'slot')}")
    lines = [f"unicron status nodes{head.rjust(SCREEN_COLUMNS - len('unicron status nodes'))}"]
    if not view["nodes"]:
        return [*lines, "no nodes yet: unicron up, or unicron agent --url URL"]
    lines += _maps(view["nodes"], letters)
    key = [f"{letter} {tasks.get(task, '?')}" for task, letter in letters.items()]
    drained = ["- drained"] if any(node["drained"] for node in view["nodes"]) else []
    ails = ["! degraded"] if any(_slot_sign(node, slot, letters) == DEGRADED
                                 for node in view["nodes"] for slot in node["slots"]) else []
    left = ["_ left"] if len(here) < len(view["nodes"]) else []
    lines += ["  ".join([*key, ". idle", *ails, *drained, "? unreachable", "x out", *left]), ""]
    switched = any(node["labels"]["switch"] for node in view["nodes"])
    lines += table(
        ("NODE", *("SWITCH",) * switched, "HEALTH", "SINCE", "SCHEDULING", "SLOTS", "ACCELERATOR",
         "RUNS", "PID", "HOST"),
        [_node_row(node, tasks, now_s, switched=switched) for node in view["nodes"]],
        right=(4 + switched, 7 + switched))
    return [*lines, *_reasons(view["nodes"], tasks, option)]


def _maps(nodes: list[Plain], letters: dict[int, str]) -> list[str]:
    """A sign for each slot, node by node, each rack on lines of its own behind its name."""
    maps = {node["id"]: f"{node['id']} "
            + "".join(_slot_sign(node, slot, letters) for slot in node["slots"]) for node in nodes}
    racks: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: str(node["labels"]["rack"])):
        racks.setdefault(node["labels"]["rack"], []).append(maps[node["id"]])
    front = max(map(len, racks)) + 2 if any(racks) else 0
    width = max(map(len, maps.values())) + 3
    per_line = max((SCREEN_COLUMNS - front) // width, 1)
    return [(rack or "-" if front and start == 0 else "").ljust(front)
            + "".join(one.ljust(width) for one in found[start:start + per_line]).rstrip()
            for rack, found in racks.items() for start in range(0, len(found), per_line)]


def _reasons(nodes: list[Plain], names: dict[int, str], option: str) -> list[str]:
    """Why nodes, or slots of theirs, are not given tasks or slow them, and what ends that."""
    lines: list[str] = []
    for node in nodes:
        if node["drained"]:
            why = node["drain_reason"] or "no reason given"
            lines += labelled(node["id"], f"drained: {why}: "
                              + command(f"unicron undrain {node['id']}{option}"))
        if trouble := node_trouble(node, option=option):
            lines += labelled(node["id"], trouble)
        if kept := why_quarantined(node, option):
            lines += labelled(node["id"], kept)
        for said in filter(None, (recovers(node), why_unhealthy(node))):
            lines += labelled(node["id"], said)
        if why := node_degraded(node, names, option):
            lines += labelled(node["id"], why)
    return ["", *lines] if lines else []


def node_trouble(node: Plain, since: str = "", option: str = "") -> str:
    """What is wrong with a node, and what a person is to do; empty where nothing is.

    `since`: words for how long its health has been so.
    """
    if node["contact"] == "unreachable":
        runs = any(slot["task"] for slot in node["slots"])
        return (f"unreachable{since}{', its ranks go on' * runs}: look at its "
                "machine and network")
    if node["contact"] == "lost":
        then = (f"{quarantine(node)}. It is given tasks when that ends, or after "
                + command(f"unicron lift {node['id']}{option}")
                if node["quarantine"] else "it is given tasks at once")
        return f"lost{since}: repair it and start its agent, {then}"
    return why_out(node) if node["contact"] == "heard" else ""


def node_news(node: Plain, names: dict[int, str], now_s: float, option: str) -> str:
    """All that a person is to know of the node, in one line; empty where that is nothing."""
    trouble = node_trouble(node, f" for {span(max(now_s - node['since_s'], 0.0))}", option)
    kept = why_quarantined(node, option)
    ill = f"is unhealthy, {said}" if (said := sick_why(node)) else ""
    words = "; ".join(filter(None, (trouble, kept, ill)))
    if not words:
        return next(iter(degraded_news(node, names, option)), "")
    look = "" if kept and not (trouble or ill) else "; " + command(f"unicron status nodes{option}")
    return f"{node['id']} {words}{look}"


def _letters(tasks: dict[int, str]) -> dict[int, str]:
    """A letter for each task, its own where it is free."""
    given: dict[int, str] = {}
    for task in sorted(tasks):
        own = tasks[task][:1].upper()
        free = [one for one in (own, own.lower(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
                if one not in given.values()]
        given[task] = free[0] if free else "#"
    return given


def slot_use(node: Plain, slot: Plain) -> SlotUse:
    """What a slot does. One that still trains on a drained node trains."""
    if node["contact"] == "unreachable":
        return "unreachable"
    if node["contact"] == "left":
        return "left"
    if slot["out"] or node["contact"] != "heard":
        return "out"
    if slot["task"]:
        return "train"
    return "drained" if node["drained"] else "out" if node["quarantine"] else "idle"


def _slot_sign(node: Plain, slot: Plain, letters: dict[int, str]) -> str:
    use = slot_use(node, slot)
    if slot["degraded"] and use in ("train", "idle"):  # what is out for more says so
        return DEGRADED
    return letters[slot["task"]] if use == "train" else SIGNS[use]


def _scheduling(node: Plain) -> str:
    """eligible, drained, or which of its slots are out; `as it was` while a node is only silent:
    what runs there goes on, nothing is started."""
    out = [slot["index"] for slot in node["slots"] if slot["out"]]
    if node["contact"] != "heard":
        word = "as it was" if node["contact"] == "unreachable" else "out"
        return f"{word}, drained" if node["drained"] else word
    word = until(node) or ("drained" if node["drained"] else "")
    if out:
        word += f"{', ' * bool(word)}{named(out)} out"
    return word or "eligible"


def _node_row(node: Plain, tasks: dict[int, str], now_s: float, *,
              switched: bool) -> list[str]:
    runs: dict[int, list[int]] = {}
    for slot in node["slots"]:
        if slot["task"]:
            runs.setdefault(slot["task"], []).append(slot["rank"])
    what = ", ".join(f"{tasks.get(task, '?')} {ranks(found)}" for task, found in runs.items())
    num_busy = sum(1 for slot in node["slots"] if slot["task"])
    if node["contact"] in ("lost", "left"):
        what, busy = "", "-"  # what ran there runs no more, as far as anybody acts on it
    else:
        busy = str(num_busy)
    switch = [node["labels"]["switch"] or "-"] if switched else []
    return [node["id"], *switch, node["health"], span(max(now_s - node["since_s"], 0.0)),
            _scheduling(node), f"{busy}/{node['num_slots']}", node["accelerator"],
            clipped(what or "-", RUNS_COLUMNS), str(node["pid"]), node["host"]]
