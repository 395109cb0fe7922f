"""`unicron plan --offline`: the plan for a problem in a YAML file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...control_plane.api import dry_run
from ...control_plane.api.dry_run import DryRunResult
from ...control_plane.planner import explain, next_event
from ...control_plane.planner.objective import cost_flop, objective_flop
from ...control_plane.planner.problem import PlanProblem, allocation, waf_of
from ..files import plan_file
from ..screens import plan as plan_screen
from ..terminal import console
from ..terminal.format import SCREEN_COLUMNS, Plain, clipped, count, scaled, span, table

NAME_COLUMNS = 24
TABLE_S_MAX = 10.0
"""Events that are not planned by then are left out and counted."""


def plan(path: Path, *, table: bool, as_json: bool) -> None:
    """Read, plan, print; with `table`, the plan after each single event too. Raises UsageError."""
    asked, gpus_per_node = plan_file.load(path)
    began_s = time.perf_counter()
    tried = dry_run.of_input(asked, gpus_per_node)
    found = plain(asked, tried)
    took_s = time.perf_counter() - began_s
    page = plan_screen.offline({**msgspec.to_builtins(tried), "took_s": took_s}, str(path),
                               has_table=table)
    if not table:
        console.show(found, page, as_json=as_json)
        return
    began_s = time.perf_counter()
    known = next_event.plan_next_events(asked, gpus_per_node,
                             lambda: time.perf_counter() - began_s > TABLE_S_MAX)
    took_table_s = time.perf_counter() - began_s
    rows = list(table_rows(known))
    found |= {"table": rows, "table_bytes": known.num_bytes, "table_left": known.num_left}
    console.show(found, [*page, "", *_table_lines(known, rows, took_table_s)], as_json=as_json)


def _table_lines(known: next_event.NextEventPlans, events: list[Plain], took_s: float
                 ) -> list[str]:
    """The table's page: one event per line."""
    rows = [[row["event"], clipped(row["task"], NAME_COLUMNS), count(row["gpus"]),
             scaled(row["objective"], "FLOP"), row["moves"]] for row in events]
    left = f", {count(known.num_left)} more left out for time" if known.num_left else ""
    return [f"{count(len(rows))} events, {scaled(known.num_bytes, 'B')}, {span(took_s)}{left}", "",
            *[clipped(line, SCREEN_COLUMNS)
              for line in table(("IF", "OF", "GPUs", "WORTH", "THEN"), rows, right=(2, 3))]]


def table_rows(known: next_event.NextEventPlans) -> Iterator[Plain]:
    """Each event of the table, with the plan that follows it."""
    names = {demand.task: demand.name for demand in known.problem.demands}
    for event, plan in known.plans.items():
        then = next_event.problem_after(known.problem, event, known.gpus_per_node)
        given = [allocation(demand, x) for demand, x in zip(then.demands, plan.slots, strict=True)]
        yield {"event": event.what, "task": names.get(event.task, ""), "gpus": then.num_slots,
               "allocation": {names[x.task]: x.slots for x in given},
               "objective": objective_flop(then, plan.slots),
               "moves": explain.moves(given, names)}


def plain(asked: PlanProblem, tried: DryRunResult) -> Plain:
    """The fields of `-o json`."""
    plan, demands = tried.plan, asked.demands
    assert plan is not None
    worth, slots = plan.objective_flop, [x.slots for x in plan.allocations]
    names = [demand.name for demand in demands]
    others: list[Plain] = [{"what": other.what, "objective": worth - other.behind_flop,
               "loses": max(other.behind_flop, 0.0), "waf": other.waf,
               "instead": {name: x for name, (_, x), ours in
                           zip(names, other.slots, slots, strict=True) if x != ours}}
              for other in plan.alternatives]
    tasks = {demand.name: {
        "current": demand.now, "gpus": x, "faulted": demand.faulted,
        "waf_before": waf_of(demand, demand.now),
        "waf": waf_of(demand, x), "earned": waf_of(demand, x) * asked.running_s,
        "transition": cost_flop(demand, x)} for demand, x in zip(demands, slots, strict=True)}
    return {
        "allocation": dict(zip(names, slots, strict=True)), "objective": worth, "reason": plan.why,
        "waf": plan.waf, "waf_before": math.fsum(one["waf_before"] for one in tasks.values()),
        "transition": plan.transition_flop, "gpus": asked.num_slots, "used": sum(slots),
        "running_s": asked.running_s, "tasks": tasks,
        "binding": {"gpus": tried.more_waf > 0, "more_gpus": tried.more_slots,
                    "more_earn_waf": tried.more_waf,
                    "at_largest": [demand.name for demand, x in zip(demands, slots, strict=True)
                                   if demand.sizes and x == demand.sizes[-1]]},
        "alternatives": sorted(others, key=lambda other: other["loses"])}
