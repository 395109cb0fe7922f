"""The demo's proof from the log: timeline, curves, and every decision recomputed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import textwrap
from pathlib import Path

from unicron.cli.cluster.local_cluster import program
from unicron.cli.screens.task import loss_curve
from unicron.cli.terminal.format import Plain, curve, lost_cell, ms, ranks, scaled, table
from unicron.control_plane.api.timeline_answer import past_of
from unicron.control_plane.history.history import IncidentHistory
from unicron.events.records.codec import from_plain
from waf import waf as waf_of

from .stage import BrokenError, Stage

COMPARE_S_MAX = 60.0
NOTE_COLUMNS = 80
WAF_COLUMNS = 50


def unicron(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a `unicron` command in a fresh process without UNICRON_* variables."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    return subprocess.run(
        program(*arguments),
        text=True,
        capture_output=True,
        check=False,
        env=clean,
        timeout=COMPARE_S_MAX,
    )


def export(stage: Stage, name: str) -> Path:
    """Export the log so far to a file."""
    path = stage.state.path / name
    run = unicron("export", str(path), "--state", str(stage.state.path))
    if run.returncode:
        raise BrokenError(f"export: {run.stderr.strip()}")
    return path


def hash_at(path: Path, seq: int) -> str:
    """The state's hash after record `seq`, folded from the file in a fresh process."""
    run = unicron("replay", str(path), "--until", str(seq), "-o", "json")
    if run.returncode:
        raise BrokenError(f"replay: {run.stderr.strip()}")
    return str(json.loads(run.stdout)["cluster"]["hash"])


def verify(stage: Stage, path: Path) -> None:
    """Run `unicron replay FILE --verify` in a fresh process and print the verdict."""
    run = unicron("replay", str(path), "--verify", "-o", "json")
    verdict: Plain = json.loads(run.stdout) if run.stdout else {}
    ok = run.returncode == 0 and bool(verdict.get("ok"))
    made = verdict.get("recomputed", {})
    stage.say(
        "replay",
        f"{verdict.get('num_records', 0)} records by a fresh process, no "
        "server: "
        + (
            f"{sum(made.values())} of {sum(made.values())} decisions made again: VERIFIED"
            if ok
            else "DIFFERENT"
        ),
    )
    kinds = ", ".join(f"{num}~{kind}" for kind, num in sorted(made.items()))
    for line in textwrap.wrap(kinds, NOTE_COLUMNS):
        stage.note(None, line.replace("~", " "))
    stage.promise(ok, f"the log verifies: {run.stderr.strip()}")
    live = stage.client.get("/v1/state")["cluster"]
    stage.promise(
        verdict.get("state_hash") == live["hash"] or live["seq"] != verdict.get("num_records"),
        "its state is the control plane's",
    )


def timeline(stage: Stage) -> None:
    """Print the phases of each incident from the kill on, and the control plane's downtime."""
    stage.say("timeline", "since the kill; from the log's records")
    rows = [_phases(stage, one) for one in stage.history.incidents.values()]
    rows.append(["-", "control plane killed", "-", "-", "-", ms(stage.away_s), "-", "-"])
    for line in table(
        ("INCIDENT", "WHAT", "DETECTED", "DECIDED", "REBUILT", "STEPPED", "SLOT-S", "LOST"),
        rows,
        right=(2, 3, 4, 5, 6, 7),
    ):
        stage.note(None, line)
    for one in stage.history.incidents.values():
        stage.promise(
            one.outcome == "healed" and one.id in stage.killed_s,
            f"inc-{one.id} was made by the demo and is healed",
        )
        stage.promise(
            one.incident.iterations_lost == 0 and not one.incident.ckpt_read,
            "no iteration was lost, no checkpoint read",
        )


def _phases(stage: Stage, one: IncidentHistory) -> list[str]:
    killed_s = stage.killed_s.get(one.id, one.fault_s)

    def since(at_s: float | None) -> str:
        return "-" if at_s is None else ms(at_s - killed_s)

    what = f"{one.incident.severity} {stage.name(one.task)}'s {ranks(one.incident.ranks)}"
    return [
        f"inc-{one.id}",
        what,
        since(one.detected_s),
        since(one.decided_s),
        since(one.rebuilt_s),
        since(one.stepped_s),
        f"{one.slot_s:.1f}",
        lost_cell(one.incident.iterations_lost),
    ]


def waf(stage: Stage) -> None:
    """Print the measured WAF, the WAF of the plans, and the ideal."""
    series = waf_of(map(from_plain, stage.records), WAF_COLUMNS)
    mean = math.fsum(series.achieved) / len(series.achieved)
    stage.say("WAF", f"from the first task to the last end, {series.bucket_s:.1f} s a column")
    stage.note(
        None,
        f"achieved {curve(series.achieved, WAF_COLUMNS, 0.0)} "
        f"mean {scaled(mean, 'FLOP/s')}, max {scaled(max(series.achieved), 'FLOP/s')}",
    )
    stage.note(
        None, "         measured: FLOP of an iteration x iterations done first, weighted; two cores"
    )
    for what, values in (("plan", series.planned), ("ideal", series.ideal)):
        stage.note(
            None,
            f"{what:<8} {curve(values, WAF_COLUMNS, 0.0, max(series.ideal))} "
            f"max {scaled(max(values), 'FLOP/s')}",
        )
    stage.note(
        None,
        f"         {', '.join(series.origins)} in the specs; the ideal is the best "
        "plan with all slots",
    )
    stage.note(
        None, "         drawn from 0: achieved up to its own max, plan and ideal up to the ideal's"
    )


def loss(stage: Stage, task: int) -> None:
    """Print the loss curve, with marks at the faults."""
    for number, line in enumerate(loss_curve({**past_of(stage.history, task, 0.0)})):
        if number:
            stage.note(None, f"{'':6}{line}")
        else:
            stage.say("loss", f"{stage.name(task):<6}{line}")
