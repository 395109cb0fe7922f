"""Logs of seeded lives, with hangs, stopped processes and cut networks: read back, and played again
under other choices."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import structlog
from simulated.seeds import quiet, simulate
from simulated.world import World
from unicron.control_plane.simulation.counterfactual import counterfactual
from unicron.control_plane.simulation.counterfactual.counterfactual import (
    Choice,
    Recording,
    RunResult,
)
from unicron.control_plane.simulation.trace.external_event import ExternalEvent, causes_loss
from unicron.events.records import decisions as d
from unicron.events.records.envelope import Record
from unicron.events.records.statuses import NCCL_TIMEOUT, TASK_HANG

SEEDS = {5: (3, 2), 11: (1, 2), 12: (4, 1)}
"""And what befell: hangs, and collectives that nobody came to the end of."""


@pytest.fixture(scope="module", params=SEEDS)
def life(request: pytest.FixtureRequest) -> tuple[int, list[Record], Recording]:
    quiet()
    records = simulate(lambda: World(request.param))[1]
    structlog.reset_defaults()
    return request.param, records, counterfactual.read(lambda: iter(records), "a seed's log")


def whole(one: RunResult) -> float:
    """What was earned and what was lost, all of which is laid to incidents, or to none."""
    earnings = one.earnings
    assert all(math.isfinite(flop) for flop in earnings.lost_flop.values())
    felt = [*earnings.losses, earnings.unattributed]
    assert math.fsum(one.lost_flop for one in felt) == pytest.approx(
        math.fsum(earnings.lost_flop.values()), rel=1e-6, abs=1e-6 * earnings.flop)
    return earnings.full_flop


def test_what_was_decided_is_decided_again(life: tuple[int, list[Record], Recording]) -> None:
    _, records, found = life
    assert not found.verdict.differ
    assert sum(found.verdict.recomputed.values()) == sum(
        record.source == "heart" for record in records)


def test_each_fault_befalls_once(life: tuple[int, list[Record], Recording]) -> None:
    seed, records, found = life
    told = Counter(one.cause for one in found.events
                   if isinstance(one, ExternalEvent) and one.event == "fault")
    assert (told[TASK_HANG], told[NCCL_TIMEOUT]) == SEEDS[seed]
    opened = Counter(record.body.status for record in records if isinstance(
        record.body, d.IncidentOpened | d.IncidentEscalated) and record.body.status == TASK_HANG)
    assert told[TASK_HANG] >= opened[TASK_HANG] > 0


@pytest.mark.parametrize("choice", [Choice(), Choice(policy="shrink"), Choice(policy="megatron")],
                         ids=["as recorded", "shrink", "megatron"])
def test_it_is_played_to_its_end(life: tuple[int, list[Record], Recording], choice: Choice
                                 ) -> None:
    _, _, found = life
    paper = counterfactual.play(found, Choice())
    played = counterfactual.play(found, choice)
    assert len(played.earnings.losses) == sum(map(causes_loss, found.events))
    assert whole(played) > 0
    if choice.policy == "megatron":
        assert played.earnings.flop < paper.earnings.flop
