"""Slot aggregation changes no result: the same plans and the same WAF under node faults."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import DAY_S, DEVICE, NODE, PROCESS, plain
from unicron.control_plane.simulation import scenario
from unicron.control_plane.simulation.run import Outcome, Run, RunInput
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.events.records import decisions as d
from unicron.events.records.envelope import Record

PLAYED = ("unicron", "shrink", "spares", "requeue", "megatron")
SIZES = {"one": range(8, 33, 8), "two": (8, 16, 24), "three": range(8, 17, 4)}


def cluster(**changes: Any) -> dict[str, Any]:
    """Ten nodes of four GPUs; three tasks whose sizes are multiples of a node."""
    tasks = [{"name": name, "weight": weight,
              "slots": {"min": min(SIZES[name]), "max": max(SIZES[name]), "multiple_of": by},
              "throughput": {size: 1e12 * size ** 0.9 for size in SIZES[name]}}
             for name, weight, by in (("one", 1.0, 8), ("two", 2.0, 8), ("three", 0.5, 4))]
    return plain(cluster={"nodes": 10, "slots": 4}, tasks=tasks) | changes


def run_inputs(policy: str, happenings: list[ExternalEvent]) -> tuple[RunInput, RunInput]:
    parsed = scenario.parse(cluster())
    chosen = scenario.policy(parsed, policy)
    whole, few = (scenario.run_input(parsed, chosen, happenings, condense=condense)
                  for condense in (False, True))
    return whole, few


def played(policy: str, ground: RunInput) -> tuple[Outcome, list[list[int]]]:
    """The outcome of a run, and its distinct successive plans in GPUs."""
    log: list[Record] = []
    unit = 4 // ground.slots["n0"]
    parsed = scenario.parse(cluster())
    outcome = Run(ground, scenario.policy(parsed, policy), log.append).play()
    plans = [[one.slots * unit for one in record.body.allocations]
             for record in log if isinstance(record.body, d.PlanChosen)]
    return outcome, [plan for plan, _ in groupby(plans)]


HOUR_S = 3600.0
LOST = st.lists(st.tuples(st.integers(1, 9 * 24).map(lambda hours: hours * HOUR_S),
                          st.integers(0, 9), st.floats(2 * HOUR_S, 4 * DAY_S)),
                max_size=8, unique_by=lambda one: one[0])
"""At different times, so that each loss is reported before the next."""


@settings(deadline=None, max_examples=8)
@given(LOST)
@pytest.mark.parametrize("policy", PLAYED)
def test_aggregation_changes_no_result_of_node_faults(policy: str,
                                                      told: list[tuple[float, int, float]]) -> None:
    happenings = sorted(
        [one for at_s, node, away_s in told for one in (
            ExternalEvent(at_s, f"n{node}", "fault", NODE),
            ExternalEvent(at_s + away_s, f"n{node}", "repaired"))], key=lambda one: one.at_s)
    whole, few = run_inputs(policy, happenings)
    assert set(few.slots.values()) == {1}
    (ours, plans), (theirs, their_plans) = played(policy, few), played(policy, whole)
    assert plans == their_plans
    assert ours.transitions == theirs.transitions
    assert ours.earnings.flop == pytest.approx(theirs.earnings.flop, rel=1e-12)
    for what, flop in theirs.earnings.lost_flop.items():
        assert ours.earnings.lost_flop[what] == pytest.approx(flop, rel=1e-9, abs=1e6), what
    assert [one[1] for one in ours.earnings.curve] == pytest.approx(
        [one[1] for one in theirs.earnings.curve])


@pytest.mark.parametrize("policy", PLAYED)
@pytest.mark.parametrize("cause", [PROCESS, DEVICE])
def test_aggregation_barely_changes_other_faults(policy: str, cause: str) -> None:
    """A device fault may cost one more transition, when the rest of the aggregated slot drains."""
    happenings = [
        ExternalEvent(DAY_S, "n2", "fault", cause), ExternalEvent(2 * DAY_S, "n2", "repaired")]
    whole, few = run_inputs(policy, happenings[:1 if cause == PROCESS else 2])
    (ours, _), (theirs, _) = played(policy, few), played(policy, whole)
    assert ours.earnings.flop == pytest.approx(theirs.earnings.flop, rel=1e-4)
    assert abs(ours.transitions - theirs.transitions) <= (cause == DEVICE)


@pytest.mark.parametrize("changes", [
    {"cluster": {"nodes": 10, "slots": 3}},
    {"tasks": [{"name": "x", "slots": {"min": 8, "max": 9}, "throughput": {8: 1e12}}]}])
def test_sizes_without_a_common_factor_are_not_aggregated(changes: dict[str, Any]) -> None:
    parsed = scenario.parse(cluster(**changes))
    chosen = scenario.policy(parsed, "unicron")
    assert scenario.run_input(parsed, chosen) == scenario.run_input(parsed, chosen, condense=False)
