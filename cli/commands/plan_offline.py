"""`unicron plan --offline`: the plan that follows from a file, for people and programs."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...control_plane.planner import next_event, planner
from ...control_plane.planner.alternative_names import percent
from ...control_plane.planner.next_event import Foreseen, after
from ...control_plane.planner.objective import cost_flop, objective_flop
from ...control_plane.planner.planner import Choice, gains
from ...control_plane.planner.problem import PlanInput, waf_of
from ...control_plane.planner.solver import knapsack
from ..files import plan_file
from ..terminal import console
from ..terminal.format import (
    SCREEN_COLUMNS,
    clipped,
    command,
    count,
    labelled,
    number_of,
    scaled,
    span,
    table,
)

# --- A plan in plain data: what each task gets, earns and pays, what was beaten, what binds. ---

Plain = dict[str, Any]
NAMED_NUM_MAX = 3
"""Tasks that one sentence names."""


def told(asked: PlanInput, choice: Choice, *, more: int) -> Plain:
    """All that `unicron plan` tells of a plan. `more`: the GPUs whose gain is told beside it."""
    slots = choice.plan.slots
    worth = objective_flop(asked, slots)
    tasks: Plain = {}
    for wish, x in zip(asked.wishes, slots, strict=True):
        tasks[wish.name] = {
            "current": wish.now, "gpus": x, "faulted": wish.hurt,
            "waf_before": waf_of(wish, wish.now), "waf": waf_of(wish, x),
            "earned": waf_of(wish, x) * asked.running_s, "transition": cost_flop(wish, x)}
    others = sorted((_alternative(asked, choice, other, worth) for other in choice.alternatives),
                    key=lambda other: other["loses"])
    found: Plain = {
        "allocation": {wish.name: x for wish, x in zip(asked.wishes, slots, strict=True)},
        "objective": worth, "reason": "", "waf": choice.plan.waf,
        "waf_before": math.fsum(waf_of(wish, wish.now) for wish in asked.wishes),
        "transition": math.fsum(task["transition"] for task in tasks.values()),
        "gpus": asked.num_slots, "used": sum(slots), "running_s": asked.running_s,
        "binding": _binding(asked, choice, worth, more), "tasks": tasks, "alternatives": others}
    found["reason"] = _reason(found)
    return found


def _alternative(asked: PlanInput, choice: Choice, other: Any, worth: float) -> Plain:
    """A plan that was beaten; `loses` is never below 0: what is rounded differently is equal."""
    slots = [x for _, x in other.slots]
    its = objective_flop(asked, slots)
    changed = {wish.name: x for wish, x, ours in
               zip(asked.wishes, slots, choice.plan.slots, strict=True) if x != ours}
    return {"what": other.what, "objective": its, "loses": max(worth - its, 0.0),
            "waf": other.waf, "instead": changed}


def _binding(asked: PlanInput, choice: Choice, worth: float, more: int) -> Plain:
    """What would be earned with more GPUs (D_running as it is), and who has its largest size."""
    rows = gains(asked)
    found = knapsack.best(rows, asked.num_slots + more)
    gain = max(objective_flop(asked, found[0]) - worth, 0.0) if found is not None else 0.0
    full = [wish.name for wish, x in zip(asked.wishes, choice.plan.slots, strict=True)
            if wish.sizes and x == wish.sizes[-1]]
    return {"gpus": gain > 0, "more_gpus": more, "more_earn_waf": gain / asked.running_s,
            "at_largest": full}


def foretold(known: Foreseen) -> Iterator[Plain]:
    """Every event of the table, and the plan that it would be answered with."""
    names = {wish.task: wish.name for wish in known.asked.wishes}
    for event, plan in known.plans.items():
        then, slots = after(known.asked, event, known.gpus_per_node), plan.slots
        allocation = {wish.name: x for wish, x in zip(then.wishes, slots, strict=True)}
        yield {"event": event.what, "task": names.get(event.task, ""), "gpus": then.num_slots,
               "allocation": allocation, "objective": objective_flop(then, slots),
               "moves": moves({"tasks": {wish.name: {"current": wish.now, "gpus": x,
                                                     "faulted": False}
                                         for wish, x in zip(then.wishes, slots, strict=True)}})}


def _reason(found: Plain) -> str:
    """One sentence: what moves, what binds, and by how much the next plan is worse."""
    return f"{moves(found)}; {binds(found)}; {runner_up(found)}"


def moves(found: Plain) -> str:
    """Who changes, those who give first: `a 32 -> 24, b 16 -> 24`."""
    changed = [(name, task) for name, task in found["tasks"].items()
               if task["gpus"] != task["current"]]
    changed.sort(key=lambda one: one[1]["gpus"] > one[1]["current"])
    hurt = [name for name, task in found["tasks"].items()
            if task["faulted"] and task["gpus"] == task["current"] > 0]
    words = [f"{name} {task['current']} -> {task['gpus']}" for name, task in changed]
    words += [f"{name}, which was hurt, stays on {found['tasks'][name]['gpus']}" for name in hurt]
    if not words:
        return "nothing moves"
    if len(words) > NAMED_NUM_MAX + 1:
        left = len(words) - NAMED_NUM_MAX
        words = [*words[:NAMED_NUM_MAX], f"{count(left)} others"]
    return ", ".join(words)


def binds(found: Plain) -> str:
    """`the 120 GPUs bind: 8 more would earn 2.1 PFLOP/s`."""
    binding, num = found["binding"], found["gpus"]
    if binding["gpus"]:
        return (f"{count(num)} GPUs bind: {binding['more_gpus']} more would earn "
                f"{scaled(binding['more_earn_waf'], 'FLOP/s')}")
    idle = num - found["used"]
    return (f"no GPU is lacking, {count(idle)} idle" if idle
            else f"{number_of(binding['more_gpus'], 'GPU')} more would earn nothing")


def runner_up(found: Plain) -> str:
    """`the next best plan earns 0.8 % less`."""
    if not found["alternatives"]:
        return "there is no other plan"
    other = found["alternatives"][0]
    return f"the runner-up ({other['what']}) {loses(found, other)}"


def loses(found: Plain, other: Plain) -> str:
    """By how much a plan that was beaten is worse."""
    if other["loses"] == 0:
        return "is worth as much"
    share = other["loses"] / found["objective"] if found["objective"] > 0 else 0.0
    return f"loses {scaled(other['loses'], 'FLOP')}" + (f" ({percent(share)})" if share else "")
ROWS_NUM_MAX = 20
"""Tasks that change and are shown; the rest are counted."""
NAME_COLUMNS, WHAT_COLUMNS = 24, 48
TABLE_S_MAX = 10.0
"""The events that are not planned by then are left out, and counted."""


def plan(path: Path, *, table: bool, as_json: bool) -> None:
    """Read, plan, show; with `table`, the plan of every single event too.

    Raises UsageError for a file that is not as it must be.
    """
    offline = plan_file.load(path)
    began_s = time.perf_counter()
    choice = planner.choose(offline.asked)
    took_s = time.perf_counter() - began_s
    found = told(offline.asked, choice, more=offline.gpus_per_node)
    if not table:
        console.lines([json.dumps(found)] if as_json else [*screen(found, took_s), *labelled(
            "next", command(f"unicron plan --offline {path} --table"))])
        return
    began_s = time.perf_counter()
    known = next_event.foresee(offline.asked, offline.gpus_per_node,
                             lambda: time.perf_counter() - began_s > TABLE_S_MAX)
    took_table_s = time.perf_counter() - began_s
    if as_json:
        found["table"], found["table_bytes"] = list(foretold(known)), known.num_bytes
        found["table_left"] = known.num_left
        console.out(json.dumps(found))
        return
    console.lines([*screen(found, took_s), "", *_foretold(known, took_table_s)])


def _foretold(known: next_event.Foreseen, took_s: float) -> list[str]:
    """The table's page: an event a line."""
    rows = [[row["event"], clipped(row["task"], NAME_COLUMNS), count(row["gpus"]),
             scaled(row["objective"], "FLOP"), row["moves"]] for row in foretold(known)]
    left = f", {count(known.num_left)} more left out for time" if known.num_left else ""
    return [f"{count(len(rows))} events, {scaled(known.num_bytes, 'B')}, {span(took_s)}{left}", "",
            *[clipped(line, SCREEN_COLUMNS)
              for line in table(("IF", "OF", "GPUs", "WORTH", "THEN"), rows, right=(2, 3))]]


def screen(found: Plain, took_s: float) -> list[str]:
    """The page, at most 100 columns."""
    num_gpus, num_tasks = found["gpus"], len(found["tasks"])
    lines = [f"{count(num_gpus)} GPU{'s' * (num_gpus != 1)}, "
             f"{count(num_tasks)} task{'s' * (num_tasks != 1)}, exact, {span(took_s)}"]
    gain = found["waf"] - found["waf_before"]
    sign = "+" if gain >= 0 else "-"
    lines += textwrap.wrap(f"{moves(found)}: {sign}{scaled(abs(gain), 'FLOP/s')} of WAF",
                           SCREEN_COLUMNS)
    lines += ["", *_tasks(found), ""]
    lines += table(("", "PLAN", "WORTH", "DISTANCE"), [
        ["1", "this one", scaled(found["objective"], "FLOP"), "chosen"],
        *([str(i), clipped(other["what"], WHAT_COLUMNS), scaled(other["objective"], "FLOP"),
           loses(found, other)] for i, other in enumerate(found["alternatives"], 2))], right=(2,))
    lines += ["", *labelled("bound by", _bound(found)),
              *labelled("horizon", f"{span(found['running_s'])}: so long nothing fails; a change "
                        f"costs {scaled(found['transition'], 'FLOP')} in all")]
    return lines


def _tasks(found: Plain) -> list[str]:
    """Who changes or was hurt, the largest first; the others counted; all together."""
    every = list(found["tasks"].items())
    busy = sorted((one for one in every
                   if one[1]["gpus"] != one[1]["current"] or one[1]["faulted"]),
                  key=lambda one: -max(one[1]["waf"], one[1]["waf_before"]))
    shown, left = busy[:ROWS_NUM_MAX], busy[ROWS_NUM_MAX:]
    rows = [[clipped(name, NAME_COLUMNS), _arrow(count, task["current"], task["gpus"]),
             _arrow(_waf, task["waf_before"], task["waf"]), scaled(task["transition"], "FLOP"),
             "hurt" if task["faulted"] else "waits" if not task["gpus"] else ""]
            for name, task in shown]
    if left:
        rows.append([f"{count(len(left))} more", "change", "", "", ""])
    still = [task for _, task in every if task["gpus"] == task["current"] and not task["faulted"]]
    if still:
        words = f"{count(len(still))} unchanged"
        rows.append([words, count(sum(task["gpus"] for task in still)), "", "", ""])
    before = sum(task["current"] for _, task in every)
    rows.append(["all", _arrow(count, before, found["used"]),
                 _arrow(_waf, found["waf_before"], found["waf"]),
                 scaled(found["transition"], "FLOP"), ""])
    return table(("TASK", "GPUs", "WAF", "PAYS", ""), rows)


def _waf(value: float) -> str:
    return scaled(value, "FLOP/s")


def _arrow(show: Any, before: Any, after: Any) -> str:
    """`32 -> 24`, or `32` where nothing changes."""
    return show(after) if before == after else f"{show(before)} -> {show(after)}"


def _bound(found: Plain) -> str:
    binding, full = found["binding"], found["binding"]["at_largest"]
    more = (f"{binding['more_gpus']} more: +{scaled(binding['more_earn_waf'], 'FLOP/s')}"
            if binding["gpus"] else f"{binding['more_gpus']} more would earn nothing")
    words = f"{count(found['gpus'])} GPUs ({more}), {count(found['gpus'] - found['used'])} idle"
    if full:
        who = full[0] if len(full) == 1 else f"{count(len(full))} tasks"
        words += f"; {who} at the largest size named"
    return words
