"""Capacity questions: one scenario with other MTBFs, spare nodes or weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from ...events.errors import SpecError, need
from .policies.policy import Policy
from .run import RunInput
from .scenario import Scenario, policy, run_input
from .trace import generator
from .trace.external_event import ExternalEvent
from .trace.generator import RATES, Drawn, DrawnTrace

OURS = "unicron"
MTBF_RATIOS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
WEIGHT_RATIOS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
HINT = "trace: {drawn: {mtbf_gpu_h: 4000}}; see docs/guides/traces.md"


class Point(NamedTuple):
    """One run. `at` is the ratio of the MTBF, the number of spares, or the ratio of the weight."""

    at: float
    system: str
    seed: int
    policy: Policy
    run_input: RunInput


def mtbf(base: Scenario, seeds: int) -> list[Point]:
    """All policies of the scenario at each ratio of the MTBF. Raises SpecError."""
    return [point for ratio in MTBF_RATIOS for seed in range(seeds)
            for point in _points(base, ratio, _drawn(base, seed, ratio), seed)]


def spares(base: Scenario, seeds: int, most: int) -> list[Point]:
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


def weights(base: Scenario, seeds: int, task: str) -> list[Point]:
    """Unicron at each ratio of this task's weight. Raises SpecError."""
    names = [one.name for one in base.tasks]
    need(task in names, "--task", f"is {task[:60]!r}, which is no task",
         f"one of {', '.join(names)}")
    return [point for seed in range(seeds) for events in [_drawn(base, seed)]
            for ratio in WEIGHT_RATIOS for point in _points(replace(
                base, policies={OURS: base.policies.get(OURS, {})},
                tasks=tuple(replace(one, weight=one.weight * ratio) if one.name == task else one
                            for one in base.tasks)), ratio, events, seed)]


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
