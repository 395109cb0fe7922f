"""Quick plans are the heart's own, without what explains them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from scenarios import DAY_S, EXAMPLE, HAPPENINGS, two_tasks
from unicron.cli.simulate import compare as command
from unicron.control_plane.decide import decide
from unicron.control_plane.simulation import quick, scenario
from unicron.control_plane.simulation.policies.policy import Policy
from unicron.control_plane.simulation.run import Ground, Run
from unicron.control_plane.simulation.trace.external_event import Happening
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records.envelope import Record

TOLD = (o.StartRank, o.StopRank, o.Quiesce, o.Reconfigure, o.Resume, d.TaskPlaced,
        d.IncidentOpened, d.IncidentClosed)


def decisions(ground: Ground, policy: Policy) -> Iterator[object]:
    """What was done, when, without its number in the log and why."""
    log: list[Record] = []
    Run(ground, policy, log.append).play()
    for record in log:
        body = record.body
        if isinstance(body, d.PlanChosen):
            yield record.at_s, [(one.task, one.slots) for one in body.allocations], body.waf
        elif isinstance(body, TOLD):
            yield record.at_s, type(body), getattr(body, "task", 0), getattr(
                body, "seats", ()), getattr(body, "nodes", ())


def compared(ground: Ground, policy: Policy) -> None:
    fast = replace(policy, decides=lambda _: quick.decide)
    full = replace(policy, decides=lambda _: decide.decide)
    assert list(decisions(ground, fast)) == list(decisions(ground, full))


@settings(deadline=None, max_examples=25)
@given(HAPPENINGS)
def test_the_same_is_done(happenings: list[Happening]) -> None:
    compared(*two_tasks(happenings, weight=2.0))


@pytest.mark.parametrize("limits", [{}, {"hot_spare": True}, {"gain_min": 0.0}])
def test_the_same_is_done_in_two_weeks(limits: dict[str, object]) -> None:
    found, stages = command.load(EXAMPLE)
    stage = stages["unicron"]
    ground = scenario.ground(replace(found, limits=limits), stage.policy,
                             list(stage.ground.happenings))
    assert ground.horizon_s > DAY_S
    compared(ground, stage.policy)
