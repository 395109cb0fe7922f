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
from unicron.cli.screens import cluster, incident, nodes
from unicron.cli.screens import task as task_screen
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History, waf
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import NUM_WORK_SPANS_MAX

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
    dice = random.Random(seed)
    cuts = sorted({len(records), *(dice.randrange(1, len(records)) for _ in range(4))})
    told, done = History(), 0
    for cut in cuts:
        for record in records[done:cut]:
            told.add(record)
        done = cut
        seen, now_s = view(told.state), told.at_s + 0.5
        lines = [*cluster.status(seen, cluster="x", now_s=now_s),
                 *nodes.nodes(seen, now_s=now_s), *incident.every(told, now_s=now_s)]
        for task in seen["tasks"]:
            lines += task_screen.task_status(seen, task, told, now_s=now_s)
        for one in told.incidents.values():
            found = incident_records(one, records[:cut])
            facts = {**commands_incident.facts_of(told, found, seen, now_s=now_s),
                     "verify": "unicron replay"}
            lines += incident.page(facts)
            seqs = [record.seq for record in found.records]
            assert seqs == sorted(set(seqs)), f"inc-{one.id}: told twice or out of order"
        assert max(map(len, lines)) <= COLUMNS_MAX, max(lines, key=len)
        _agrees(told)


def _agrees(told: History) -> None:
    """The times and the work that the history adds are those that the state sums up."""
    state = told.state
    if len(state.earned) < NUM_WORK_SPANS_MAX:
        rates = waf(told, 20)
        assert math.fsum(rates.achieved) * rates.bucket_s == pytest.approx(
            math.fsum(state.earned.values()))
    for one in told.incidents.values():
        if one.outcome in ("healed", "set back"):  # what stood still as a whole, and then in part
            assert one.slot_s >= 0.999 * one.incident.pause_s * one.num_slots
