"""Answers that are folded at once: the state is as if each had come in by itself."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from scenarios import EXAMPLE, HAPPENINGS, two_tasks
from unicron.cli.simulate import compare as command
from unicron.control_plane.simulation import scenario
from unicron.control_plane.simulation.policies.policy import Policy
from unicron.control_plane.simulation.run import Ground, Run
from unicron.control_plane.simulation.trace.external_event import Happening
from unicron.events.records.envelope import Record


def both(ground: Ground, policy: Policy) -> int:
    """Lives of one policy, with a log and without; how many answers were folded at once in the
    second, which ends as the first does. Plans are made alike in both."""
    log: list[Record] = []
    kept, quick = Run(ground, policy, log.append), Run(ground, replace(policy, quick=None))
    told, found = kept.play(), quick.play()
    assert msgspec.msgpack.encode(quick.engine.state) == msgspec.msgpack.encode(kept.engine.state)
    assert (found.counts, found.slot_s) == (told.counts, told.slot_s)
    assert (found.earnings.flop, found.transitions) == (told.earnings.flop, told.transitions)
    assert quick.engine.num_records == kept.engine.num_records == len(log)
    assert not kept.engine.at_once
    return sum(quick.engine.at_once.values())


@pytest.mark.parametrize("name", ["unicron", "shrink", "requeue", "megatron"])
def test_two_weeks_of_each(name: str) -> None:
    found, stages = command.load(EXAMPLE)
    stage = stages["unicron"]
    policy = scenario.policy(found, name)
    num = both(scenario.ground(found, policy, list(stage.ground.happenings)), policy)
    assert num > 20


@settings(deadline=None, max_examples=25)
@given(HAPPENINGS)
def test_whatever_befalls(happenings: list[Happening]) -> None:
    both(*two_tasks(happenings))
