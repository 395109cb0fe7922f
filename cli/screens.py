"""The status screens: a view of the state (control_plane/view.py) as text of 100 columns."""

from __future__ import annotations

import math
from typing import Any

from .figures import count, curve, marks, ms, ranks, rfc3339, scaled, span, table
from .history import History, TaskHistory

Plain = dict[str, Any]
COLUMNS = 100
CURVE_COLUMNS = 60
INCIDENTS_SHOWN_NUM = 3
ENDED = ("finished", "failed", "cancelled")


def status(view: Plain, *, cluster: str, now_s: float, option: str = "") -> list[str]:
    """The whole cluster: what needs a person first, then what it earns, then the tasks."""
    told = view["cluster"]
    tasks: list[Plain] = view["tasks"]
    head = f"{cluster}  {rfc3339(now_s)}  seq {told['seq']}"
    lines = [f"unicron status{head.rjust(COLUMNS - len('unicron status'))}",
             *_news(view, now_s, option), "", *_totals(view), ""]
    if not tasks:
        return [*lines, f"no tasks yet: unicron submit deploy/examples/demo.yaml{option}"]
    lines += table(
        ("TASK", "STATE", "SLOTS", "LAYOUT", "WEIGHT", "ITERATION", "S/ITER", "LOSS", "WAF",
         "HEALED", "LOST"),
        [_task_row(task) for task in tasks if task["state"] not in ENDED]
        + [_task_row(task) for task in tasks if task["state"] in ENDED],
        right=(2, 4, 6, 7, 8, 9, 10))
    for task in tasks:
        if task["state"] not in ENDED and (task["why"] or task["needs"]):
            needs = f"; needs {task['needs']}" if task["needs"] else ""
            lines.append(f"{task['name']}: {task['why']}{needs}"[:COLUMNS])
    return lines


def _news(view: Plain, now_s: float, option: str) -> list[str]:
    names = {task["id"]: task["name"] for task in view["tasks"]}
    lines: list[str] = []
    for node in view["nodes"]:
        if node["health"] in ("unreachable", "lost"):
            lines.append(f"NEEDS YOU  {node['id']} {node['health']} for "
                         f"{span(now_s - node['since_s'])}: unicron status nodes{option}")
    last = {task["name"]: task["id"] for task in view["tasks"]}
    for task in view["tasks"]:
        if task["state"] == "failed" and task["id"] == last[task["name"]]:  # none took its place
            lines.append(f"NEEDS YOU  {task['name']} failed: {task['why']}"[:COLUMNS])
    newest = sorted(view["incidents"], key=lambda one: -int(one["id"]))[:INCIDENTS_SHOWN_NUM]
    for one in newest:
        name = names.get(one["task"], one["node"] or "cluster")
        what = f"inc-{one['id']} {one['severity']} {name} {ranks(one['ranks'])}, {one['status']}"
        end = (f"{one['iterations_lost']} iterations lost, pause {ms(one['pause_s'])}"
               if one["outcome"] else f"since {span(now_s - one['opened_s'])}")
        lines.append(f"{(one['outcome'] or 'healing').upper():<10} {what}: {end}"[:COLUMNS])
    return lines


def _totals(view: Plain) -> list[str]:
    told, nodes = view["cluster"], view["nodes"]
    slots = [slot for node in nodes if node["health"] == "healthy" for slot in node["slots"]]
    num_out = sum(1 for slot in slots if slot["out"]) + sum(
        node["num_slots"] for node in nodes if node["health"] in ("unreachable", "lost"))
    num_busy = sum(1 for slot in slots if slot["task"])
    num_idle = sum(1 for slot in slots if not slot["task"] and not slot["out"])
    health: dict[str, int] = {}
    for node in nodes:
        health[node["health"]] = health.get(node["health"], 0) + 1
    waf = math.fsum(task["waf"] for task in view["tasks"])
    lost = f", {told['reports_lost']} reports lost" if told["reports_lost"] else ""
    return [
        f"WAF    {scaled(waf, 'FLOP/s')}, weighted",
        f"slots  {num_busy} train, {num_idle} idle, {num_out} out     nodes  "
        + (", ".join(f"{num} {name}" for name, num in sorted(health.items())) or "none"),
        f"log    epoch {told['epoch']}, {count(told['seq'])} records{lost}, "
        f"state {told['hash']}",
    ]


def _task_row(task: Plain) -> list[str]:
    slots = task["slots"]
    now = (f"{slots['now']}" if slots["now"] == slots["target"]
           else f"{slots['now']} of {slots['target']}")
    done = (f"{count(task['iteration'])}/{count(task['iterations'])}" if task["iterations"]
            else "-")
    return [task["name"], task["state"].upper(), now, task["layout"] or "-",
            f"{task['weight']:g}", done, f"{task['step_s']:.2f}" if task["step_s"] else "-",
            "-" if task["loss"] is None else f"{task['loss']:.3f}",
            scaled(task["waf"], "").strip() if task["waf"] else "-",
            str(task["healed"]), str(task["iterations_lost"])]


def task_status(view: Plain, task: Plain, told: History, *, now_s: float,
                option: str = "") -> list[str]:
    """One task: state and why, where, progress with its loss curve, ranks, incidents."""
    name = task["name"]
    lines = [f"{name}  {task['state'].upper()} since {rfc3339(task['since_s'])} "
             f"({span(max(now_s - task['since_s'], 0.0))}), task {task['id']}, "
             f"weight {task['weight']:g}"]
    if task["why"] or task["needs"]:
        needs = f"; needs {task['needs']}" if task["needs"] else ""
        lines.append(f"why       {task['why']}{needs}")
    past = told.tasks.get(task["id"])
    lines += ["", *_where(task), *_progress(task, past, told, now_s)]
    if task["output"]:
        lines.append(f"output    {task['output']}")
    if task["checkpoint"]:
        lines.append(f"published {task['checkpoint']}")
    if task["ranks"]:
        lines += ["", *table(("RANK", "STATE", "NODE/SLOT", "PID", "ATTEMPT"), [
            [str(one["rank"]), one["state"], f"{one['node']}/{one['slot']}", str(one["pid"] or "-"),
             str(one["attempt"])] for one in task["ranks"]], right=(0, 3, 4))]
    lines += _incidents(task, told)
    if task["state"] in ENDED:  # the name may be another's by now
        return [*lines, "", f"next      unicron logs {task['id']}{option}   "
                            f"unicron tail --task {task['id']}{option}"]
    return [*lines, "", f"next      unicron logs {name} -f{option}   "
                        f"unicron tail -f --task {name}{option}"]


def _where(task: Plain) -> list[str]:
    if not task["ranks"]:
        return []
    places = " ".join(f"{one['node']}/{one['slot']}" for one in task["ranks"])
    batch = (f", global batch {task['micro_batches']} micro-batches"
             if task["micro_batches"] else "")
    return [f"where     {places}, {task['layout'] or 'no generation yet'}, "
            f"generation {task['generation']}{batch}"]


def _progress(task: Plain, past: TaskHistory | None, told: History, now_s: float) -> list[str]:
    if not task["iterations"]:
        return ["progress  a command: is supervised only"]
    lines = [f"progress  {count(task['iteration'])} of {count(task['iterations'])}"
             + ("" if task["loss"] is None else f", loss {task['loss']:.4f}")]
    if past is not None:
        lines += ["          " + line for line in loss_curve(past, told)]
    if task["step_s"] and task["state"] == "running":
        left_s = (task["iterations"] - task["iteration"]) * task["step_s"]
        lines += [f"pace      {span(task['step_s'])} an iteration, "
                  f"{scaled(task['rate_flops'], 'FLOP/s')}",
                  f"finish    {rfc3339(now_s + left_s)} at this pace"]
    return lines


def loss_curve(past: TaskHistory, told: History, width: int = CURVE_COLUMNS) -> list[str]:
    """The losses as blocks between first and last value, and a `!` below each incident."""
    losses = [past.losses[key] for key in sorted(past.losses)]
    if not losses:
        return []
    first = f"{losses[0]:.2f} "
    lines = [f"{first}{curve(losses, width)} {losses[-1]:.2f}"]
    faults = [one.iteration for one in told.incidents.values()
              if one.task == past.id and one.iteration is not None]
    if faults:
        lines.append(" " * len(first) + marks([(at, "!") for at in faults], len(losses), width)
                     + f"   (!) fault at iteration {', '.join(map(str, faults))}")
    return lines


def _incidents(task: Plain, told: History) -> list[str]:
    rows = [[f"inc-{one.id}", rfc3339(one.detected_s)[:19] + "Z", one.severity,
             f"{ranks(one.ranks)}, {one.status}", one.outcome, ms(one.pause_s),
             str(one.iterations_lost), str(one.kept), str(one.dealt)]
            for one in told.incidents.values() if one.task == task["id"]]
    if not rows:
        return []
    return ["", *table(("INCIDENT", "DETECTED", "SEV", "WHAT", "OUTCOME", "PAUSE", "LOST",
                        "KEPT", "DEALT"), rows, right=(5, 6, 7, 8))]


def nodes(view: Plain, *, now_s: float) -> list[str]:
    """All nodes: a letter for each slot, then one line each."""
    tasks = {task["id"]: task["name"] for task in view["tasks"]}
    letters = _letters({slot["task"]: tasks.get(slot["task"], "?") for node in view["nodes"]
                        for slot in node["slots"] if slot["task"]})
    num_slots = sum(node["num_slots"] for node in view["nodes"])
    head = f"{len(view['nodes'])} nodes, {num_slots} slots"
    lines = [f"unicron status nodes{head.rjust(COLUMNS - len('unicron status nodes'))}"]
    if not view["nodes"]:
        return [*lines, "no nodes yet: unicron up, or unicron agent --url URL"]
    maps = [f"{node['id']} {''.join(_slot_sign(node, slot, letters) for slot in node['slots'])}"
            for node in view["nodes"]]
    width = max(map(len, maps)) + 3
    per_line = max(COLUMNS // width, 1)
    lines += ["".join(one.ljust(width) for one in maps[start:start + per_line]).rstrip()
              for start in range(0, len(maps), per_line)]
    key = [f"{letter} {tasks.get(task, '?')}" for task, letter in letters.items()]
    lines += ["  ".join([*key, ". idle", "? unreachable", "x out"]), ""]
    return lines + table(
        ("NODE", "HEALTH", "SINCE", "SLOTS", "ACCELERATOR", "RUNS", "PID", "HOST"),
        [_node_row(node, tasks, now_s) for node in view["nodes"]], right=(3, 6))


def _letters(tasks: dict[int, str]) -> dict[int, str]:
    """A letter for each task, its own where it is free."""
    given: dict[int, str] = {}
    for task in sorted(tasks):
        own = tasks[task][:1].upper()
        free = [one for one in (own, own.lower(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
                if one not in given.values()]
        given[task] = free[0] if free else "#"
    return given


def _slot_sign(node: Plain, slot: Plain, letters: dict[int, str]) -> str:
    if node["health"] == "unreachable":
        return "?"
    if slot["out"] or node["health"] != "healthy":
        return "x"
    return letters[slot["task"]] if slot["task"] else "."


def _node_row(node: Plain, tasks: dict[int, str], now_s: float) -> list[str]:
    runs: dict[int, list[int]] = {}
    for slot in node["slots"]:
        if slot["task"]:
            runs.setdefault(slot["task"], []).append(slot["rank"])
    what = ", ".join(f"{tasks.get(task, '?')} {ranks(found)}" for task, found in runs.items())
    num_busy = sum(1 for slot in node["slots"] if slot["task"])
    return [node["id"], node["health"], span(max(now_s - node["since_s"], 0.0)),
            f"{num_busy}/{node['num_slots']}", node["accelerator"], what or "-",
            str(node["pid"]), node["host"]]
