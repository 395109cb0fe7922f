"""Simulates published incidents: the table of disasters.md, for figures.py."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from unicron.cli.simulate import compare
from unicron.control_plane.simulation.run import Run
from unicron.events.records import decisions as d
from unicron.events.records.decisions import NodeQuarantined
from unicron.events.records.envelope import Record

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "guides" / "disasters.md"
SCENARIOS = ROOT / "deploy" / "scenarios" / "disasters"
INCIDENTS = ROOT / "tests" / "data" / "incidents_opt_bloom.jsonl"
BEGIN, END = "<!-- figures: disasters -->\n", "<!-- end -->"
# By line of the incidents' file; empty: the simulator cannot play it, and the page says why.
NAMES = (
    "opt-2021-11-05-ecc",
    "opt-2021-11-11-mixed",
    "opt-2021-11-17-forty-restarts",
    "opt-2021-12-06-five-hosts",
    "opt-2021-12-21-cluster-deleted",
    "opt-2021-12-25-eight-recoveries",
    "tr1-2021-08-12-same-node",
    "bloom-2022-03-21-gpu-crash",
    "bloom-2022-03-22-maintenance",
    "bloom-2022-04-weekly-gpu",
    "",
    "bloom-2022-04-30-eval-hang",
    "bloom-2022-05-09-eval-hang",
    "bloom-2022-05-18-eval-hang",
    "bloom-2022-07-04-half-the-nodes",
)
# From reports without a number of hours: 44 restarts of about 90 s each (NVIDIA/Megatron-LM 5281).
REPORTED_H = {"corrupt-replica": 44 * 90 / 3600, "bloom-2022-07-04-half-the-nodes": 2875.47 / 3600}
MODERN = ("hot-spare-rendezvous", "corrupt-replica")
GPUS_OF_A_SLOT = {"opt": 8, "tr1": 4, "bloom": 8}
HEAD = (
    "| scenario | Unicron paused | lost, GPU-h | of that, without GPUs | incidents | plans, "
    "reconfigurations | requeued, GPU-h | reported: hours | reported: GPU-h |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def reported_h() -> dict[str, float]:
    """The reported loss of each, in hours of the whole job, if its operators reported one."""
    lines = INCIDENTS.read_text(encoding="utf-8").splitlines()
    found = {name: json.loads(line) for name, line in zip(NAMES, lines, strict=True) if name}
    return {name: line["lost_h"] for name, line in found.items() if "lost_h" in line} | REPORTED_H


def row(name: str) -> str:
    """One line of the table: the scenario under Unicron, and requeued."""
    scenario, stages = compare.load(SCENARIOS / f"{name}.yaml")
    gpus = scenario.tasks[0].slots.max * GPUS_OF_A_SLOT.get(name.split("-")[0], 1)
    gpu_h = gpus * scenario.horizon_s / 3600
    log: list[Record] = []
    run = Run(stages["unicron"].run_input, stages["unicron"].policy, log.append)
    ours = run.play()
    theirs = Run(stages["requeue"].run_input, stages["requeue"].policy).play()
    full = ours.earnings.full_flop
    away = ours.earnings.lost_flop["waiting"] + ours.earnings.lost_flop["sub-healthy"]
    paused_s = sum(ours.earnings.down_s.values())
    reported_hours = reported_h().get(name)
    cells = (
        f"`{name}`",
        f"{paused_s:.0f} s" if paused_s < 600 else f"{paused_s / 3600:.1f} h",
        f"{(1 - ours.earnings.share) * gpu_h:,.1f}",
        f"{away / full * gpu_h:,.1f}",
        incidents(log),
        f"{ours.counts['PlanChosen'] - 1}, {ours.transitions}",
        f"{(1 - theirs.earnings.share) * gpu_h:,.0f}",
        f"{reported_hours:.1f}" if reported_hours else "",
        f"{reported_hours * gpus:,.0f}" if reported_hours else "",
    )
    return f"| {' | '.join(cells)} |\n"


def incidents(log: list[Record]) -> str:
    """The number of incidents by severity, of escalations to SEV1, and of quarantined nodes."""
    num: Counter[str] = Counter(
        one.body.severity for one in log if isinstance(one.body, d.IncidentOpened)
    )
    num["escalated"] = sum(
        isinstance(one.body, d.IncidentEscalated)
        and one.body.severity == "SEV1"
        and "taken out" in one.body.why
        for one in log
    )
    num["quarantined"] = sum(isinstance(one.body, NodeQuarantined) for one in log)
    return (
        ", ".join(
            f"{num[name]} {name}"
            for name in ("SEV1", "SEV2", "SEV3", "escalated", "quarantined")
            if num[name]
        )
        or "none"
    )


def rows(page: str) -> dict[str, str]:
    """The lines of the page's table, by scenario."""
    block = page.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD)
    return {
        line.split("`")[1]: line for line in block.splitlines(keepends=True) if line.startswith("|")
    }


def table() -> str:
    """The whole table, from a run of each scenario."""
    lines = [HEAD]
    for name in [name for name in (*NAMES, *MODERN) if name]:
        lines.append(row(name))
        sys.stderr.write(lines[-1])
    return "".join(lines)
