"""`unicron plan --offline`: the plan that follows from a file, for people and programs."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

from ..control_plane import foreseen, planner
from . import plan_file, say
from .figures import SCREEN_COLUMNS, clipped, command, count, labelled, scaled, span, table
from .plan_told import foretold, loses, moves, told

Plain = dict[str, Any]
ROWS_NUM_MAX = 20
"""Tasks that change and are shown; the rest are counted."""
NAME_COLUMNS, WHAT_COLUMNS = 24, 48


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
        say.lines([json.dumps(found)] if as_json else [*screen(found, took_s), *labelled(
            "next", command(f"unicron plan --offline {path} --table"))])
        return
    began_s = time.perf_counter()
    known = foreseen.foresee(offline.asked, offline.gpus_per_node)
    took_table_s = time.perf_counter() - began_s
    if as_json:
        found["table"], found["table_bytes"] = list(foretold(known)), known.num_bytes
        say.out(json.dumps(found))
        return
    say.lines([*screen(found, took_s), "", *_foretold(known, took_table_s)])


def _foretold(known: foreseen.Foreseen, took_s: float) -> list[str]:
    """The table's page: an event a line."""
    rows = [[row["event"], clipped(row["task"], NAME_COLUMNS), count(row["gpus"]),
             scaled(row["objective"], "FLOP"), row["moves"]] for row in foretold(known)]
    return [f"{count(len(rows))} events, {scaled(known.num_bytes, 'B')}, {span(took_s)}", "",
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
