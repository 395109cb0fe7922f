"""`unicron simulate mtbf`, `spares` and `weights`: what more and less of each would earn."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from ...control_plane.simulation import capacity
from ...control_plane.simulation.capacity import OURS, BreakEven, Point
from ...control_plane.simulation.scenario import Scenario
from ...events.errors import SpecError, UsageError
from ..terminal import console
from ..terminal.format import command, labelled, number_of, table
from . import paper_report as html
from .charts import COLOURS, OURS_COLOUR, Picture
from .compare import Played, Stage, play, read

WORDS_NUM_MAX = 6
Curve = list[tuple[float, float]]
Row = dict[str, Any]


class Answer(NamedTuple):
    """What is told: a value by system at each point `across`, which is written in that `form`."""

    asked: Scenario
    what: str
    seeds: int
    across: str
    curves: dict[str, Curve]
    words: list[str]
    picture: Picture
    form: str
    again: str
    """The same question, as it was typed."""
    evens: Sequence[BreakEven] = ()


def mtbf(scenario: Path | None, *, seeds: int, report: Path | None, as_json: bool) -> None:
    """How the policies compare as faults come more and less often."""
    asked = _asked(scenario, report)
    points, played = _played(scenario, lambda: capacity.mtbf(asked, seeds))
    unit_h, ideal = capacity.mtbf_gpu_h(asked), _ideal(points, played)
    curves = {name: [(at * (unit_h or 1.0), flop / ideal) for at, flop in curve]
              for name, curve in _curves(points, played).items()}
    evens = capacity.break_evens(curves, geometric=True)
    what = "MTBF OF A GPU, H" if unit_h else "MTBF, TIMES"
    words = [f"{one.below} and {one.above} earn alike at {one.at:,.0f} h: below it {one.below} "
             "earns more" for one in evens]
    ahead = [name for name in curves if name != OURS and OURS in curves and all(
        mine > its for (_, mine), (_, its) in zip(curves[OURS], curves[name], strict=True))]
    if ahead:
        words.append(f"at each of these MTBFs {OURS} earns more than {', '.join(ahead)}")
    if asked.limits.get("floor"):
        words.insert(0, f"{OURS} keeps every task on its floor (limits: floor); the others let "
                     "tasks go without slots, which earns more where one task has the weight")
    picture = Picture(
        "mtbf", "What a worse MTBF costs", "Of what the cluster earns under Unicron's plan "
        "without a fault; means over the seeds.",
        _drawn(curves, "MTBF of a GPU, hours" if unit_h else "MTBF, times that of the scenario",
               "earned, of full strength without a fault", log=True))
    _tell(Answer(asked, "mtbf", seeds, what, curves, words, picture,
                 ",.0f" if unit_h else "g", _again("mtbf", scenario), evens), report, as_json)


def spares(scenario: Path | None, *, most: int, seeds: int, report: Path | None, as_json: bool
           ) -> None:
    """How many idle nodes pay, under who has them."""
    asked = _asked(scenario, report)
    if most >= len(asked.cluster.names):
        raise UsageError(f"--most {most} leaves no node", f"fewer than {len(asked.cluster.names)}")
    points, played = _played(scenario, lambda: capacity.spares(asked, seeds, most))
    ideal = _ideal(points, played)
    curves = {name: [(at, flop / ideal) for at, flop in curve]
              for name, curve in _curves(points, played).items()}
    words: list[str] = []
    for name, curve in curves.items():
        if name != OURS:
            share, num = max((share, -at) for at, share in curve)
            words.append(f"{name}: {number_of(round(-num), 'idle node')} pay most, "
                         f"{100 * share:.2f} %" + _beside(curves, share))
    if OURS in curves:  # without spares: a line to compare with
        curves[OURS] = [(float(num), curves[OURS][0][1]) for num in range(most + 1)]
    picture = Picture(
        "spares", "How many spares pay", "Of what the cluster earns under Unicron's plan, all "
        "nodes in use and without a fault; means over the seeds.",
        _drawn(curves, "idle nodes", "earned, of full strength without a fault", log=False))
    _tell(Answer(asked, "spares", seeds, "IDLE NODES", curves, words, picture,
                 ".0f", _again("spares", scenario), capacity.break_evens(curves, geometric=False)),
          report, as_json)


def _beside(curves: dict[str, Curve], share: float) -> str:
    if OURS not in curves:
        return ""
    ours = curves[OURS][0][1]
    return f"; {OURS} with none earns {100 * ours:.2f} %, {ours / share:.3f} x as much"


def weights(scenario: Path | None, *, task: str, seeds: int, report: Path | None, as_json: bool
            ) -> None:
    """What a task gets, and what that costs the others, as its weight is another."""
    asked = _asked(scenario, report)
    points, played = _played(scenario, lambda: capacity.weights(asked, seeds, task))
    usual = {one.name: one.weight for one in asked.tasks}
    names = [*usual]
    mine: dict[float, list[tuple[float, float, float]]] = {}
    for point, one in zip(points, played, strict=True):
        earnings = one.outcome.earnings
        work = {name: earnings.flop_of[number] / spec.weight for name, number, spec in
                zip(names, sorted(earnings.flop_of), point.ground.tasks, strict=True)}
        slots = earnings.full_slots[sorted(earnings.full_slots)[names.index(task)]]
        mine.setdefault(point.at, []).append((
            slots, work[task], fsum(usual[name] * flop for name, flop in work.items())))
    means = {at: [fsum(column) / len(every) for column in zip(*every, strict=True)]
             for at, every in mine.items()}
    base = means[1.0]
    curves: dict[str, Curve] = {
        "its slots, of all": [(at * usual[task], one[0] / (
            len(asked.cluster.names) * asked.cluster.slots)) for at, one in means.items()],
        "its FLOP, times": [(at * usual[task], one[1] / base[1] if base[1] else 0.0)
                            for at, one in means.items()],
        "all by the old weights, times": [(at * usual[task], one[2] / base[2])
                                          for at, one in means.items()]}
    words = [f"{task} has weight {usual[task]:g} and, without a fault, {base[0]:.0f} slots"]
    picture = Picture(
        "weights", f"What {task} gets for its weight", "Under Unicron, through the faults; means "
        "over the seeds.", _drawn(curves, f"weight of {task}", "share, or times", log=True))
    _tell(Answer(asked, "weights", seeds, f"WEIGHT OF {task.upper()}", curves, words, picture,
                 "g", _again("weights", scenario, "--task", task)), report, as_json)


# --- what all of them share ---------------------------------------------------------------------
def _asked(path: Path | None, report: Path | None) -> Scenario:
    if report is not None:
        html.folder(report)
    if path is None:
        return capacity.usual()
    try:
        return read(path)[0]
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def _again(what: str, path: Path | None, *more: str) -> str:
    return shlex.join(["unicron", "simulate", what, *more,
                       *(["--scenario", str(path)] if path is not None else [])])


def _played(path: Path | None, points: Callable[[], list[Point]]
            ) -> tuple[list[Point], list[Played]]:
    try:
        found = points()
    except SpecError as error:
        raise UsageError(f"{path}: {error}" if path is not None else str(error),
                         error.hint) from None
    return found, play([Stage(point.policy, point.ground) for point in found])


def _ideal(points: Sequence[Point], played: Sequence[Played]) -> float:
    """What the cluster would earn without a fault, under Unicron's plan if that is there."""
    whole = [(point.system == OURS, one.outcome.earnings.whole_flop)
             for point, one in zip(points, played, strict=True)]
    return max(whole)[1]


def _curves(points: Sequence[Point], played: Sequence[Played]) -> dict[str, Curve]:
    """By system, what it earned at each point: the mean over the seeds."""
    every: dict[str, dict[float, list[float]]] = {}
    for point, one in zip(points, played, strict=True):
        every.setdefault(point.system, {}).setdefault(point.at, []).append(
            one.outcome.earnings.flop)
    return {name: [(at, fsum(flops) / len(flops)) for at, flops in sorted(curve.items())]
            for name, curve in every.items()}


def _drawn(curves: dict[str, Curve], across: str, up: str, *, log: bool) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (name, curve) in enumerate(curves.items()):
            axes.plot(*zip(*curve, strict=True), "o-", markersize=4, label=name,
                      color=OURS_COLOUR if name == OURS else COLOURS[number % len(COLOURS)],
                      linewidth=2.2 if name == OURS else 1.2)
        if log:
            axes.set_xscale("log", base=2)
            ticks = [at for at, _ in next(iter(curves.values()))]
            axes.set_xticks(ticks, [f"{at:,.0f}" if at >= 10 else f"{at:g}" for at in ticks])
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return draw


def _tell(answer: Answer, report: Path | None, as_json: bool) -> None:
    asked, curves, seeds = answer.asked, answer.curves, answer.seeds
    columns = [at for at, _ in next(iter(curves.values()))]
    cells = [[format(at, answer.form), *(f"{curve[number][1]:.4f}" for curve in curves.values())]
             for number, at in enumerate(columns)]
    head = [answer.across, *(name.upper() for name in curves)]
    if report is not None:
        (report / "report.html").write_text(html.page(
            answer.picture.title, f"{asked.name}: {number_of(seeds, 'seed')}.",
            [html.pictured(answer.picture, report, html.words(answer.words),
                           html.table(head, cells))],
            f"unicron simulate {answer.what}; docs/guides/capacity.md"), encoding="utf-8")
    if as_json:
        console.out(json.dumps(_rows(answer)))
        return
    lines = [f"{asked.name}: {number_of(len(asked.cluster.names), 'node')}, "
             f"{number_of(len(asked.tasks), 'task')}, {number_of(seeds, 'seed')}", "",
             *table(head, cells, right=range(len(head))), ""]
    for word in answer.words[:WORDS_NUM_MAX]:
        lines += labelled("so", word)
    then = f"open {report / 'report.html'}" if report is not None else (
        f"{answer.again} --report capacity")
    console.lines([*lines, *labelled("next", command(then))])


def _rows(answer: Answer) -> list[Row]:
    """As benchmarks have them."""
    return [*({"case": f"{answer.what}-{at:.6g}", "system": name, "metric": "share",
               "value": value, "unit": "1", "n": answer.seeds}
              for name, curve in answer.curves.items() for at, value in curve),
            *({"case": f"{answer.what}: {one.below} and {one.above}", "system": one.below,
               "metric": "break_even", "value": one.at, "unit": answer.across.lower(),
               "n": answer.seeds} for one in answer.evens)]
