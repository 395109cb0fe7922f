"""The simulator compared with closed forms, with a second simulator, and with itself."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_second import Heals, Job, Second
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.accounting import WafAccount
from unicron.control_plane.simulation.run import Outcome, Run
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.events.records.decisions import TaskPlaced
from unicron.events.records.envelope import Record
from unicron.events.records.reports import TaskSubmitted
from unicron.events.spec.policy import Policy as Limits

DAY_S, HOUR_S = 86400.0, 3600.0
NODE, DEVICE, PROCESS, NETWORK = (
    "lost connection",
    "ECC errors",
    "exited abnormally",
    "link flapping",
)
SEEDS = range(12)


def play(
    policy: str,
    nodes: int,
    least: int,
    happenings: list[ExternalEvent],
    horizon_s: float,
    **constants: Any,
) -> WafAccount:
    """Run one task with throughput x on x slots, from `least` slots on."""
    parsed = scenario.parse(
        {
            "apiVersion": "unicron/v1",
            "name": "closed",
            "cluster": {"nodes": nodes, "slots": 1},
            "tasks": [
                {
                    "name": "one",
                    "slots": {"min": least, "max": nodes},
                    "throughput": {size: float(size) for size in range(least, nodes + 1)},
                }
            ],
            "policies": {policy: constants},
            "trace": "trace.csv",
            "horizon_s": horizon_s,
            "limits": {"quarantine_faults": 1_000_000, "restart_pause_s_max": 0},
        }
    )
    chosen = scenario.policy(parsed, policy)
    return Run(scenario.run_input(parsed, chosen, happenings), chosen).play().earnings


def losses(
    nodes: int, mtbf_s: float, away_s: float, horizon_s: float, seed: int
) -> list[ExternalEvent]:
    """Faults per node: lost after an exponential time, back after a constant time."""
    luck, found = random.Random(seed), list[ExternalEvent]()
    for number in range(nodes):
        at_s = luck.expovariate(1 / mtbf_s)
        while at_s < horizon_s:
            found += [
                ExternalEvent(at_s, f"n{number}", "fault", NODE),
                ExternalEvent(at_s + away_s, f"n{number}", "repaired"),
            ]
            at_s += away_s + luck.expovariate(1 / mtbf_s)
    return sorted(found, key=lambda one: one.at_s)


def assert_near(found: list[float], told: float, beside: float = 0.0) -> None:
    """The mean is within four standard errors, plus `beside`: what the closed form omits."""
    assert abs(mean(found) - told) <= 4 * stdev(found) / math.sqrt(len(found)) + beside


@pytest.mark.parametrize("cause", [NODE, PROCESS])
def test_the_cost_of_restarts_equals_the_closed_form(cause: str) -> None:
    """Poisson faults while it trains: uptime share MTBF / (MTBF + downtime), and lost work of
    M - C / (e^(C/M) - 1) per fault, for MTBF M and a checkpoint every C."""
    costs = policies.POLICIES["megatron"].costs
    mtbf_s, away_s = 3 * HOUR_S, 2 * HOUR_S
    stands_s = costs.start_s + (away_s if cause == NODE else costs.detection_s(cause, 0.0))
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
    assert_near(up, mtbf_s / (mtbf_s + stands_s))
    assert_near(again, again_s)


def test_shrinking_loses_the_absent_nodes() -> None:
    """Each node is away for R / (M + R) of the time, and is missed until it has started again."""
    costs = policies.POLICIES["shrink"].costs
    mtbf_s, away_s, horizon_s, nodes = 5 * DAY_S, 12 * HOUR_S, 60 * DAY_S, 8
    missed = list[float]()
    for seed in SEEDS:
        found = play("shrink", nodes, 1, losses(nodes, mtbf_s, away_s, horizon_s, seed), horizon_s)
        assert found.lost_flop["recomputed"] == 0
        missed.append(found.lost_flop["sub-healthy"] / nodes / horizon_s)
    cycle_s = mtbf_s + away_s
    # All nodes are up at first; the share approaches R / (M + R) at a rate of 1/M + 1/R or faster.
    begins = away_s / cycle_s * (mtbf_s * away_s / cycle_s) / horizon_s
    assert_near(missed, (away_s + costs.start_s) / cycle_s, begins + 40 / cycle_s)


def test_one_spare_is_enough_for_one_absent_node() -> None:
    """The share of time in which two or more of the nodes are away."""
    mtbf_s, away_s, horizon_s, nodes = 4 * DAY_S, 12 * HOUR_S, 60 * DAY_S, 6
    costs = policies.POLICIES["spares"].costs
    waits = list[float]()
    for seed in SEEDS:
        found = play(
            "spares", nodes, nodes - 1, losses(nodes, mtbf_s, away_s, horizon_s, seed), horizon_s
        )
        waits.append(found.down_s["waiting"] / horizon_s)
    away = away_s / (mtbf_s + away_s)
    two = 1 - (1 - away) ** nodes - nodes * away * (1 - away) ** (nodes - 1)
    begins = away_s / horizon_s * two
    short = nodes / (mtbf_s + away_s) * (costs.detection_s(NODE, 0.0) + costs.start_s)
    assert_near(waits, two, begins + short * two)


# --- a second simulator, written independently ---------------------------------------------------
STOPS_S = 4 * scenario.STOP_S
"""Seconds until a process on an absent node counts as ended: stop orders get no answer."""
HOW = {
    "megatron": "kept",
    "requeue": "moved",
    "kubernetes": "moved",
    "megatron-spares": "moved",
    "spares": "moved",
}


def cluster(sizes: list[tuple[int, int]], nodes: int = 6) -> dict[str, Any]:
    """A cluster with tasks of these (min, max) slots."""
    tasks = [
        {
            "name": f"task-{number}",
            "weight": 1.0 + number,
            "slots": {"min": low, "max": high},
            "throughput": {size: 1e12 * size for size in range(low, high + 1)},
        }
        for number, (low, high) in enumerate(sizes)
    ]
    return {
        "apiVersion": "unicron/v1",
        "name": "two",
        "cluster": {"nodes": nodes, "slots": 1},
        "tasks": tasks,
        "policies": {name: {} for name in policies.POLICIES},
        "trace": "trace.csv",
        "horizon_s": 5 * DAY_S,
        "limits": {"quarantine_faults": 1000, "restart_pause_s_max": 0},
    }


def both(
    policy: str, data: dict[str, Any], happenings: list[ExternalEvent]
) -> tuple[Outcome, Second]:
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, policy)
    ground = scenario.run_input(parsed, chosen, happenings)
    log: list[Record] = []
    outcome = Run(ground, chosen, log.append).play()
    seats: dict[int, tuple[str, ...]] = {}
    for record in log:
        if record.at_s > outcome.began_s:
            break
        if isinstance(record.body, TaskSubmitted):
            seats[record.seq] = ()
        elif isinstance(record.body, TaskPlaced):
            seats[record.body.task] = tuple(seat.slot.node for seat in record.body.seats)
    jobs = [
        Job(
            {size: flops * chosen.costs.speed for size, flops in task.throughput.items()},
            task.weight,
            seats[number],
            10.0 * max(task.throughput.values()) * chosen.costs.speed,
        )
        for number, task in zip(seats, parsed.tasks, strict=True)
    ]
    second = Second(list(ground.slots), jobs, chosen.costs, HOW[policy], 10.0)
    second.play(happenings, parsed.horizon_s)
    return outcome, second


def assert_same(outcome: Outcome, second: Second, slack_s: float = 0.0) -> None:
    """Earned FLOP and each loss agree, within `slack_s` seconds of the whole cluster."""
    full = sum(job.full_flops * job.weight for job in second.jobs)
    within = full * (1e-3 + slack_s)
    found = {name: flop / full for name, flop in outcome.earnings.lost_flop.items()}
    told = {name: flop / full for name, flop in second.lost.items()}
    assert found == pytest.approx(told, abs=within / full)
    assert outcome.earnings.flop == pytest.approx(second.earned, abs=within)


def lost(node: str, at_s: float, back_s: float, cause: str = NODE) -> list[ExternalEvent]:
    return [ExternalEvent(at_s, node, "fault", cause), ExternalEvent(back_s, node, "repaired")]


@pytest.mark.parametrize("policy", HOW)
@pytest.mark.parametrize("cause", [NODE, DEVICE, PROCESS, NETWORK])
def test_simulators_agree_on_one_fault(policy: str, cause: str) -> None:
    happenings = lost("n1", DAY_S + 777, 2 * DAY_S, cause)
    assert_same(*both(policy, cluster([(1, 6)]), happenings))


CAUSES = st.sampled_from([NODE, DEVICE, PROCESS, NETWORK])
FAULTS = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(0, 5), CAUSES, st.integers(0, 10_000)), max_size=5
)


def drawn(faults: list[tuple[int, int, str, int]]) -> list[ExternalEvent]:
    """Events farther apart than the time to stop processes, and never at an iteration's end."""
    return sorted(
        (
            one
            for number, (at, node, cause, away) in enumerate(faults)
            for one in lost(
                f"n{node}",
                20 * at + 1.7 + 2.3 * number,
                20 * (at + away) + 13.0 + 2.3 * number,
                cause,
            )
        ),
        key=lambda one: one.at_s,
    )


@settings(deadline=None, max_examples=60, derandomize=True)
@given(FAULTS, st.sampled_from([*HOW]))
@example([(0, 0, NODE, 844), (844, 5, NODE, 28), (845, 4, DEVICE, 258)], "kubernetes")
@example([(0, 4, DEVICE, 130), (89, 3, NETWORK, 10), (178, 5, NETWORK, 517)], "megatron-spares")
@example([(0, 0, DEVICE, 3), (0, 0, NODE, 3)], "megatron")
def test_simulators_agree_on_one_task(faults: list[tuple[int, int, str, int]], policy: str) -> None:
    assert_same(*both(policy, cluster([(1, 6)]), drawn(faults)), len(faults) * STOPS_S)


TASKS = st.sampled_from([[(2, 3), (2, 2)], [(1, 2), (1, 1), (2, 2)], [(3, 3), (1, 4)], [(4, 4)]])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(FAULTS, TASKS, st.sampled_from([*HOW]))
@example([(0, 3, NODE, 15), (0, 4, PROCESS, 0)], [(2, 3), (2, 2)], "requeue")
def test_simulators_agree_on_several_tasks(
    faults: list[tuple[int, int, str, int]], tasks: list[tuple[int, int]], policy: str
) -> None:
    assert_same(*both(policy, cluster(tasks), drawn(faults)), len(faults) * STOPS_S)


# --- policies that continue with the surviving processes ------------------------------------------
HEALS = ("shrink", "unicron")
ITERATION_S = 0.1
"""Short, because `Heals` ignores the position of a fault within its iteration."""
APART = st.lists(st.tuples(st.integers(0, 5), CAUSES, st.integers(1, 6)), max_size=5)


def heals(policy: str, size: int, happenings: list[ExternalEvent]) -> tuple[Outcome, Heals]:
    data = cluster([(1, size)]) | {"iteration_s": ITERATION_S}
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, policy)
    outcome = Run(scenario.run_input(parsed, chosen, happenings), chosen).play()
    rates = {number: 1e12 * chosen.costs.speed * number for number in range(1, size + 1)}
    second = Heals(
        rates,
        [f"n{number}" for number in range(6)],
        chosen.costs,
        ITERATION_S,
        Limits().evidence_s_max,
    )
    second.play(happenings, parsed.horizon_s)
    return outcome, second


@settings(deadline=None, max_examples=60, derandomize=True)
@given(APART, st.sampled_from([4, 6]), st.sampled_from(HEALS))
def test_simulators_agree_on_healing(
    faults: list[tuple[int, str, int]], size: int, policy: str
) -> None:
    """Recovery from each fault ends before the next fault; nodes may be away for longer."""
    happenings = sorted(
        (
            one
            for at, (node, cause, away) in enumerate(faults, 1)
            for one in lost(f"n{node}", 7200.0 * at, 7200.0 * (at + away) + 1000.0 * at, cause)
        ),
        key=lambda one: one.at_s,
    )
    outcome, second = heals(policy, size, happenings)
    found = outcome.earnings
    assert found.lost_flop["recomputed"] == 0
    assert found.down_s["detection"] == pytest.approx(second.down_s["detection"], abs=1e-3)
    assert found.down_s["transition"] == pytest.approx(second.down_s["transition"], abs=1e-3)
    assert found.flop == pytest.approx(
        second.earned, abs=1e9 + 2 * len(faults) * ITERATION_S * 6e12
    )


MORE = st.lists(st.integers(1, 40), min_size=4, max_size=4)
CURVES = st.lists(st.tuples(st.integers(1, 9), MORE), min_size=1, max_size=3)
"""By task: its weight, and by how much each further slot adds to its rate."""


@settings(deadline=None, max_examples=30, derandomize=True)
@given(CURVES, st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
def test_unicron_has_the_best_of_all_allocations(
    curves: list[tuple[int, list[int]]], away: list[int]
) -> None:
    """A node is lost each day; at noon the WAF is the maximum for the remaining slots."""
    data = cluster([(1, 4)] * len(curves)) | {"limits": {"gain_min": 0.0, "hot_spare": False}}
    tables = [{size: 1e11 * sum(more[:size]) for size in range(1, 5)} for _, more in curves]
    for task, (weight, _), table in zip(data["tasks"], curves, tables, strict=True):
        task |= {"weight": float(weight), "throughput": table}
    parsed = scenario.parse(data)
    chosen = scenario.policy(parsed, "unicron")
    happenings = [
        ExternalEvent(DAY_S * (number + 1), f"n{node}", "fault", NODE)
        for number, node in enumerate(away)
    ]
    outcome = Run(scenario.run_input(parsed, chosen, happenings), chosen).play()
    for number in range(len(away) + 1):
        noon_s = outcome.began_s + DAY_S * (number + 0.5)
        waf = [one for at_s, one in outcome.earnings.curve if at_s <= noon_s][-1]
        best = max(
            sum(
                weight * table.get(size, 0.0)
                for (weight, _), table, size in zip(curves, tables, sizes, strict=True)
            )
            for sizes in product(range(5), repeat=len(curves))
            if sum(sizes) <= 6 - number
        )
        assert waf == pytest.approx(best)


# --- determinism ---------------------------------------------------------------------------------
SCENARIOS = Path(__file__).parents[3] / "deploy" / "scenarios"


def told(path: Path, log: Path, seed: str, cores: set[int]) -> tuple[bytes, bytes]:
    """The command's output, and the log that it writes."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "unicron.cli.main",
            "simulate",
            "--scenario",
            str(path),
            "-o",
            "json",
            "--log",
            str(log),
        ],
        check=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONHASHSEED": seed},
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    return done.stdout, log.read_bytes()


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    path = SCENARIOS / "two-weeks.yaml"
    one = told(path, tmp_path / "one.log", "1", {min(cores)})
    two = told(path, tmp_path / "two.log", "2", cores)
    assert b"accumulated_waf_flop" in one[0]
    assert one == two
