"""The screens as a person sees them: snapshots of whole outputs, from a log of `unicron demo`.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_screens.py` writes them anew; read the difference.
"""

from __future__ import annotations

import copy

import pytest
from snapshots import RECORDS, check, seen, until
from unicron.cli.screens import cluster, nodes
from unicron.cli.screens import task as task_screen
from unicron.cli.terminal import format as figures
from unicron.cli.terminal.record_line import TEMPLATES, line, matches
from unicron.control_plane.history.history import history
from unicron.events.records import codec
from unicron.events.records.envelope import KINDS

PLAIN = [codec.to_plain(record) for record in RECORDS]


@pytest.mark.parametrize(("name", "seq"), [
    ("status-empty", 2), ("status-idle", until("TaskSubmitted") - 1),
    ("status-starting", until("RankStarted", 2)), ("status-training", until("TaskProgressed", 2)),
    ("status-healing", until("Quiesced")), ("status-finished", len(RECORDS)),
])
def test_status(name, seq):
    told, now_s = seen(seq)
    check(name, cluster.status(told, cluster="demo", now_s=now_s, option=" --state build/demo"),
          columns_max=100)


@pytest.mark.parametrize(("name", "seq"), [
    ("task-starting", until("RankStarted", 2)), ("task-healing", until("Quiesced")),
    ("task-healed", until("IncidentClosed") + 3), ("task-finished", len(RECORDS)),
])
def test_status_of_a_task(name, seq):
    told, now_s = seen(seq)
    past = history(RECORDS[:seq])
    check(name, task_screen.task_status(told, told["tasks"][0], past, now_s=now_s))


@pytest.mark.parametrize(("name", "seq"), [
    ("nodes-none", 2), ("nodes-training", until("TaskProgressed", 2)),
    ("nodes-healing", until("Quiesced")),
])
def test_status_of_nodes(name, seq):
    told, now_s = seen(seq)
    check(name, nodes.nodes(told, now_s=now_s), columns_max=100)


def test_nodes_that_are_lost_ask_for_a_person():
    told, now_s = seen(until("TaskProgressed", 2))
    told = copy.deepcopy(told)
    told["nodes"][1] |= {"health": "unreachable", "contact": "unreachable", "since_s": now_s - 75}
    told["nodes"][0]["slots"][1] |= {
        "out": True, "task": 0, "out_why": "alpha, rank 1 failed"}
    lines = cluster.status(told, cluster="demo", now_s=now_s)
    assert lines[1:6] == [
        "NEEDS YOU  n1 slot 1 out (alpha, rank 1 failed): repair, then start its agent again "
        "(under unicron",
        f"           up: kill {told['nodes'][0]['pid']}); unicron status nodes",
        "NEEDS YOU  n2 unreachable for 75 s, its ranks go on: look at its machine and network;",
        "           unicron status nodes", ""]
    assert nodes.nodes(told, now_s=now_s)[1] == "n1 Ax   n2 ??"


def test_the_log_as_lines():
    check("tail", [line(record) for record in PLAIN], columns_max=260)


def test_every_kind_has_its_own_line():
    assert set(TEMPLATES) == set(KINDS)


def test_a_kind_of_a_newer_version_is_shown_as_it_is():
    shown = line({**PLAIN[0], "kind": "NodeSang", "body": {"node": "n1", "song": [1, 2]}})
    assert shown.endswith('NodeSang          node="n1" song=[1, 2]')


@pytest.mark.parametrize(("filters", "kinds"), [
    ({"kinds": frozenset({"Resume"})}, {"Resume"}),
    ({"node": "n2", "kinds": frozenset({"NodeJoined", "StartRank"})}, {"NodeJoined", "StartRank"}),
    ({"incident": until("IncidentOpened"), "kinds": frozenset({"IncidentClosed"})},
     {"IncidentClosed"}),
    ({"task": 99}, set()),
    ({"task": until("TaskSubmitted"), "kinds": frozenset({"TaskSubmitted", "NodeJoined"})},
     {"TaskSubmitted"}),
    ({"task": until("TaskSubmitted"), "incidents": {until("IncidentOpened")},
      "kinds": frozenset({"IncidentOpened", "IncidentClosed"})},
     {"IncidentOpened", "IncidentClosed"}),
])
def test_filters(filters, kinds):
    every = {"kinds": frozenset(), "task": None, "node": None, "incident": None}
    found = {record["kind"] for record in PLAIN if matches(record, **{**every, **filters})}
    assert found == kinds


def test_an_incident_has_its_phases_in_order():
    told = history(RECORDS)
    (one,) = told.incidents.values()
    phases = [one.fault_s, one.detected_s, one.decided_s, one.rebuilt_s, one.resumed_s,
              one.stepped_s]
    assert phases == sorted(phases)
    known = one.incident
    assert (known.outcome, known.iterations_lost, known.ckpt_read) == ("healed", 0, False)
    assert (known.kept, known.dealt, one.iteration) == (9, 3, 9)
    (task,) = told.tasks.values()
    assert sorted(task.losses) == list(range(60))
    assert task.micro_batches == {12}


@pytest.mark.parametrize(("length_s", "words"), [
    (0.0, "0 ms"), (0.0031, "3.1 ms"), (0.203, "203 ms"), (0.9999, "1.0 s"), (9.94, "9.9 s"),
    (9.997, "10 s"), (1.14, "1.1 s"), (42.4, "42 s"), (99.97, "2 min"), (600, "10 min"),
    (7200, "2.0 h"), (200_000, "2.3 d"),
])
def test_spans(length_s, words):
    assert figures.span(length_s) == words


def test_figures():
    assert figures.rfc3339(0.0019) == "1970-01-01T00:00:00.001Z"
    assert figures.scaled(8.06e9, "FLOP/s") == "8.06 GFLOP/s"
    assert figures.scaled(0, "B") == "0 B"
    assert figures.ranks([3, 0, 1]) == "ranks 0 1 3"
    assert figures.ranks(range(4)) == "ranks 0-3"
    assert figures.ranks([]) == "no rank"
    assert figures.curve([1, 2, 3, 8], 4) == "▁▂▃█"
    assert figures.curve([5.0], 10) == "▁"
    assert figures.curve([], 10) == ""
    assert figures.marks([(0, "!"), (99, "c")], 100, 10) == "!        c"
    assert figures.ms(None) == "-"
