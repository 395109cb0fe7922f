"""`unicron simulate`: what each policy earns in a scenario, and what each kind of loss costs."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import typer
from unicron import __version__

from ...control_plane.simulation import scenario as scenarios
from ...control_plane.simulation.accounting import LOSSES, Loss
from ...control_plane.simulation.policies.policy import Policy
from ...control_plane.simulation.run import Outcome, Run, RunInput
from ...control_plane.simulation.scenario import Scenario
from ...control_plane.simulation.trace import generator, trace_file
from ...control_plane.simulation.trace.external_event import ExternalEvent
from ...events.errors import SpecError, UsageError
from ...events.log import archive
from ..files.job_file import FILE_BYTES_MAX, read_text, read_yaml
from ..terminal import console
from ..terminal import format as fmt
from ..terminal.format import Plain

TRACE_BYTES_MAX = 64 << 20
OURS = "unicron"
HEADS: dict[Loss, str] = {
    "detection": "DETECT",
    "transition": "TRANSIT",
    "waiting": "WAIT",
    "sub-healthy": "SUB",
    "recomputed": "AGAIN",
}
LOSS_LEGEND = (
    "DETECT: until a fault is reported. TRANSIT: in transition to training. WAIT: "
    "without slots. SUB: on fewer or slower slots. AGAIN: recomputed"
)


# --- runs, one after the other ---
class RunSpec(NamedTuple):
    """The input of one run. `log`: the file for its log; `cluster`: the cluster in the log."""

    policy: Policy
    run_input: RunInput
    log: Path | None = None
    cluster: str = ""


class RunResult(NamedTuple):
    """The result of one run."""

    outcome: Outcome
    num_records: int
    took_s: float


def play(stages: Sequence[RunSpec]) -> list[RunResult]:
    """Simulate each run; results in the same order. A terminal on stderr shows a progress bar."""
    with typer.progressbar(
        stages, label="simulating", file=sys.stderr, width=0, hidden=not sys.stderr.isatty()
    ) as bar:
        return [_play(stage) for stage in bar]


def _play(stage: RunSpec) -> RunResult:
    began_s = time.perf_counter()
    with (
        nullcontext()
        if stage.log is None
        else archive.create(stage.log, cluster=stage.cluster, code=__version__) as writer
    ):
        run = Run(stage.run_input, stage.policy, writer.add if writer else None)
        outcome = run.play()
    return RunResult(outcome, run.engine.num_records, time.perf_counter() - began_s)


def simulate(path: Path, *, log: Path | None, as_json: bool) -> None:
    """`unicron simulate --scenario`. Raises UsageError for an invalid file."""
    if log is not None and log.exists():
        raise UsageError(f"{log} exists", "name a new file")
    scenario, stages = load(path)
    if log is not None and OURS not in stages:
        raise UsageError(
            f"--log writes the log of policy {OURS}, which {path} does not name",
            f"add {OURS}: {{}} to policies:",
        )
    if log is not None:
        stages[OURS] = stages[OURS]._replace(log=log, cluster=scenario.name)
    played = dict(zip(stages, play([*stages.values()]), strict=True))
    console.show(as_data(scenario, played), screen(scenario, played, path, log), as_json=as_json)


def load(path: Path) -> tuple[Scenario, dict[str, RunSpec]]:
    """The scenario and its runs by policy. Raises UsageError."""
    try:
        scenario, happenings = read(path)
        policies = {name: scenarios.policy(scenario, name) for name in scenario.policies}
        return scenario, {
            name: RunSpec(one, scenarios.run_input(scenario, one, happenings))
            for name, one in policies.items()
        }
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def read(path: Path) -> tuple[Scenario, list[ExternalEvent]]:
    """A scenario with all its nodes, and its external events. Raises UsageError and SpecError."""
    text = read_text(path, FILE_BYTES_MAX, "name a scenario file (YAML)", scenarios.DOCS)
    scenario = scenarios.parse(read_yaml(text, scenarios.DOCS))
    cluster, given, horizon_s = scenario.cluster, scenario.trace, scenario.horizon_s
    if not isinstance(given, str):
        return scenario, generator.draw(given.drawn, cluster.names, cluster.slots, horizon_s)
    trace_path = path.parent / given
    happenings = trace_file.read(
        read_text(
            trace_path,
            TRACE_BYTES_MAX,
            "`trace` is a file beside the scenario, or `drawn`",
            scenarios.DOCS,
        ),
        str(trace_path),
    )
    _check_known(scenario, happenings, trace_path)
    if happenings and happenings[0].at_s > horizon_s:
        raise UsageError(
            f"{trace_path}: all of it is after horizon_s, {horizon_s:g}",
            "at_s is in seconds from the beginning of the scenario",
        )
    return scenario, happenings


def _check_known(scenario: Scenario, happenings: list[ExternalEvent], trace: Path) -> None:
    """Raises UsageError if an event comes before its node exists."""
    names = scenario.cluster.names
    known = set(names)
    for one in happenings:
        if one.event == "joined":
            known.add(one.node)
        elif one.node not in known:
            raise UsageError(
                f"{trace}: at {one.at_s:g} s, {one.event} of {one.node}, which is no "
                "node at that time",
                f"the cluster has {names[0]} to {names[-1]}; any other node needs a "
                "`joined` event first",
            )


# --- as data ------------------------------------------------------------------------------------
def as_data(scenario: Scenario, played: dict[str, RunResult]) -> Plain:
    """All results as JSON. FLOP are weighted; times are seconds from the start of the horizon."""
    names = [task.name for task in scenario.tasks]
    return {
        "scenario": scenario.name,
        "horizon_s": scenario.horizon_s,
        "policies": {name: _policy(one, names) for name, one in played.items()},
    }


def _policy(one: RunResult, names: Sequence[str]) -> Plain:
    earnings, counts = one.outcome.earnings, one.outcome.counts
    return {
        "accumulated_waf_flop": earnings.flop,
        "full_waf_flop": earnings.full_flop,
        "share_of_full": earnings.share,
        "lost_waf_flop": earnings.lost_flop,
        "downtime_task_s": earnings.down_s,
        "slot_s": earnings.slot_s,
        "lost_slot_s": earnings.lost_slot_s,
        "transitions": one.outcome.transitions,
        "incidents": counts["IncidentOpened"],
        "plans": counts["PlanChosen"],
        "ignored": one.outcome.ignored,
        "late": one.outcome.late,
        "records": one.num_records,
        "waf_flop_by_task": dict(
            zip(names, [flop for _, flop in sorted(earnings.flop_of.items())], strict=True)
        ),
        "waf_over_time": [[at_s - one.outcome.began_s, waf] for at_s, waf in earnings.curve],
    }


# --- as text ----------------------------------------------------------------------------------
def screen(
    scenario: Scenario, played: dict[str, RunResult], path: Path, log: Path | None
) -> list[str]:
    """The page, at most 100 columns."""
    cluster = scenario.cluster
    num = len(cluster.names)
    took_s = max(one.took_s for one in played.values())
    lines = [
        f"{scenario.name}: {fmt.number_of(num, 'node')} of "
        f"{fmt.number_of(cluster.slots, 'slot')}, "
        f"{fmt.number_of(len(scenario.tasks), 'task')}, {fmt.span(scenario.horizon_s)}; "
        f"each policy was simulated in {fmt.span(took_s)} or less",
        "",
    ]
    best = max(played.values(), key=lambda one: one.outcome.earnings.flop)
    rows = [_row(name, one, best) for name, one in played.items()]
    head = ("POLICY", "EARNED", "OF FULL", "BEHIND", *(HEADS[what] for what in LOSSES))
    lines += [
        fmt.clipped(line, fmt.SCREEN_COLUMNS) for line in fmt.table(head, rows, right=range(1, 9))
    ]
    lines += [
        "",
        *fmt.labelled("lost", "in % of what the policy earns without a fault. " + LOSS_LEGEND),
    ]
    for task in scenario.tasks:
        if task.slots.min > num * cluster.slots:
            needs = fmt.number_of(task.slots.min, "slot")
            lines += fmt.labelled(
                "waits",
                f"{task.name} needs {needs}, and the cluster begins with {num * cluster.slots}",
            )
    for number, task in enumerate(scenario.tasks):
        idle = [
            name
            for name, one in played.items()
            if not [*one.outcome.earnings.full_slots.values()][number]
        ]
        if idle and task.slots.min <= num * cluster.slots:
            lines += fmt.labelled(
                "waits",
                f"under {', '.join(idle)}, {task.name} gets no slots "
                "even without a fault: other tasks earn more on these slots",
            )
    ignored = max(one.outcome.ignored for one in played.values())
    if ignored:
        lines += fmt.labelled(
            "ignored",
            f"{fmt.number_of(ignored, 'line')} of the trace: a fault "
            "of an absent node, or a repair of a present one",
        )
    late = max(one.outcome.late for one in played.values())
    if late:
        lines += fmt.labelled(
            "late",
            f"{fmt.number_of(late, 'fault')} of the trace, after "
            f"horizon_s, {scenario.horizon_s:g}: not simulated",
        )
    then = (
        f"unicron replay {log} --verify" if log else f"unicron simulate --scenario {path} -o json"
    )
    return [*lines, *fmt.labelled("next", fmt.command(then))]


def _row(name: str, one: RunResult, best: RunResult) -> list[str]:
    earnings = one.outcome.earnings
    full = earnings.full_flop
    behind = best.outcome.earnings.flop / earnings.flop if earnings.flop > 0 else 0.0
    return [
        name,
        fmt.scaled(earnings.flop, "FLOP"),
        f"{100 * earnings.share:.2f} %",
        f"{behind:.3f} x" if one is not best and behind else "-",
        *(f"{100 * earnings.lost_flop[what] / full:.2f}" if full else "-" for what in LOSSES),
    ]
