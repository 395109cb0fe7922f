"""What a command does again after a restart: known when it prints how far it is, and not before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from command_logs import begin, printed
from decider import Driver, task_of
from unicron.cli.screens.cluster import status
from unicron.cli.terminal import record_line
from unicron.cli.terminal.format import lost_in_words
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r

pytestmark = pytest.mark.nodes(3)


def failed(d: Driver, task: int) -> decisions.IncidentClosed:
    """Rank 0 dies, all start again; nothing is printed yet."""
    new = d.exit(task, 0)
    while any(isinstance(one.body, o.StopRank | o.StartRank) for one in new):
        new = d.obey(new)
    return [one.body for one in d.log if isinstance(one.body, decisions.IncidentClosed)][-1]


def told_of(d: Driver, task: int) -> tuple[Any, Any]:
    """The view's task and newest incident."""
    seen = view(d.state)
    mine = next(one for one in seen["tasks"] if one["id"] == task)
    return mine, seen["incidents"][-1]


def test_what_a_restarted_command_does_again_is_lost(d: Driver) -> None:
    """It fell back to its own checkpoint, or to its start: nobody knows until it prints."""
    task = begin(d)
    printed(d, task, 370)
    printed(d, task, 380)
    assert view(d.state)["tasks"][0]["iterations_lost"] == 0
    closed = failed(d, task)
    assert (closed.outcome, closed.iterations_lost) == ("healed", None)
    assert "iterations lost unknown until it prints one" in record_line.essentials(
        "IncidentClosed", msgspec.to_builtins(closed))
    mine, incident = told_of(d, task)
    assert (mine["iterations_lost"], incident["iterations_lost"]) == (None, None)
    unknown = status(view(d.state), cluster="c", now_s=d.now_s)
    assert "iterations lost unknown until it prints one" in " ".join(" ".join(unknown).split())
    assert next(line for line in unknown if line.split()[:1] == [str(task)]).endswith("-")

    printed(d, task, 2, 1)
    printed(d, task, 3, 1)
    mine, incident = told_of(d, task)
    assert (mine["iterations_lost"], mine["healed"]) == (379, 0)
    assert (incident["iterations_lost"], incident["outcome"]) == (379, "set back")
    known = history(d.log).incidents[incident["id"]]
    assert (known.incident.iterations_lost, known.outcome) == (379, "set back")
    lines = status(view(d.state), cluster="c", now_s=d.now_s)
    assert "379 iterations lost" in " ".join(" ".join(lines).split())
    assert lost_in_words(1) == "1 iteration lost"


def test_a_command_that_goes_on_where_it_was_has_lost_nothing(d: Driver) -> None:
    task = begin(d)
    printed(d, task, 380)
    failed(d, task)
    printed(d, task, 381, 1)
    mine, incident = told_of(d, task)
    assert (mine["iterations_lost"], mine["healed"]) == (0, 1)
    assert (incident["iterations_lost"], incident["outcome"]) == (0, "healed")


def test_what_a_plan_makes_a_command_do_again_is_the_tasks_loss(d: Driver) -> None:
    """No incident: the plan gave it other seats."""
    task = begin(d)
    printed(d, task, 380, 0)
    node = task_of(d, task).ranks[0].slot.node
    new = d.tell("operator/drain", r.NodeDrained(node=node))
    while any(isinstance(one.body, o.StopRank | o.StartRank) for one in new):
        new = d.obey(new)
    assert view(d.state)["tasks"][0]["iterations_lost"] is None
    printed(d, task, 301, 1, rank=max(task_of(d, task).ranks))
    assert view(d.state)["tasks"][0]["iterations_lost"] == 80
    assert not d.state.incidents
