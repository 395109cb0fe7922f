"""`unicron simulate mtbf`, `spares` and `weights`: the effect of MTBF, spares and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from ...control_plane.simulation import capacity
from ...control_plane.simulation.capacity import OURS, BreakEven, Point
from ...control_plane.simulation.scenario import Scenario
from ...events.errors import SpecError, UsageError
from ..terminal import console
from ..terminal.format import labelled, number_of, table
from .compare import RunResult, RunSpec, play, read

WORDS_NUM_MAX = 6
DEFAULT = Path(__file__).with_name("case-5.yaml")
Curve = list[tuple[float, float]]
Row = dict[str, Any]


class Result(NamedTuple):
    """The values of each system at the points of the quantity `across`. `form` formats a point."""

    scenario: Scenario
    what: str
    seeds: int
    across: str
    curves: dict[str, Curve]
    words: list[str]
    form: str
    evens: Sequence[BreakEven] = ()


def mtbf(scenario: Path | None, *, seeds: int, as_json: bool) -> None:
    """Compare the policies at several MTBFs."""
    loaded = _scenario(scenario)
    points, played = _simulate(scenario, lambda: capacity.mtbf(loaded, seeds))
    unit_h = capacity.mtbf_gpu_h(loaded)
    curves = _curves(points, played, unit_h or 1.0)
    evens = capacity.break_evens(curves, geometric=True)
    what = "MTBF OF A GPU, H" if unit_h else "MTBF, TIMES"
    sentences = [f"{one.below} and {one.above} earn the same at {one.at:,.0f} h: below it "
                 f"{one.below} earns more" for one in evens]
    ahead = [name for name in curves if name != OURS and OURS in curves and all(
        mine > its for (_, mine), (_, its) in zip(curves[OURS], curves[name], strict=True))]
    if ahead:
        sentences.append(f"at each of these MTBFs {OURS} earns more than {', '.join(ahead)}")
    if loaded.limits.get("floor"):
        sentences.insert(0, f"{OURS} keeps every task on its floor (limits: floor); the others "
                         "let tasks wait, which earns more where one task has most of the weight")
    _show(Result(loaded, "mtbf", seeds, what, curves, sentences, ",.0f" if unit_h else "g", evens),
          as_json)


def spares(scenario: Path | None, *, most: int, seeds: int, as_json: bool
           ) -> None:
    """Compare numbers of idle nodes, under each policy that keeps them."""
    loaded = _scenario(scenario)
    if most >= len(loaded.cluster.names):
        raise UsageError(f"--most {most} leaves no node", f"fewer than {len(loaded.cluster.names)}")
    points, played = _simulate(scenario, lambda: capacity.spares(loaded, seeds, most))
    curves = _curves(points, played)
    sentences: list[str] = []
    ours = curves[OURS][0][1] if OURS in curves else None
    for name in (x for x in curves if x != OURS):
        share, num = max((share, -at) for at, share in curves[name])
        compared = "" if ours is None else (
            f"; {OURS} with none earns {100 * ours:.2f} %, {ours / share:.3f} x as much")
        sentences.append(f"{name}: {number_of(round(-num), 'idle node')} earn most, "
                         f"{100 * share:.2f} %{compared}")
    if OURS in curves:  # a constant, to compare with: Unicron keeps no idle nodes
        curves[OURS] = [(float(num), curves[OURS][0][1]) for num in range(most + 1)]
    _show(Result(loaded, "spares", seeds, "IDLE NODES", curves, sentences, ".0f",
                 capacity.break_evens(curves, geometric=False)), as_json)


def weights(scenario: Path | None, *, task: str, seeds: int, as_json: bool
            ) -> None:
    """Compare weights of one task: its slots, and the cost for the other tasks."""
    loaded = _scenario(scenario)
    points, played = _simulate(scenario, lambda: capacity.weights(loaded, seeds, task))
    usual = {one.name: one.weight for one in loaded.tasks}
    names = [*usual]
    mine: dict[float, list[tuple[float, float, float]]] = {}
    for point, one in zip(points, played, strict=True):
        earnings = one.outcome.earnings
        work = {name: earnings.flop_of[number] / spec.weight for name, number, spec in
                zip(names, sorted(earnings.flop_of), point.run_input.tasks, strict=True)}
        slots = earnings.full_slots[sorted(earnings.full_slots)[names.index(task)]]
        mine.setdefault(point.at, []).append((
            slots, work[task], fsum(usual[name] * flop for name, flop in work.items())))
    means = {at: [fsum(column) / len(every) for column in zip(*every, strict=True)]
             for at, every in mine.items()}
    base = means[1.0]
    curves: dict[str, Curve] = {
        "its slots, of all": [(at * usual[task], one[0] / (
            len(loaded.cluster.names) * loaded.cluster.slots)) for at, one in means.items()],
        "its FLOP, times": [(at * usual[task], one[1] / base[1] if base[1] else 0.0)
                            for at, one in means.items()],
        "all by the old weights, times": [(at * usual[task], one[2] / base[2])
                                          for at, one in means.items()]}
    sentences = [f"{task} has weight {usual[task]:g} and, without a fault, {base[0]:.0f} slots"]
    _show(Result(loaded, "weights", seeds, f"WEIGHT OF {task.upper()}", curves, sentences, "g"),
          as_json)


# --- common parts -------------------------------------------------------------------------------
def _scenario(path: Path | None) -> Scenario:
    try:
        return read(path or DEFAULT)[0]
    except SpecError as error:
        raise UsageError(f"{path}: {error}", error.hint) from None


def _simulate(path: Path | None, points: Callable[[], list[Point]]
            ) -> tuple[list[Point], list[RunResult]]:
    try:
        found = points()
    except SpecError as error:
        raise UsageError(f"{path}: {error}" if path is not None else str(error),
                         error.hint) from None
    return found, play([RunSpec(point.policy, point.run_input) for point in found])


def _curves(points: Sequence[Point], played: Sequence[RunResult], unit: float = 1.0
            ) -> dict[str, Curve]:
    """The FLOP that each system earns at each point (in `unit`s): means over the seeds, as a share
    of what the cluster earns without a fault, under Unicron's plan if that was simulated."""
    _, ideal = max((point.system == OURS, one.outcome.earnings.full_flop)
                   for point, one in zip(points, played, strict=True))
    every: dict[str, dict[float, list[float]]] = {}
    for point, one in zip(points, played, strict=True):
        every.setdefault(point.system, {}).setdefault(point.at, []).append(
            one.outcome.earnings.flop)
    return {name: [(at * unit, fsum(flops) / len(flops) / ideal)
                   for at, flops in sorted(curve.items())] for name, curve in every.items()}


def _show(result: Result, as_json: bool) -> None:
    loaded, curves, seeds = result.scenario, result.curves, result.seeds
    columns = [at for at, _ in next(iter(curves.values()))]
    cells = [[format(at, result.form), *(f"{curve[number][1]:.4f}" for curve in curves.values())]
             for number, at in enumerate(columns)]
    head = [result.across, *(name.upper() for name in curves)]
    lines = [f"{loaded.name}: {number_of(len(loaded.cluster.names), 'node')}, "
             f"{number_of(len(loaded.tasks), 'task')}, {number_of(seeds, 'seed')}", "",
             *table(head, cells, right=range(len(head))), ""]
    for word in result.words[:WORDS_NUM_MAX]:
        lines += labelled("so", word)
    console.show(_rows(result), lines, as_json=as_json)


def _rows(result: Result) -> list[Row]:
    return [*({"case": f"{result.what}-{at:.6g}", "system": name, "metric": "share",
               "value": value, "unit": "1", "n": result.seeds}
              for name, curve in result.curves.items() for at, value in curve),
            *({"case": f"{result.what}: {one.below} and {one.above}", "system": one.below,
               "metric": "break_even", "value": one.at, "unit": result.across.lower(),
               "n": result.seeds} for one in result.evens)]
