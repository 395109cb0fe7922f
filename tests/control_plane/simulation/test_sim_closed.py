"""The simulator beside closed forms: Poisson's faults, constant repair, one task."""

from __future__ import annotations

import math
import random
from statistics import mean, stdev
from typing import Any

import pytest
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.accounting import WafAccount
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace.external_event import ExternalEvent

DAY_S, HOUR_S = 86400.0, 3600.0
NODE, PROCESS = "lost connection", "exited abnormally"
SEEDS = range(12)


def play(policy: str, nodes: int, least: int, happenings: list[ExternalEvent], horizon_s: float,
         **constants: Any) -> WafAccount:
    """One task of as many FLOP/s as it has slots, of `least` or more."""
    asked = scenario.parse({
        "apiVersion": "unicron/v1", "name": "closed", "cluster": {"nodes": nodes, "slots": 1},
        "tasks": [{"name": "one", "slots": {"min": least, "max": nodes},
                   "throughput": {size: float(size) for size in range(least, nodes + 1)}}],
        "policies": {policy: constants}, "trace": "trace.csv", "horizon_s": horizon_s,
        "limits": {"quarantine_faults": 1_000_000}})
    chosen = scenario.policy(asked, policy)
    return Run(scenario.run_input(asked, chosen, happenings), chosen).play().earnings


def lives(nodes: int, mtbf_s: float, away_s: float, horizon_s: float, seed: int
          ) -> list[ExternalEvent]:
    """Each node by itself: lost after a time that is drawn, back after one that is not."""
    luck, found = random.Random(seed), list[ExternalEvent]()
    for number in range(nodes):
        at_s = luck.expovariate(1 / mtbf_s)
        while at_s < horizon_s:
            found += [ExternalEvent(at_s, f"n{number}", "fault", NODE),
                      ExternalEvent(at_s + away_s, f"n{number}", "repaired")]
            at_s += away_s + luck.expovariate(1 / mtbf_s)
    return sorted(found, key=lambda one: one.at_s)


def near(found: list[float], told: float, beside: float = 0.0) -> None:
    """The mean within four standard errors; `beside`: what the closed form leaves out."""
    assert abs(mean(found) - told) <= 4 * stdev(found) / math.sqrt(len(found)) + beside


@pytest.mark.parametrize("cause", [NODE, PROCESS])
def test_a_restart_costs_detection_repair_the_start_and_what_was_done_since_the_checkpoint(
        cause: str) -> None:
    """While it trains a fault comes by Poisson: MTBF / (MTBF + what it stands), and M - C/(e^(C/M)
    - 1) of training again each time, for a checkpoint every C: what is left of an exponential."""
    costs = policies.POLICIES["megatron"].costs
    mtbf_s, away_s = 3 * HOUR_S, 2 * HOUR_S
    stands_s = costs.start_s + (
        away_s if cause == NODE else costs.detection_s(cause, 0.0))
    each_s = costs.checkpoint_s
    again_s = mtbf_s - each_s / math.expm1(each_s / mtbf_s)
    up, again = list[float](), list[float]()
    for seed in SEEDS:
        luck, happenings, at_s = random.Random(seed), list[ExternalEvent](), 0.0
        for _ in range(40):
            at_s += luck.expovariate(1 / mtbf_s)
            happenings.append(ExternalEvent(at_s, "n0", "fault", cause))
            if cause == NODE:
                happenings.append(ExternalEvent(at_s + away_s, "n0", "repaired"))
            at_s += stands_s
        found = play("megatron", 2, 2, happenings, at_s)
        up.append(1 - sum(found.down_s.values()) / at_s)
        again.append(found.lost_flop["recomputed"] / 2 / 40)
        assert sum(found.down_s.values()) == pytest.approx(40 * stands_s)
    near(up, mtbf_s / (mtbf_s + stands_s))
    near(again, again_s)


def test_what_shrinks_misses_the_nodes_that_are_away() -> None:
    """Of each node R / (M + R) of the time, and it is missed until it has started again."""
    costs = policies.POLICIES["shrink"].costs
    mtbf_s, away_s, horizon_s, nodes = 5 * DAY_S, 12 * HOUR_S, 60 * DAY_S, 8
    missed = list[float]()
    for seed in SEEDS:
        found = play("shrink", nodes, 1, lives(nodes, mtbf_s, away_s, horizon_s, seed), horizon_s)
        assert found.lost_flop["recomputed"] == 0
        missed.append(found.lost_flop["sub-healthy"] / nodes / horizon_s)
    cycle_s = mtbf_s + away_s
    # It begins with all nodes up: R / (M + R) is reached by e^-(t/M + t/R) or sooner.
    begins = away_s / cycle_s * (mtbf_s * away_s / cycle_s) / horizon_s
    near(missed, (away_s + costs.start_s) / cycle_s, begins + 40 / cycle_s)


def test_a_spare_is_enough_until_a_second_node_is_away() -> None:
    """k of n: the share of time in which two nodes or more are away."""
    mtbf_s, away_s, horizon_s, nodes = 4 * DAY_S, 12 * HOUR_S, 60 * DAY_S, 6
    costs = policies.POLICIES["spares"].costs
    waits = list[float]()
    for seed in SEEDS:
        found = play("spares", nodes, nodes - 1,
                     lives(nodes, mtbf_s, away_s, horizon_s, seed), horizon_s)
        waits.append(found.down_s["waiting"] / horizon_s)
    away = away_s / (mtbf_s + away_s)
    two = 1 - (1 - away) ** nodes - nodes * away * (1 - away) ** (nodes - 1)
    begins = away_s / horizon_s * two
    short = nodes / (mtbf_s + away_s) * (costs.detection_s(NODE, 0.0) + costs.start_s)
    near(waits, two, begins + short * two)
