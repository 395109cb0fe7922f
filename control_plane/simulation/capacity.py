"""Capacity questions: one scenario at other MTBFs, with other spares, under other weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from ...events.errors import SpecError, need
from . import paper_evaluation
from .policies.policy import Policy
from .run import Ground
from .scenario import Scenario, ground, policy
from .trace import generator
from .trace.external_event import Happening
from .trace.generator import RATES, Drawn, DrawnTrace
from .trace.repair_time import Repair

OURS = "unicron"
MTBF_RATIOS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
WEIGHT_RATIOS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
SYSTEMS = (OURS, "shrink", "spares", "megatron-spares", "requeue", "megatron")
HINT = "trace: {drawn: {mtbf_gpu_h: 4000}}; see docs/guides/traces.md"


class Point(NamedTuple):
    """One run: `at` is the MTBF's ratio, the number of spares, or the weight's ratio."""

    at: float
    system: str
    seed: int
    policy: Policy
    ground: Ground


def usual() -> Scenario:
    """The paper's case 5 on 16 nodes for 8 weeks, at trace-a's rate, drawn."""
    trace = paper_evaluation.TRACES["trace-a"]
    gpu_h = paper_evaluation.NODES_NUM * paper_evaluation.NODE_SLOTS_NUM * trace.horizon_s / 3600
    return replace(
        paper_evaluation.scenario("trace-a", SYSTEMS),
        name="case-5",
        trace=DrawnTrace(
            drawn=Drawn(
                mtbf_gpu_h=gpu_h / (trace.num_sev1 + trace.num_others),
                causes={**paper_evaluation.SEV1_SHARES, **paper_evaluation.OTHER_SHARES},
                repair=Repair(uniform_s=trace.repair_s),
            )
        ),
    )


def mtbf(asked: Scenario, seeds: int) -> list[Point]:
    """All policies of the scenario, as faults come more and less often. Raises SpecError."""
    return [point for ratio in MTBF_RATIOS for seed in range(seeds)
            for point in _points(asked, ratio, _drawn(asked, seed, ratio), seed)]


def spares(asked: Scenario, seeds: int, most: int) -> list[Point]:
    """Up to so many idle nodes under each policy that has them, and Unicron without. Raises
    SpecError."""
    told = [name for name in asked.policies if policy(asked, name).costs.num_spares]
    need(bool(told), "policies", "has none that keeps spares", "add spares: {}")
    found: list[Point] = []
    for seed in range(seeds):
        happenings = _drawn(asked, seed)
        for num in range(most + 1):
            names = told if num or OURS not in asked.policies else [OURS, *told]
            found += _points(replace(asked, policies={
                name: {**asked.policies[name], **({"num_spares": num} if name in told else {})}
                for name in names}), num, happenings, seed)
    return found


def weights(asked: Scenario, seeds: int, task: str) -> list[Point]:
    """Unicron, as this task's weight is another. Raises SpecError."""
    names = [one.name for one in asked.tasks]
    need(task in names, "--task", f"is {task[:60]!r}, which is no task",
         f"one of {', '.join(names)}")
    return [point for seed in range(seeds) for happenings in [_drawn(asked, seed)]
            for ratio in WEIGHT_RATIOS for point in _points(replace(
                asked, policies={OURS: asked.policies.get(OURS, {})},
                tasks=tuple(replace(one, weight=one.weight * ratio) if one.name == task else one
                            for one in asked.tasks)), ratio, happenings, seed)]


def _points(asked: Scenario, at: float, happenings: Sequence[Happening], seed: int) -> list[Point]:
    return [Point(at, name, seed, chosen, ground(asked, chosen, happenings))
            for name in asked.policies for chosen in [policy(asked, name)]]


def _drawn(asked: Scenario, seed: int, ratio: float = 1.0) -> list[Happening]:
    """The trace, drawn with another seed, faults so much rarer."""
    if not isinstance(asked.trace, DrawnTrace):
        raise SpecError("trace", "is a file: what is drawn has other seeds and rates", HINT)
    told = asked.trace.drawn
    count, bursts = told.count, told.bursts
    if isinstance(count, dict):
        count = {what: round(num / ratio) for what, num in count.items()}
    elif count is not None:
        count = round(count / ratio)
    if bursts is not None and bursts.every_h is not None:
        bursts = replace(bursts, every_h=bursts.every_h * ratio)
    rarer = {name: value * ratio for name in RATES
             if isinstance(value := getattr(told, name), float)}
    made = replace(told, seed=told.seed + seed, count=count, bursts=bursts, **rarer)
    return generator.draw(made, asked.cluster.names, asked.cluster.slots, asked.horizon_s)


def mtbf_gpu_h(asked: Scenario) -> float:
    """What the ratio is of, where the trace says so for a GPU; else 0."""
    told = asked.trace.drawn if isinstance(asked.trace, DrawnTrace) else Drawn()
    num_gpus = len(asked.cluster.names) * asked.cluster.slots
    if told.mtbf_gpu_h is not None:
        return told.mtbf_gpu_h
    if told.mtbf_gpu_days is not None:
        return 24 * told.mtbf_gpu_days
    if told.mtbf_node_h is not None:
        return told.mtbf_node_h * asked.cluster.slots
    num = sum(told.count.values()) if isinstance(told.count, dict) else told.count
    return num_gpus * asked.horizon_s / 3600 / num if num else 0.0


class BreakEven(NamedTuple):
    """At `at` two systems earn alike; below it `below` earns more."""

    at: float
    below: str
    above: str


def break_evens(curves: Mapping[str, Sequence[tuple[float, float]]], *, geometric: bool
                ) -> list[BreakEven]:
    """Where two curves over the same points cross, on the line between two of these."""
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
