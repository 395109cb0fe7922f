"""The report of `make bench-paper`: one HTML page, and each chart as SVG and PNG."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import trace_csv
import yaml
from bench.paper import evaluation
from bench.paper.charts import COLOURS, INK, MUTED, OURS_COLOUR, Picture
from bench.paper.evaluation import OURS, REPORTED, RULES, SYSTEMS, THEIRS
from bench.paper.page import page, pictured, section, table
from bench.paper.tables import (
    Evaluation,
    Row,
    Values,
    case_rows,
    change_rows,
    growth_rows,
    trace_rows,
)
from msgspec.structs import replace
from unicron import __version__
from unicron.cli.terminal.format import number_of
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation.accounting import LOSSES
from unicron.control_plane.simulation.policies import POLICIES
from unicron.control_plane.simulation.run import Outcome
from unicron.control_plane.simulation.trace.external_event import ExternalEvent

# --- charts -------------------------------------------------------------------------------------

OTHERS = tuple(name for name in SYSTEMS if name != OURS)
OVER_TIME = (OURS, "shrink", "spares", "megatron-spares", THEIRS)
DAY_S = 86400.0
PARTS_NUM = 168
PAPER_MARK, TRACE_COLOURS = "D", (COLOURS[2], COLOURS[0])
FLAT_S = {"Oobleck": 10.0, "Bamboo": 450.0, "Varuna": 701.0}
"""Recovery times with a 6.7 B model, at every cluster size (Oobleck's artifact)."""
REQUEUE_S = ((2_048, 454.0), (4_096, 545.0), (8_192, 635.0), (16_384, 768.0))
"""GPUs, and seconds to schedule the whole job again (ByteRobust, arXiv 2509.16293, table 7)."""


def of_ratios(found: Evaluation, value: Values) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, case in enumerate(evaluation.TRACES):
            places = [-at + 0.2 - 0.4 * number for at in range(len(OTHERS))]
            rows = [value[case, name, "waf_ratio"] for name in OTHERS]
            axes.barh(
                places,
                [row["value"] - 1 for row in rows],
                left=1,
                height=0.36,
                color=TRACE_COLOURS[number],
                label=case,
            )
            axes.hlines(
                places,
                [row["least"] for row in rows],
                [row["most"] for row in rows],
                color=INK,
                linewidth=1.2,
            )
            reported = [
                (REPORTED[case, name], place)
                for name, place in zip(OTHERS, places, strict=True)
                if (case, name) in REPORTED
            ]
            axes.plot(
                *zip(*reported, strict=True),
                PAPER_MARK,
                color="white",
                markeredgecolor=INK,
                markersize=6,
                label="the paper" if number else None,
            )
        axes.set_xscale("log")
        ticks = [1, 1.2, 1.5, 2, 3, 4, 5]
        axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([-at for at in range(len(OTHERS))], OTHERS)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("Unicron's accumulated WAF over the policy's")
        axes.legend(loc="lower right")

    return Picture(
        "ratios",
        "What Unicron earns relative to every other policy",
        f"Accumulated WAF on the paper's traces: bars are medians of "
        f"{number_of(found.seeds, 'seed')}, lines least and most, diamonds the paper's values. "
        "The speed of Oobleck, Bamboo and Varuna without a fault is derived from these ratios: "
        "only Megatron's ratios are evidence.",
        draw,
        height=5.2,
    )


def of_time(found: Evaluation) -> Picture:
    def draw(figure: Any) -> None:
        every = figure.subplots(2, 1)
        for axes, case in zip(every, evaluation.TRACES, strict=True):
            full, horizon_s = 0.0, evaluation.TRACES[case].horizon_s
            edges_d = [horizon_s / DAY_S * at / PARTS_NUM for at in range(PARTS_NUM + 1)]
            for number, name in enumerate(OVER_TIME):
                means = _means(found.played[case, name, 1, ""].outcome, horizon_s)
                full = max(full, *means)
                axes.stairs(
                    [mean / 1e15 for mean in means],
                    edges_d,
                    baseline=None,
                    label=name,
                    color=OURS_COLOUR if name == OURS else COLOURS[number - 1],
                    linewidth=2.0 if name == OURS else 1.0,
                    zorder=3 if name == OURS else 2,
                )
            _faults(axes, found, case, full / 1e15)
            axes.set_title(
                f"{case}, seed 1: means of {horizon_s / PARTS_NUM / 3600:.3g} h each",
                loc="left",
                fontsize=9,
                color=MUTED,
            )
            axes.set_ylabel("WAF, PFLOP/s")
            axes.set_xlim(0, horizon_s / DAY_S)
        every[-1].set_xlabel("days")
        every[-1].legend(ncols=len(OVER_TIME), loc="upper center", bbox_to_anchor=(0.5, -0.22))

    return Picture(
        "waf-over-time",
        "WAF over time, with the faults",
        "The weighted FLOP/s of all tasks, with the faults below: red SEV1, which take a node away "
        "until it is repaired; grey SEV2 and SEV3. Unicron keeps each task on at least one node "
        "(T_necessary): it is below a policy that leaves a light task without slots.",
        draw,
        height=6.4,
    )


def _means(outcome: Outcome, horizon_s: float) -> list[float]:
    """Means of the WAF over equal parts of the horizon."""
    part_s, flop = horizon_s / PARTS_NUM, [0.0] * PARTS_NUM
    curve = [(at_s - outcome.began_s, waf) for at_s, waf in outcome.earnings.curve]
    for (at_s, waf), (until_s, _) in pairwise([*curve, (horizon_s, 0.0)]):
        while at_s < until_s:
            part = min(int(at_s / part_s), PARTS_NUM - 1)
            end_s = until_s if part == PARTS_NUM - 1 else min(until_s, (part + 1) * part_s)
            flop[part] += waf * (end_s - at_s)
            at_s = max(end_s, math.nextafter(at_s, math.inf))
    return [one / part_s for one in flop]


def _faults(axes: Any, found: Evaluation, case: str, full: float) -> None:
    faults = [
        one
        for one in found.parts[case, OURS, 1, ""].run_input.events
        if isinstance(one, ExternalEvent) and one.event == "fault"
    ]
    for hard, colour in ((False, MUTED), (True, COLOURS[0])):
        at_d = [one.at_s / DAY_S for one in faults if (TABLE[one.cause] == "SEV1") == hard]
        axes.plot(
            at_d, [-0.05 * full] * len(at_d), "|", color=colour, markersize=8, markeredgewidth=1.4
        )


def of_losses(value: Values) -> Picture:
    def draw(figure: Any) -> None:
        names = (OURS, *(name for name in OTHERS if name not in RULES))
        every = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, case in zip(every, evaluation.TRACES, strict=True):
            left = [0.0] * len(names)
            for number, what in enumerate(LOSSES):
                parts = [100 * value[case, name, f"lost_{what}"]["value"] for name in names]
                axes.barh(
                    [-at for at in range(len(names))],
                    parts,
                    left=left,
                    height=0.62,
                    color=COLOURS[number],
                    label=what,
                )
                left = [one + part for one, part in zip(left, parts, strict=True)]
            axes.set_yticks([-at for at in range(len(names))], names)
            axes.grid(axis="y", visible=False)
            axes.set_title(case, loc="left", fontsize=9, color=MUTED)
            axes.set_xlabel("lost, % of what it earns without a fault")
        every[-1].legend(loc="lower right")

    return Picture(
        "losses",
        "What recovery costs, by reason",
        "Detection: a fault has stopped a task and was not reported yet. Transition: on the way "
        "back to training. Waiting: its slots are absent. Sub-healthy: it trains on fewer slots. "
        "Recomputed: done twice. A policy that keeps a node idle has less to lose, and earns less. "
        "The allocation rules heal as Unicron does, and are left out.",
        draw,
        height=4.4,
    )


def of_cases(value: Values) -> Picture:
    def draw(figure: Any) -> None:
        axes, systems = figure.subplots(), (OURS, *RULES)
        for number, name in enumerate(systems):
            axes.bar(
                [case + 0.2 * (number - 1.5) for case in evaluation.CASES],
                [value[f"case-{case}", name, "waf"]["value"] / 1e15 for case in evaluation.CASES],
                width=0.18,
                label=name if number else "unicron",
                color=COLOURS[number + 1] if number else OURS_COLOUR,
            )
        axes.set_xticks([*evaluation.CASES], [f"case {case}" for case in evaluation.CASES])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("WAF, PFLOP/s")
        axes.legend(ncols=len(systems), loc="upper left", bbox_to_anchor=(0, 1.12))

    return Picture(
        "cases",
        "Six tasks on 128 GPUs, by plan and by three rules",
        "What the cluster earns without a fault, in the paper's five multi-task cases.",
        draw,
        height=3.6,
    )


def of_growth(found: Evaluation) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        gpus = [one.gpus for one, _ in found.growth]
        axes.plot(
            gpus,
            [one.pause_s + plan_s for one, plan_s in found.growth],
            "o-",
            color=OURS_COLOUR,
            linewidth=2,
            label="Unicron, with NCCL as published",
        )
        axes.plot(
            gpus,
            [one.detect_s + one.change_s + plan_s for one, plan_s in found.growth],
            "o--",
            color=OURS_COLOUR,
            linewidth=1,
            label="Unicron, as measured on gloo",
        )
        axes.plot(
            gpus, [plan_s for _, plan_s in found.growth], ".:", color=INK, label="the plan alone"
        )
        for number, (name, long_s) in enumerate(FLAT_S.items()):
            axes.axhline(
                long_s,
                color=COLOURS[number],
                linewidth=1.2,
                linestyle=(0, (5, 2)),
                label=f"{name}, 30 GPUs",
            )
        axes.plot(
            *zip(*REQUEUE_S, strict=True),
            "s-",
            color=COLOURS[6],
            markersize=4,
            label="requeue: scheduling alone",
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("seconds")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Picture(
        "transition",
        "From a lost node to training again, by cluster size",
        "Parts are measured by this project's benches on four ranks over gloo; the plan "
        "is timed on this machine; NCCL's communicators as MegaScale publishes them "
        "(under 5 s at 2,048 GPUs, under 30 s above 10,000). No part ran on GPUs.",
        draw,
    )


# --- the page -----------------------------------------------------------------------------------
def write(folder: Path, found: Evaluation, rows: list[Row]) -> None:
    """Write report.html, the charts, and each trace of the first seed as a scenario."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(_page(folder, found, rows), encoding="utf-8")
    for name, trace in evaluation.TRACES.items():
        drawn = trace_csv.written(evaluation.events(trace, 1))
        (folder / f"{name}.csv").write_text("\n".join(drawn) + "\n", encoding="utf-8")
        scenario = replace(evaluation.scenario(name, tuple(POLICIES)), trace=f"{name}.csv")
        (folder / f"{name}.yaml").write_text(
            yaml.safe_dump(msgspec.to_builtins(scenario), sort_keys=False), encoding="utf-8"
        )


def _page(folder: Path, found: Evaluation, rows: list[Row]) -> str:
    value = {(one["case"], one["system"], one["metric"]): one for one in rows}
    traces = [
        table(
            [
                case,
                "earned",
                "of full",
                "Unicron over it",
                "paper",
                *(f"{what}, %" for what in LOSSES),
            ],
            trace_rows(case, value),
            ours=OURS,
        )
        for case in evaluation.TRACES
    ]
    return page(
        "What a cluster earns under faults",
        _lead(found),
        [
            f"<p>{_verdict(value, found.seeds)}</p>",
            pictured(of_ratios(found, value), folder, *traces),
            pictured(of_time(found), folder),
            pictured(of_losses(value), folder),
            pictured(
                of_cases(value),
                folder,
                table(
                    ["case", "Unicron's plan", *(f"over {rule}" for rule in RULES)],
                    case_rows(value),
                ),
            ),
            pictured(
                of_growth(found),
                folder,
                table(
                    [
                        "GPUs",
                        "detection",
                        "plan (here, now)",
                        "change (gloo, four ranks)",
                        "NCCL (published)",
                        "pause",
                    ],
                    growth_rows(found),
                ),
            ),
            section(
                "How the conclusion depends on the constants",
                "Each change alone, with the first seed.",
                table(["if", "Unicron is, over", *evaluation.TRACES], change_rows(found, value)),
            ),
            section(
                "The constants",
                "In seconds. Unicron's are measured by this project's "
                "benches, except start_s. For other policies each constant is the published "
                "or the measured value, whichever favours the policy. Sources: "
                "control_plane/simulation/policies/ and docs/guides/paper.md.",
                table(*_constants(), ours=OURS),
            ),
        ],
        f"unicron {__version__}, make bench-paper N={found.seeds}; our reading of "
        "arXiv 2401.00134, which leaves parts of the simulation open (docs/guides/paper.md).",
    )


def _lead(found: Evaluation) -> str:
    return (
        f"The paper's evaluation, simulated again: 16 nodes of 8 A800, six GPT-3 tasks, two "
        f"traces of faults, drawn with {number_of(found.seeds, 'seed')}, under {len(SYSTEMS)} "
        "policies. Every policy uses Unicron's own fold and transitions; it replaces the "
        "decisions, and the duration of each step."
    )


def _verdict(value: Values, num_seeds: int) -> str:
    behind = [
        f"{name} on {case} ({value[case, name, 'waf_ratio']['least']:.3f} x)"
        for case in evaluation.TRACES
        for name in SYSTEMS
        if name != OURS and value[case, name, "waf_ratio"]["least"] < 1
    ]
    below = [
        f"{name} on {case} ({value[case, name, 'waf_ratio']['value']:.2f} x for {reported:g} x)"
        for (case, name), reported in REPORTED.items()
        if value[case, name, "waf_ratio"]["value"] < reported
    ]
    some, each = (", with some seed,", ", with every seed") if num_seeds > 1 else ("", "")
    return (
        (
            f"Unicron earned less{some} than {', '.join(behind)}. "
            if behind
            else f"Unicron earned more than every other policy, on both traces{each}. "
        )
        + (f"Below the paper's ratio: {', '.join(below)}. " if below else "")
        + ("Reasons: docs/guides/paper.md." if behind or below else "")
    )


def _constants() -> tuple[list[str], list[list[str]]]:
    shown = (
        "detect_other_s",
        "start_s",
        "quiesce_s",
        "regroup_s",
        "checkpoint_s",
        "copy_s",
        "speed",
        "num_spares",
    )
    rows: list[list[str]] = []
    for name, policy in SYSTEMS.items():
        constants = msgspec.to_builtins(policy.costs)
        rows.append([name, *(f"{constants[key]:g}" for key in shown)])
    return ["policy", *shown], rows
