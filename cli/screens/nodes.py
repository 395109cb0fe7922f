"""The screens of the nodes: slots, quarantine, failed checks, disabled slots."""

from typing import Literal

from ...control_plane.api import needs
from ..terminal import format as fmt
from ..terminal.format import Plain
from .stragglers import node_degraded

SlotUse = Literal["train", "idle", "drained", "out", "unreachable", "left"]
DEGRADED = "!"
RUNS_COLUMNS = 28
SIGNS = {"idle": ".", "drained": "-", "out": "x", "unreachable": "?", "left": "_"}


# --- Failed checks. ---
def recovers(node: Plain) -> str:
    """When slots are used again after their check has recovered; empty if none recovers."""
    recovery: Plain | None = node["recovers"]
    if recovery is None or recovery["from_s"] is None:
        return ""
    found = recovery["slots"]
    which = (
        "its slots are"
        if len(found) == node["num_slots"]
        else f"its {needs.named(found)} {'are' if len(found) > 1 else 'is'}"
    )
    word = "healthy again" if node["health"] == "healthy" else "no longer unhealthy"
    return (
        f"{word}, {which} used from {fmt.rfc3339(recovery['from_s'])[11:19]}Z "
        f"({fmt.span(recovery['after_s'])} without a complaint)"
    )


def why_unhealthy(node: Plain) -> str:
    """What all checks of a node report, also degraded and unknown, and when its slots return."""
    words = [fmt.said(*ill)] if (ill := needs.unhealthy(node)) else []
    words += [
        f"{one['check']} {one['health']}: {one['why']}"
        for one in node["checks"]
        if one["health"] != "unhealthy"
    ]
    return "; ".join(words)


# --- The screen. ---
def nodes(view: Plain, *, now_s: float, option: str = "") -> list[str]:
    """All nodes: a map of the slots, then health, scheduling and the tasks there."""
    tasks = {task["id"]: task["name"] for task in view["tasks"]}
    letters = _letters(
        {
            slot["task"]: tasks.get(slot["task"], "?")
            for node in view["nodes"]
            for slot in node["slots"]
            if slot["task"]
        }
    )
    here = [node for node in view["nodes"] if node["contact"] != "left"]
    head = (
        f"{fmt.number_of(len(here), 'node')}, "
        f"{fmt.number_of(sum(node['num_slots'] for node in here), 'slot')}"
    )
    lines = [f"unicron status nodes{head.rjust(fmt.SCREEN_COLUMNS - len('unicron status nodes'))}"]
    if not view["nodes"]:
        return [*lines, "no nodes yet: unicron up, or unicron agent --url URL"]
    lines += _maps(view["nodes"], letters)
    key = [f"{letter} {tasks.get(task, '?')}" for task, letter in letters.items()]
    drained = ["- drained"] if any(node["drained"] for node in view["nodes"]) else []
    ails = (
        ["! degraded"]
        if any(
            _slot_sign(node, slot, letters) == DEGRADED
            for node in view["nodes"]
            for slot in node["slots"]
        )
        else []
    )
    left = ["_ left"] if len(here) < len(view["nodes"]) else []
    lines += ["  ".join([*key, ". idle", *ails, *drained, "? unreachable", "x out", *left]), ""]
    switched = any(node["labels"]["switch"] for node in view["nodes"])
    lines += fmt.table(
        (
            "NODE",
            *("SWITCH",) * switched,
            "HEALTH",
            "SINCE",
            "SCHEDULING",
            "SLOTS",
            "ACCELERATOR",
            "RUNS",
            "PID",
            "HOST",
        ),
        [_node_row(node, tasks, now_s, switched=switched) for node in view["nodes"]],
        right=(4 + switched, 7 + switched),
    )
    return [*lines, *_reasons(view["nodes"], option)]


def _maps(nodes: list[Plain], letters: dict[int, str]) -> list[str]:
    """One sign per slot, node by node; each rack on lines of its own with its name."""
    maps = {
        node["id"]: f"{node['id']} "
        + "".join(_slot_sign(node, slot, letters) for slot in node["slots"])
        for node in nodes
    }
    racks: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: str(node["labels"]["rack"])):
        racks.setdefault(node["labels"]["rack"], []).append(maps[node["id"]])
    front = max(map(len, racks)) + 2 if any(racks) else 0
    width = max(map(len, maps.values())) + 3
    per_line = max((fmt.SCREEN_COLUMNS - front) // width, 1)
    return [
        (rack or "-" if front and start == 0 else "").ljust(front)
        + "".join(one.ljust(width) for one in found[start : start + per_line]).rstrip()
        for rack, found in racks.items()
        for start in range(0, len(found), per_line)
    ]


def _reasons(nodes: list[Plain], option: str) -> list[str]:
    """Why nodes or slots get no tasks, or slow their tasks, and how to end that."""
    lines: list[str] = []
    for node in nodes:
        if node["drained"]:
            why = node["drain_reason"] or "no reason given"
            lines += fmt.labelled(
                node["id"], fmt.said(f"drained: {why}", needs.undrain(node), option)
            )
        if trouble := needs.node_trouble(node, option):
            lines += fmt.labelled(node["id"], trouble)
        if suspected := _suspected(node):
            lines += fmt.labelled(node["id"], suspected)
        if kept := needs.quarantine_reason(node, option):
            lines += fmt.labelled(node["id"], kept)
        for text in filter(None, (recovers(node), why_unhealthy(node))):
            lines += fmt.labelled(node["id"], text)
        if why := node_degraded(node, option):
            lines += fmt.labelled(node["id"], why)
    return ["", *lines] if lines else []


def _suspected(node: Plain) -> str:
    """Slots that are suspected, and why. They stay in use."""
    whys = {slot["index"]: slot["suspected_why"] for slot in node["slots"] if not slot["out"]}
    return "; ".join(
        f"slot {index} suspected, in use until that is shown: {why}"
        for index, why in whys.items()
        if why
    )


def _letters(tasks: dict[int, str]) -> dict[int, str]:
    """A letter for each task, its initial if that is free."""
    given: dict[int, str] = {}
    for task in sorted(tasks):
        own = tasks[task][:1].upper()
        free = [
            one
            for one in (own, own.lower(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
            if one not in given.values()
        ]
        given[task] = free[0] if free else "#"
    return given


def slot_use(node: Plain, slot: Plain) -> SlotUse:
    """The use of a slot. On a drained node a slot that still trains counts as train."""
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
    if slot["degraded"] and use in ("train", "idle"):  # other uses keep their own sign
        return DEGRADED
    return letters[slot["task"]] if use == "train" else SIGNS[use]


def _scheduling(node: Plain) -> str:
    """`eligible`, `drained` or the disabled slots. `as it was` while a node is unreachable: its
    ranks continue, and no rank is started there."""
    out = [slot["index"] for slot in node["slots"] if slot["out"]]
    if node["contact"] != "heard":
        word = "as it was" if node["contact"] == "unreachable" else "out"
        return f"{word}, drained" if node["drained"] else word
    word = needs.until(node) or ("drained" if node["drained"] else "")
    if out:
        word += f"{', ' * bool(word)}{needs.named(out)} out"
    return word or "eligible"


def _node_row(node: Plain, tasks: dict[int, str], now_s: float, *, switched: bool) -> list[str]:
    runs: dict[int, list[int]] = {}
    for slot in node["slots"]:
        if slot["task"]:
            runs.setdefault(slot["task"], []).append(slot["rank"])
    what = ", ".join(f"{tasks.get(task, '?')} {fmt.ranks(found)}" for task, found in runs.items())
    busy = str(sum(1 for slot in node["slots"] if slot["task"]))
    if node["contact"] in ("lost", "left"):
        what, busy = "", "-"  # the ranks there count as stopped
    switch = [node["labels"]["switch"] or "-"] if switched else []
    return [
        node["id"],
        *switch,
        node["health"],
        fmt.span(max(now_s - node["since_s"], 0.0)),
        _scheduling(node),
        f"{busy}/{node['num_slots']}",
        node["accelerator"],
        fmt.clipped(what or "-", RUNS_COLUMNS),
        str(node["pid"]),
        node["host"],
    ]
