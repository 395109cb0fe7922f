"""`unicron simulate`: what each policy earns of a scenario, and what it loses, to what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..control_plane.simulation import cases, drawn, trace_file
from ..control_plane.simulation import scenario as scenarios
from ..control_plane.simulation.earnings import LOST, Lost
from ..control_plane.simulation.happening import Happening
from ..control_plane.simulation.policies import POLICIES
from ..control_plane.simulation.scenario import Scenario
from ..events.errors import SpecError, UsageError
from . import say
from .figures import SCREEN_COLUMNS, clipped, command, labelled, number_of, scaled, span, table
from .job_file import FILE_BYTES_MAX, read_text, read_yaml
from .simulate_play import Played, Stage, play

TRACE_BYTES_MAX = 64 << 20
OURS = "unicron"
Plain = dict[str, Any]
HEADS: dict[Lost, str] = {"detection": "DETECT", "transition": "TRANSIT", "waiting": "WAIT",
                          "sub-healthy": "SUB", "recomputed": "AGAIN"}


def simulate(path: Path, *, log: Path | None, as_json: bool) -> None:
    """Read, play, show. Raises UsageError for files that are not as they must be."""
    if log is not None and log.exists():
        raise UsageError(f"{log} exists", "name a new file")
    scenario, stages = load(path, whole=log is not None)
    if log is not None and OURS not in stages:
        raise UsageError(f"--log is of the policy {OURS}, and {path} does not name it",
                         f"add {OURS}: {{}} to policies:")
    if log is not None:
        stages[OURS] = stages[OURS]._replace(log=log, cluster=scenario.name)
    played = dict(zip(stages, play([*stages.values()]), strict=True))
    if as_json:
        say.out(json.dumps(told(scenario, played)))
    else:
        say.lines(screen(scenario, played, path, log))


def load(path: Path, *, whole: bool = False) -> tuple[Scenario, dict[str, Stage]]:
    """The scenario, and by policy what it is played on; ours slot by slot, where that is asked for.

    Raises UsageError.
    """
    try:
        scenario, happenings = read(path)
        policies = {name: scenarios.policy(scenario, name) for name in scenario.policies}
        return scenario, {name: Stage(one, scenarios.ground(
            scenario, one, happenings, condense=not (whole and name == OURS)))
            for name, one in policies.items()}
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def read(path: Path) -> tuple[Scenario, list[Happening]]:
    """A scenario with all its nodes, and what befalls them. One of the paper's by its name.

    Raises UsageError and SpecError.
    """
    if str(path) in cases.TRACES and not path.exists():
        trace = cases.TRACES[str(path)]
        return cases.scenario(str(path), [*POLICIES]), cases.happenings(trace, cases.SEED)
    text = read_text(path, FILE_BYTES_MAX,
                     f"name a scenario, YAML, or one of {', '.join(cases.TRACES)}", scenarios.DOCS)
    scenario = scenarios.parse(read_yaml(text, scenarios.DOCS))
    cluster, given, horizon_s = scenario.cluster, scenario.trace, scenario.horizon_s
    if not isinstance(given, str):
        scenario = scenarios.with_nodes(scenario, ())
        return scenario, drawn.draw(given.drawn, cluster.names, cluster.slots, horizon_s)
    beside = path.parent / given
    told = trace_file.read(
        read_text(beside, TRACE_BYTES_MAX, "trace: names a file beside the scenario, or is drawn",
                  scenarios.DOCS), str(beside))
    scenario = scenarios.with_nodes(scenario, told.nodes)
    _check_nodes(scenario, told.happenings, beside)
    if told.happenings and min(one.at_s for one in told.happenings) > horizon_s:
        raise UsageError(f"{beside}: all of it is after horizon_s, {horizon_s:g}",
                         "at_s is in seconds from the beginning of the scenario")
    return scenario, told.happenings


def _check_nodes(scenario: Scenario, happenings: list[Happening], trace: Path) -> None:
    """A node is there from the beginning, or joins before anything befalls it."""
    names = scenario.cluster.names
    known = set(names)
    for one in happenings:
        if one.event == "joined":
            known.add(one.node)
        elif one.node not in known:
            raise UsageError(f"{trace}: at {one.at_s:g} s, {one.event} of {one.node}, which is no "
                             "node by then",
                             f"the cluster has {names[0]} to {names[-1]}; another one is first "
                             "`joined`")


def print_trace(path: Path) -> None:
    """What befalls the cluster, as a trace file."""
    try:
        happenings = read(path)[1]
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None
    say.lines(trace_file.written(happenings))


# --- as data ------------------------------------------------------------------------------------
def told(scenario: Scenario, played: dict[str, Played]) -> Plain:
    """All of it; FLOP are weighted, times in seconds from the beginning of the horizon."""
    names = [task.name for task in scenario.tasks]
    return {"scenario": scenario.name, "horizon_s": scenario.horizon_s,
            "policies": {name: _policy(one, names) for name, one in played.items()}}


def _policy(one: Played, names: Sequence[str]) -> Plain:
    earnings, counts = one.outcome.earnings, one.outcome.counts
    return {
        "accumulated_waf_flop": earnings.flop, "full_waf_flop": earnings.whole_flop,
        "share_of_full": earnings.share, "lost_waf_flop": earnings.lost_flop,
        "downtime_task_s": earnings.down_s, "slot_s": one.outcome.slot_s,
        "transitions": one.outcome.transitions, "incidents": counts["IncidentOpened"],
        "plans": counts["PlanChosen"], "ignored": one.outcome.ignored, "late": one.outcome.late,
        "records": one.num_records,
        "waf_flop_by_task": dict(zip(names, [
            flop for _, flop in sorted(earnings.flop_of.items())], strict=True)),
        "waf_over_time": [[at_s - one.outcome.began_s, waf] for at_s, waf in earnings.curve],
    }


# --- for people -------------------------------------------------------------------------------
def screen(scenario: Scenario, played: dict[str, Played], path: Path, log: Path | None
           ) -> list[str]:
    """The page, at most 100 columns."""
    cluster = scenario.cluster
    num = len(cluster.names)
    took_s = max(one.took_s for one in played.values())
    lines = [f"{scenario.name}: {number_of(num, 'node')} of {number_of(cluster.slots, 'slot')}, "
             f"{number_of(len(scenario.tasks), 'task')}, {span(scenario.horizon_s)}; "
             f"each policy in {span(took_s)} at most", ""]
    best = max(played.values(), key=lambda one: one.outcome.earnings.flop)
    rows = [_row(name, one, best) for name, one in played.items()]
    head = ("POLICY", "EARNED", "OF FULL", "BEHIND", *(HEADS[what] for what in LOST))
    lines += [clipped(line, SCREEN_COLUMNS) for line in table(head, rows, right=range(1, 9))]
    lines += ["", *labelled("lost", "of what the policy earns without a fault, in %: until a fault "
                            "is told, on the way to train again, without slots, on fewer or slower "
                            "ones, and what is done again")]
    for task in scenario.tasks:
        if task.slots.min > num * cluster.slots:
            lines += labelled("waits", f"{task.name} needs {number_of(task.slots.min, 'slot')}, "
                              f"and the cluster begins with {num * cluster.slots}")
    for number, task in enumerate(scenario.tasks):
        idle = [name for name, one in played.items()
                if not [*one.outcome.earnings.full_slots.values()][number]]
        if idle and task.slots.min <= num * cluster.slots:
            lines += labelled("waits", f"{task.name} has no slots without a fault under "
                              f"{', '.join(idle)}: the others earn more with them")
    ignored = max(one.outcome.ignored for one in played.values())
    if ignored:
        lines += labelled("ignored", f"{number_of(ignored, 'line')} of the trace: a fault of a "
                          "node that was away, or a repair of one that was not")
    late = max(one.outcome.late for one in played.values())
    if late:
        lines += labelled("late", f"{number_of(late, 'fault')} of the trace, after horizon_s, "
                          f"{scenario.horizon_s:g}: not played")
    then = (f"unicron replay {log} --verify" if log else
            f"unicron simulate --scenario {path} -o json")
    return [*lines, *labelled("next", command(then))]


def _row(name: str, one: Played, best: Played) -> list[str]:
    earnings = one.outcome.earnings
    full = earnings.whole_flop
    behind = best.outcome.earnings.flop / earnings.flop if earnings.flop > 0 else 0.0
    return [name, scaled(earnings.flop, "FLOP"), f"{100 * earnings.share:.2f} %",
            f"{behind:.3f} x" if one is not best and behind else "-",
            *(f"{100 * earnings.lost_flop[what] / full:.2f}" if full else "-" for what in LOST)]
