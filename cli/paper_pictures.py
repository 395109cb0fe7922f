"""The pictures of the paper's evaluation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..control_plane.severity import TABLE
from ..control_plane.simulation import cases, evaluation
from ..control_plane.simulation.earnings import LOST
from ..control_plane.simulation.evaluation import OURS, REPORTED, RULES, THEIRS
from ..control_plane.simulation.happening import Happening
from ..control_plane.simulation.policies import POLICIES
from ..control_plane.simulation.run import Outcome
from .figures import number_of
from .pictures import COLOURS, INK, MUTED, OURS_COLOUR, Picture
from .simulate_paper import Evaluation, Row, ratios

Values = dict[tuple[str, str, str], Row]
OTHERS = tuple(name for name in POLICIES if name != OURS)
OVER_TIME = (OURS, "shrink", "spares", "megatron-spares", THEIRS)
DAY_S = 86400.0
PARTS_NUM = 168
PAPER_MARK, TRACE_COLOURS = "D", (COLOURS[2], COLOURS[0])
FLAT_S = {"Oobleck": 10.0, "Bamboo": 450.0, "Varuna": 701.0}
"""Of a 6.7 B model, whatever the cluster (Oobleck's artifact)."""
REQUEUE_S = ((2_048, 454.0), (4_096, 545.0), (8_192, 635.0), (16_384, 768.0))
"""To schedule the whole job again, alone (ByteRobust, arXiv 2509.16293, table 7)."""


def of_ratios(found: Evaluation, value: Values) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, case in enumerate(cases.TRACES):
            places = [-at + 0.2 - 0.4 * number for at in range(len(OTHERS))]
            rows = [value[case, name, "waf_ratio"] for name in OTHERS]
            axes.barh(places, [row["value"] - 1 for row in rows], left=1, height=0.36,
                      color=TRACE_COLOURS[number], label=case)
            axes.hlines(places, [row["least"] for row in rows], [row["most"] for row in rows],
                        color=INK, linewidth=1.2)
            told = [(REPORTED[case, name], place) for name, place in
                    zip(OTHERS, places, strict=True) if (case, name) in REPORTED]
            axes.plot(*zip(*told, strict=True), PAPER_MARK, color="white", markeredgecolor=INK,
                      markersize=6, label="the paper's" if number else None)
        axes.set_xscale("log")
        ticks = [1, 1.2, 1.5, 2, 3, 4, 5]
        axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([-at for at in range(len(OTHERS))], OTHERS)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("Unicron's accumulated WAF over the policy's")
        axes.legend(loc="lower right")
    return Picture(
        "ratios", "What Unicron earns, over every other policy",
        f"Accumulated WAF on the paper's traces: bars are medians of "
        f"{number_of(found.seeds, 'seed')}, lines the least and the most, diamonds what the paper "
        "has. Oobleck's, Bamboo's and Varuna's speed without a fault is taken from those very "
        "ratios: only Megatron's are evidence.",
        draw, height=5.2)


def of_time(found: Evaluation) -> Picture:
    def draw(figure: Any) -> None:
        every = figure.subplots(2, 1)
        for axes, case in zip(every, cases.TRACES, strict=True):
            full = 0.0
            for number, name in enumerate(OVER_TIME):
                outcome = found.played[case, name, 1, ""].outcome
                means = _means(outcome, cases.TRACES[case].horizon_s)
                full = max(full, *means)
                axes.stairs([mean / 1e15 for mean in means], _edges_d(case), baseline=None,
                            label=name, color=OURS_COLOUR if name == OURS else COLOURS[number - 1],
                            linewidth=2.0 if name == OURS else 1.0,
                            zorder=3 if name == OURS else 2)
            _faults(axes, found, case, full / 1e15)
            part_h = cases.TRACES[case].horizon_s / PARTS_NUM / 3600
            axes.set_title(f"{case}, seed 1: means of {part_h:.3g} h each", loc="left", fontsize=9,
                           color=MUTED)
            axes.set_ylabel("WAF, PFLOP/s")
            axes.set_xlim(0, cases.TRACES[case].horizon_s / DAY_S)
        every[-1].set_xlabel("days")
        every[-1].legend(ncols=len(OVER_TIME), loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return Picture(
        "waf-over-time", "WAF over time, with the faults",
        "The weighted FLOP/s of all tasks, from fault to fault (marks below: red SEV1, which take "
        "a node away until it is repaired; grey SEV2 and SEV3). Unicron keeps each task on a node "
        "(T_necessary): it is below where another lets a light task go without.", draw,
        height=6.4)


def _edges_d(case: str) -> list[float]:
    return [cases.TRACES[case].horizon_s / DAY_S * at / PARTS_NUM for at in range(PARTS_NUM + 1)]


def _means(outcome: Outcome, horizon_s: float) -> list[float]:
    """Of the WAF, in parts of the horizon that are equally long."""
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
    told = [one for one in found.parts[case, OURS, 1, ""].ground.happenings
            if isinstance(one, Happening) and one.event == "fault"]
    for hard, colour in ((False, MUTED), (True, COLOURS[0])):
        at_d = [one.at_s / DAY_S for one in told if (TABLE[one.cause] == "SEV1") == hard]
        axes.plot(at_d, [-0.05 * full] * len(at_d), "|", color=colour, markersize=8,
                  markeredgewidth=1.4)


def of_losses(value: Values) -> Picture:
    def draw(figure: Any) -> None:
        names = (OURS, *(name for name in OTHERS if name not in RULES))
        every = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, case in zip(every, cases.TRACES, strict=True):
            left = [0.0] * len(names)
            for number, what in enumerate(LOST):
                parts = [100 * value[case, name, f"lost_{what}"]["value"] for name in names]
                axes.barh([-at for at in range(len(names))], parts, left=left, height=0.62,
                          color=COLOURS[number], label=what)
                left = [one + part for one, part in zip(left, parts, strict=True)]
            axes.set_yticks([-at for at in range(len(names))], names)
            axes.grid(axis="y", visible=False)
            axes.set_title(case, loc="left", fontsize=9, color=MUTED)
            axes.set_xlabel("lost, % of what it earns without a fault")
        every[-1].legend(loc="lower right")
    return Picture(
        "losses", "What recovery costs, and of what it is made",
        "Detection: a fault has stopped a task and nobody was told. Transition: on the way to "
        "train again. Waiting: its slots are away. Sub-healthy: it trains on fewer. Recomputed: "
        "done twice. Who keeps a node idle has less to lose, and earns less for that. The rules of "
        "allocation heal as Unicron does, and are left out.", draw, height=4.4)


def of_cases(value: Values) -> Picture:
    def draw(figure: Any) -> None:
        axes, systems = figure.subplots(), (OURS, *RULES)
        for number, name in enumerate(systems):
            axes.bar([case + 0.2 * (number - 1.5) for case in cases.CASES],
                     [value[f"case-{case}", name, "waf"]["value"] / 1e15 for case in cases.CASES],
                     width=0.18, label=name if number else "unicron",
                     color=COLOURS[number + 1] if number else OURS_COLOUR)
        axes.set_xticks([*cases.CASES], [f"case {case}" for case in cases.CASES])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("WAF, PFLOP/s")
        axes.legend(ncols=len(systems), loc="upper left", bbox_to_anchor=(0, 1.12))
    return Picture("cases", "Six tasks on 128 GPUs, by four rules",
                   "What the cluster earns without a fault, in the paper's five multi-task cases.",
                   draw, height=3.6)


def of_growth(found: Evaluation) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        gpus = [one.gpus for one, _ in found.growth]
        axes.plot(gpus, [one.pause_s + plan_s for one, plan_s in found.growth], "o-",
                  color=OURS_COLOUR, linewidth=2, label="Unicron, with NCCL as published")
        axes.plot(gpus, [one.detect_s + one.change_s + plan_s for one, plan_s in found.growth],
                  "o--", color=OURS_COLOUR, linewidth=1, label="Unicron, as measured on gloo")
        axes.plot(gpus, [plan_s for _, plan_s in found.growth], ".:", color=INK,
                  label="of that the plan")
        for number, (name, long_s) in enumerate(FLAT_S.items()):
            axes.axhline(long_s, color=COLOURS[number], linewidth=1.2, linestyle=(0, (5, 2)),
                         label=f"{name}, 30 GPUs")
        axes.plot(*zip(*REQUEUE_S, strict=True), "s-", color=COLOURS[6], markersize=4,
                  label="requeue: scheduling alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("seconds")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Picture("transition", "From a lost node to training again, by cluster size",
                   "Pieces as measured by this project's benches on four ranks over gloo; the plan "
                   "is timed here and now; NCCL's communicators as MegaScale publishes them (under "
                   "5 s at 2,048 GPUs, under 30 s above 10,000). No piece was run on GPUs.", draw)


def of_changes(found: Evaluation, value: Values) -> Picture:
    told = [(change.what, name) for change in evaluation.SENSITIVITY for name in change.systems[1:]]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, case in enumerate(cases.TRACES):
            axes.axvline(ratios(found, case, THEIRS)[0], color=TRACE_COLOURS[number],
                         linestyle=":", linewidth=1.2)
            axes.plot([value[f"{case}: {what}", name, "waf_ratio"]["value"] for what, name in told],
                      [-at for at in range(len(told))], "o", color=TRACE_COLOURS[number],
                      label=case)
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_xscale("log")
        ticks = [1, 1.2, 1.5, 2, 3, 4]
        axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks([-at for at in range(len(told))], [
            what if name == THEIRS else f"{what}: {name}" for what, name in told])
        axes.set_xlabel("Unicron's accumulated WAF over Megatron's, or of who is named")
        axes.legend(loc="upper right")
    moved = {what: max(abs(math.log(value[f"{case}: {what}", name, "waf_ratio"]["value"]
                                    / ratios(found, case, THEIRS)[0])) for case in cases.TRACES)
             for what, name in told if name == THEIRS}
    first, second = sorted(moved, key=lambda what: -moved[what])[:2]
    return Picture("sensitivity", "Which conclusion hangs on which constant",
                   "Each change alone, with the first seed; dotted: all as it is. The ratio over "
                   f"Megatron hangs most on these: {first}; {second}.", draw)
