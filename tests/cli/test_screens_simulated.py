"""Every screen at any moment of a cluster's worst days, and figures that agree with the state."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator

import pytest
import structlog
from simulated.seeds import simulate
from simulated.world import World
from unicron.cli.commands import incident as commands_incident
from unicron.cli.history.history import History, waf
from unicron.cli.history.incident_records import story
from unicron.cli.screens import cluster, incident, nodes
from unicron.cli.screens import task as task_screen
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import NUM_EARNED_MAX, ClusterState
from unicron.events.records.codec import to_plain

COLUMNS_MAX = 110
"""Names of nodes, hosts and tasks may be long; of 100 columns these worlds need a few more."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("seed", range(10_000, 10_006))
def test_screens_of_any_moment(seed: int) -> None:
    _, records = simulate(lambda: World(seed))
    plain = [to_plain(record) for record in records]
    dice = random.Random(seed)
    cuts = sorted({len(records), *(dice.randrange(1, len(records)) for _ in range(4))})
    state, told, done = ClusterState(), History(), 0
    for cut in cuts:
        for record in records[done:cut]:
            fold(state, record)
            told.add(plain[record.seq - 1])
        done = cut
        seen, now_s = view(state), state.at_s + 0.5
        lines = [*cluster.status(seen, cluster="x", now_s=now_s),
                 *nodes.nodes(seen, now_s=now_s), *incident.every(told, now_s=now_s)]
        for task in seen["tasks"]:
            lines += task_screen.task_status(seen, task, told, now_s=now_s)
        for one in told.incidents.values():
            found = story(one, plain[:cut])
            facts = {**commands_incident.facts_of(told, found, seen, now_s=now_s),
                     "verify": "unicron replay"}
            lines += incident.page(facts)
            seqs = [record["seq"] for record in found.records]
            assert seqs == sorted(set(seqs)), f"inc-{one.id}: told twice or out of order"
        assert max(map(len, lines)) <= COLUMNS_MAX, max(lines, key=len)
        _agrees(state, told)


def _agrees(state: ClusterState, told: History) -> None:
    """What the history has read of the records is what the fold has made of them."""
    if len(state.earned) < NUM_EARNED_MAX:
        rates = waf(told, 20)
        assert math.fsum(rates.achieved) * rates.bucket_s == pytest.approx(
            math.fsum(state.earned.values()))
    for one in told.incidents.values():
        known = state.incidents.get(one.id)
        if known is None:
            continue
        assert (one.severity, one.status, one.why, one.node, one.ranks) == (
            known.severity, known.status, known.why, known.node, tuple(known.ranks))
        if not known.outcome:
            continue
        assert (one.outcome, one.pause_s) == (known.outcome, known.pause_s)
        if one.outcome in ("healed", "set back"):  # what stood still as a whole, and then in part
            assert one.slot_s >= 0.999 * known.pause_s * one.num_slots
