"""A recorded log and other choices: read back exactly, played anew, and told plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unicron.cli import simulate as command
from unicron.control_plane.replay import verify
from unicron.control_plane.severity import TABLE
from unicron.control_plane.simulation.befell import Befallen, Befell
from unicron.control_plane.simulation.earnings import LOST, Earnings
from unicron.control_plane.simulation.happening import Happening
from unicron.control_plane.simulation.recorded import Meter
from unicron.control_plane.simulation.run import Outcome, Run
from unicron.control_plane.simulation.traced import Traced
from unicron.events import orders as o
from unicron.events.records import Record
from unicron.events.statuses import CUDA_ERRORS, LOST_CONNECTION, OTHER_NETWORK

EXAMPLE = Path(__file__).parents[1] / "deploy" / "scenarios" / "two-weeks.yaml"
DAY_S = 86400.0


def simulated(happenings: list[Happening] | None = None, earnings: Earnings | None = None
              ) -> tuple[Outcome, list[Record], float]:
    """What the simulation says of the example, the log that it writes, and its horizon."""
    _, stages = command.load(EXAMPLE)
    stage, log = stages["unicron"], list[Record]()
    ground = stage.ground if happenings is None else stage.ground._replace(
        happenings=happenings, horizon_s=3 * DAY_S)
    outcome = Run(ground, stage.policy, log.append, earnings).play()
    return outcome, log, ground.horizon_s


def witnessed(log: list[Record]) -> tuple[Befallen, dict[int, o.ThroughputSet]]:
    befell, tables = Befell(), dict[int, o.ThroughputSet]()

    def watch(state: object, record: Record) -> None:
        befell.see(state, record)  # type: ignore[arg-type]
        if isinstance(record.body, o.ThroughputSet):
            tables[record.body.task] = record.body

    assert verify(log, watch=watch).ok
    return befell.all(), tables


def same(found: Outcome, told: Outcome) -> None:
    """Earned, and lost to each cause: to 1e-9 of the whole."""
    assert found.transitions == told.transitions
    full = command.full_flop(told)
    assert found.earnings.flop == pytest.approx(told.earnings.flop, rel=1e-9)
    for why in LOST:
        assert found.earnings.lost_flop[why] == pytest.approx(
            told.earnings.lost_flop[why], abs=1e-9 * full), why
        assert found.earnings.down_s[why] == pytest.approx(
            told.earnings.down_s[why], abs=1e-3), why


def test_a_simulated_log_is_read_back_as_its_simulation_told() -> None:
    told, log, horizon_s = simulated()
    befallen, tables = witnessed(log)
    found = Meter(befallen, tables, Earnings(), begin_s=told.began_s).measure(
        log, end_s=told.began_s + horizon_s)
    same(found, told)


AWAY_S = st.floats(600, 2 * DAY_S)
FAULTS = st.lists(st.tuples(st.floats(1, 2.9 * DAY_S), st.integers(0, 15), st.sampled_from(
    [*TABLE]), AWAY_S), max_size=6, unique_by=lambda one: one[1])
"""Of a node once: what it does not live to tell is in no log."""


@settings(deadline=None, max_examples=8)
@given(FAULTS)
@example([(1.5, 6, CUDA_ERRORS, 600.0), (1.0, 0, LOST_CONNECTION, 600.0),
          (1.0, 7, OTHER_NETWORK, 600.0)])
def test_whatever_befalls_it_the_log_is_read_back(faults: list[tuple[float, int, str, float]]
                                                  ) -> None:
    happenings = sorted((one for at_s, node, cause, away_s in faults for one in (
        Happening(at_s, f"n{node}", "fault", cause),
        Happening(at_s + away_s, f"n{node}", "repaired"))), key=lambda one: one.at_s)
    told, log, horizon_s = simulated(happenings, traced := Traced())
    befallen, tables = witnessed(log)
    found = Meter(befallen, tables, Earnings(), begin_s=told.began_s).measure(
        log, end_s=told.began_s + horizon_s)
    same(found, told)
    lost = sum(told.earnings.lost_flop.values())
    assert sum(one.lost_flop for one in [*traced.felt, traced.loose]) == pytest.approx(
        lost, abs=1e-9 * command.full_flop(told))
