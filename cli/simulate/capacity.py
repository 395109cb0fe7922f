"""`unicron simulate mtbf` and `spares`: the effect of the MTBF and of idle nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...control_plane.simulation.policies.policy import Policy
from ...control_plane.simulation.run import RunInput
from ...control_plane.simulation.scenario import Scenario, policy, run_input
from ...control_plane.simulation.trace import generator
from ...control_plane.simulation.trace.external_event import ExternalEvent
from ...control_plane.simulation.trace.generator import RATES, Drawn, DrawnTrace
from ...events.errors import SpecError, UsageError, need
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
    points, played = _simulate(scenario, lambda: mtbf_points(loaded, seeds))
    unit_h = mtbf_gpu_h(loaded)
    curves = _curves(points, played, unit_h or 1.0)
    evens = break_evens(curves, geometric=True)
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
    points, played = _simulate(scenario, lambda: spare_points(loaded, seeds, most))
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
                 break_evens(curves, geometric=False)), as_json)


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


# --- The runs, and what follows from their results. ---
OURS = "unicron"
MTBF_RATIOS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
HINT = "trace: {drawn: {mtbf_gpu_h: 4000}}; see docs/guides/traces.md"


class Point(NamedTuple):
    """One run. `at` is the ratio of the MTBF, or the number of spares."""

    at: float
    system: str
    seed: int
    policy: Policy
    run_input: RunInput


def mtbf_points(base: Scenario, seeds: int) -> list[Point]:
    """All policies of the scenario at each ratio of the MTBF. Raises SpecError."""
    return [point for ratio in MTBF_RATIOS for seed in range(seeds)
            for point in _points(base, ratio, _drawn(base, seed, ratio), seed)]


def spare_points(base: Scenario, seeds: int, most: int) -> list[Point]:
    """The policies with spare nodes, at 0 to `most` spares; Unicron at 0. Raises SpecError."""
    spared = [name for name in base.policies if policy(base, name).costs.num_spares]
    need(bool(spared), "policies", "has none that keeps spares", "add spares: {}")
    found: list[Point] = []
    for seed in range(seeds):
        events = _drawn(base, seed)
        for num in range(most + 1):
            names = spared if num or OURS not in base.policies else [OURS, *spared]
            found += _points(replace(base, policies={
                name: {**base.policies[name], **({"num_spares": num} if name in spared else {})}
                for name in names}), num, events, seed)
    return found


def _points(base: Scenario, at: float, events: Sequence[ExternalEvent], seed: int) -> list[Point]:
    return [Point(at, name, seed, chosen, run_input(base, chosen, events))
            for name in base.policies for chosen in [policy(base, name)]]


def _drawn(base: Scenario, seed: int, ratio: float = 1.0) -> list[ExternalEvent]:
    """The trace, drawn with `seed` added to its seed, and with faults `ratio` times as rare."""
    if not isinstance(base.trace, DrawnTrace):
        raise SpecError("trace", "is a file: only a drawn trace has other seeds and rates", HINT)
    drawn = base.trace.drawn
    count, bursts = drawn.count, drawn.bursts
    if isinstance(count, dict):
        count = {what: round(num / ratio) for what, num in count.items()}
    elif count is not None:
        count = round(count / ratio)
    if bursts is not None and bursts.every_h is not None:
        bursts = replace(bursts, every_h=bursts.every_h * ratio)
    rarer = {name: value * ratio for name in RATES
             if isinstance(value := getattr(drawn, name), float)}
    made = replace(drawn, seed=drawn.seed + seed, count=count, bursts=bursts, **rarer)
    return generator.draw(made, base.cluster.names, base.cluster.slots, base.horizon_s)


def mtbf_gpu_h(base: Scenario) -> float:
    """The MTBF per GPU at ratio 1, in hours; 0.0 if the trace does not define it."""
    drawn = base.trace.drawn if isinstance(base.trace, DrawnTrace) else Drawn()
    slots = base.cluster.slots
    if (mean_s := generator.mean_s(drawn, slots)) < math.inf:
        return mean_s * slots / 3600
    num = sum(drawn.count.values()) if isinstance(drawn.count, dict) else drawn.count
    return len(base.cluster.names) * slots * base.horizon_s / 3600 / num if num else 0.0


class BreakEven(NamedTuple):
    """At `at` two systems earn the same. Below it `below` earns more, above it `above`."""

    at: float
    below: str
    above: str


def break_evens(curves: Mapping[str, Sequence[tuple[float, float]]], *, geometric: bool
                ) -> list[BreakEven]:
    """Where two curves over the same points cross, interpolated between neighbouring points."""
    found: list[BreakEven] = []
    for one, other in combinations(curves, 2):
        gaps = [(at, mine - its) for (at, mine), (_, its) in
                zip(curves[one], curves[other], strict=True)]
        for (low, before), (high, after) in pairwise(gaps):
            if before * after < 0:
                part = before / (before - after)
                at = (math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
                      if geometric else low + part * (high - low))
                found.append(BreakEven(at, *((one, other) if before > 0 else (other, one))))
    return sorted(found)
