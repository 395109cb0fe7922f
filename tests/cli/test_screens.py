"""The screens compared with snapshots: of a log of `make demo`, and after faults."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import msgspec
import past_screens
import pytest
from decider import Driver, spec
from simulated.seeds import simulate
from simulated.world import World
from snapshots import RECORDS, check, until
from snapshots import seen as seen_at
from two_tasks import carry_out, facts, gives, plain, seen, train, two_tasks, waits
from unicron.cli.cluster.client import Refused
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import status, up
from unicron.cli.commands.request_outcome import Outcome, plan_lines
from unicron.cli.commands.tasks import option_for
from unicron.cli.screens import cluster, incident, nodes
from unicron.cli.screens.incident import page
from unicron.cli.terminal import format as figures
from unicron.control_plane.api import incident_facts
from unicron.control_plane.api.needs import AWAY_S_MIN, needs
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History, history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import NUM_WORK_SPANS_MAX
from unicron.events.errors import UsageError
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.envelope import KINDS, Record
from unicron.events.records.in_words import TEMPLATES, line, matches
from unicron.events.spec import policy as reports
from unicron.events.spec.policy import Policy
from waf import waf

PLAIN = [codec.to_plain(record) for record in RECORDS]


@pytest.mark.parametrize(
    ("name", "seq"),
    [
        ("status-empty", 2),
        ("status-idle", until("TaskSubmitted") - 1),
        ("status-starting", until("RankStarted", 2)),
        ("status-training", until("TaskProgressed", 2)),
        ("status-healing", until("Quiesced")),
        ("status-finished", len(RECORDS)),
    ],
)
def test_status(name, seq):
    view_, now_s = seen_at(seq)
    check(
        name,
        cluster.status(view_, cluster="demo", now_s=now_s, option=" --state build/demo"),
        columns_max=100,
    )


@pytest.mark.parametrize(
    ("name", "seq"),
    [
        ("task-starting", until("RankStarted", 2)),
        ("task-healing", until("Quiesced")),
        ("task-healed", until("IncidentClosed") + 3),
        ("task-finished", len(RECORDS)),
    ],
)
def test_status_of_a_task(name, seq):
    state_view, now_s = seen_at(seq)
    past = history(RECORDS[:seq])
    check(name, past_screens.task_status(state_view, state_view["tasks"][0], past, now_s=now_s))


@pytest.mark.parametrize(
    ("name", "seq"),
    [
        ("nodes-none", 2),
        ("nodes-training", until("TaskProgressed", 2)),
        ("nodes-healing", until("Quiesced")),
    ],
)
def test_status_of_nodes(name, seq):
    state_view, now_s = seen_at(seq)
    check(name, nodes.nodes(state_view, now_s=now_s), columns_max=100)


def test_unreachable_nodes_need_an_operator():
    view_, now_s = seen_at(until("TaskProgressed", 2))
    view_ = copy.deepcopy(view_)
    view_["nodes"][1] |= {"health": "unreachable", "contact": "unreachable", "since_s": now_s - 75}
    view_["nodes"][0]["slots"][1] |= {"out": True, "task": 0, "out_why": "alpha, rank 1 failed"}
    view_["needs"] = msgspec.to_builtins(needs(view_, now_s))
    lines = cluster.status(view_, cluster="demo", now_s=now_s)
    assert lines[1:6] == [
        "NEEDS YOU  n1 slot 1 out (alpha, rank 1 failed): repair, then unicron lift n1/1;",
        "           unicron status nodes",
        "NEEDS YOU  n2 unreachable for 75 s, its ranks go on: look at its machine and network;",
        "           unicron status nodes",
        "",
    ]
    assert nodes.nodes(view_, now_s=now_s)[1] == "n1 Ax   n2 ??"


def test_a_silent_node_that_others_reach_has_lost_its_link_or_its_agent():
    view_, now_s = seen_at(until("TaskProgressed", 2))
    view_ = copy.deepcopy(view_)
    view_["nodes"][1] |= {"health": "unreachable", "contact": "unreachable", "since_s": now_s - 75}
    view_["nodes"][1]["reached_by"] = ["n1", "n3"]
    view_["needs"] = msgspec.to_builtins(needs(view_, now_s))
    said = (
        "its ranks go on; n1 n3 reach its machine: its agent has stopped, or its link to the "
        "control plane is cut: look at its agent and that link"
    )
    text = " ".join(" ".join(cluster.status(view_, cluster="demo", now_s=now_s)).split())
    assert f"NEEDS YOU n2 unreachable for 75 s, {said};" in text
    assert said in " ".join(" ".join(nodes.nodes(view_, now_s=now_s)).split())


def test_the_log_as_lines():
    check("tail", [line(record) for record in PLAIN], columns_max=260)


def test_every_kind_has_its_own_line():
    assert set(TEMPLATES) == set(KINDS)


def test_a_kind_of_a_newer_version_is_shown_as_it_is():
    shown = line({**PLAIN[0], "kind": "NodeSang", "body": {"node": "n1", "song": [1, 2]}})
    assert shown.endswith('NodeSang          node="n1" song=[1, 2]')


@pytest.mark.parametrize(
    ("filters", "kinds"),
    [
        ({"kinds": frozenset({"Resume"})}, {"Resume"}),
        (
            {"node": "n2", "kinds": frozenset({"NodeJoined", "StartRank"})},
            {"NodeJoined", "StartRank"},
        ),
        (
            {"incident": until("IncidentOpened"), "kinds": frozenset({"IncidentClosed"})},
            {"IncidentClosed"},
        ),
        ({"task": 99}, set()),
        (
            {"task": until("TaskSubmitted"), "kinds": frozenset({"TaskSubmitted", "NodeJoined"})},
            {"TaskSubmitted"},
        ),
        (
            {
                "task": until("TaskSubmitted"),
                "incidents": {until("IncidentOpened")},
                "kinds": frozenset({"IncidentOpened", "IncidentClosed"}),
            },
            {"IncidentOpened", "IncidentClosed"},
        ),
    ],
)
def test_filters(filters, kinds):
    every = {"kinds": frozenset(), "task": None, "node": None, "incident": None}
    found = {record["kind"] for record in PLAIN if matches(record, **{**every, **filters})}
    assert found == kinds


def test_an_incident_has_its_phases_in_order():
    told = history(RECORDS)
    (one,) = told.incidents.values()
    phases = [
        one.fault_s,
        one.detected_s,
        one.decided_s,
        one.rebuilt_s,
        one.resumed_s,
        one.stepped_s,
    ]
    assert phases == sorted(phases)
    known = one.incident
    assert (known.outcome, known.iterations_lost, known.ckpt_read) == ("healed", 0, False)
    assert (known.kept, known.dealt, one.iteration) == (9, 3, 9)
    (task,) = told.tasks.values()
    assert sorted(task.losses) == list(range(60))


@pytest.mark.parametrize(
    ("length_s", "words"),
    [
        (0.0, "0 ms"),
        (0.0031, "3.1 ms"),
        (0.203, "203 ms"),
        (0.9999, "1.0 s"),
        (9.94, "9.9 s"),
        (9.997, "10 s"),
        (1.14, "1.1 s"),
        (42.4, "42 s"),
        (99.97, "2 min"),
        (600, "10 min"),
        (7200, "2.0 h"),
        (200_000, "2.3 d"),
    ],
)
def test_spans(length_s, words):
    assert figures.span(length_s) == words


def test_figures():
    assert figures.rfc3339(0.0019) == "1970-01-01T00:00:00.001Z"
    assert figures.scaled(8.06e9, "FLOP/s") == "8.06 GFLOP/s"
    assert figures.scaled(0, "B") == "0 B"
    assert figures.ranks([3, 0, 1]) == "ranks 0 1 3"
    assert figures.ranks([3, 1, 2, 9]) == "ranks 1-3 9"
    assert figures.ranks(range(0, 30, 2)) == "ranks 0 2 4 6 8 10 12 14 16 18 and 5 more"
    assert figures.ranks(range(4)) == "ranks 0-3"
    assert figures.ranks([]) == "no rank"
    assert figures.curve([1, 2, 3, 8], 4) == "▁▂▃█"
    assert figures.curve([5.0], 10) == "▁"
    assert figures.curve([], 10) == ""
    assert figures.marks([(0, "!"), (99, "c")], 100, 10) == "!        c"
    assert figures.ms(None) == "-"


# --- after faults, while healing is paused, with waiting tasks ------------------------------------
def test_status_after_a_lost_node() -> None:
    d, alpha, _ = gives()
    (lost_s,) = [node.since_s for node in d.state.nodes.values() if node.health == "lost"]
    lines = cluster.status(seen(d, 0.5), cluster="test", now_s=d.now_s + 0.5)
    check("status-lost", lines, columns_max=100)
    after_s = lost_s + AWAY_S_MIN - d.now_s
    assert "NEEDS YOU" not in " ".join(lines), "its agent may be restarted"
    lines = cluster.status(seen(d, after_s), cluster="test", now_s=lost_s + AWAY_S_MIN)
    assert lines[1].startswith("NEEDS YOU  n2 lost for 15 s: repair it and start its agent")
    task = next(x for x in view(d.state)["tasks"] if x["id"] == alpha)
    check(
        "task-shrunk",
        past_screens.task_status(view(d.state), task, history(d.log), now_s=d.now_s + 0.5),
    )
    check("nodes-lost", nodes.nodes(view(d.state), now_s=d.now_s + 0.5), columns_max=100)


def test_status_while_a_task_waits() -> None:
    d, _, beta = waits()
    check(
        "status-waits",
        cluster.status(seen(d, 0.5), cluster="test", now_s=d.now_s + 0.5),
        columns_max=100,
    )
    view_ = seen(d)
    task = next(x for x in view_["tasks"] if x["id"] == beta)
    check("task-waits", past_screens.task_status(view_, task, history(d.log), now_s=d.now_s + 0.5))


def test_status_while_healing_is_paused() -> None:
    d, alpha, _ = two_tasks({2: 2e12})
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.exit(alpha, 2)
    d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans"))
    lines = cluster.status(seen(d, 0.5), cluster="test", now_s=d.now_s + 0.5)
    check("status-frozen", lines, columns_max=100)
    assert "unicron unfreeze" in " ".join(lines[1:3])
    d.tell("leader/abc", r.PolicySet(policy=reports.Policy(observe=True)))
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert lines[1].startswith("NEEDS YOU  observing")


def test_drained_nodes_are_shown_where_tasks_need_them() -> None:
    d, _, _ = two_tasks({2: 2e12})
    carry_out(d, d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans")))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    check("nodes-drained", nodes.nodes(view(d.state), now_s=d.now_s), columns_max=100)
    assert not any("n3 is drained" in line for line in told), "no task waits"
    d.submit(train("gamma", 0.01, {4: 1e9}, slots={"min": 4, "max": 4}))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert not any("n3 is drained" in line for line in told), "gamma would wait even with n3"
    d.submit(train("delta", 0.01, {6: 1e9}, slots={"min": 6, "max": 6}))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert (
        "NEEDS YOU  n3 is drained (fans), too few slots are left for delta: unicron undrain n3"
        in told
    )


def test_a_spare_is_shown_beside_the_idle_slots() -> None:
    d = Driver(nodes=4)
    policy = Policy(hot_spare=True, mtbf_gpu_s=8 * 60.0, mtbf_faults=1e6, transition_s=600.0)
    d.tell("leader/abc", r.PolicySet(policy=policy))
    d.running(spec(slots={"sizes": [6]}, throughput={6: 1e12}))
    d.submit(spec(name="beta", slots={"sizes": [2]}, throughput={2: 1e10}))
    text = "\n".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    assert "6 train, 2 idle (hot spare), 0 out" in text
    d.join("n9", slots=1)
    text = "\n".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    assert "6 train, 3 idle (2 of them hot spare), 0 out" in text


def test_a_node_that_has_left_has_no_slots() -> None:
    d = Driver(nodes=3)
    d.running(spec(slots={"min": 1, "max": 4}))
    d.tell(
        d.source("n3"),
        r.NodeLeft(node="n3", incarnation=d.state.nodes["n3"].incarnation, reason="SIGTERM"),
    )
    lines = nodes.nodes(view(d.state), now_s=d.now_s)
    assert lines[0].endswith("  2 nodes, 4 slots")
    assert lines[1] == "n1 AA   n2 AA   n3 __"
    assert lines[2].endswith("x out  _ left")
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    (line,) = [x for x in told if x.startswith("slots")]
    assert line == "slots  4 train, 0 idle, 0 out     nodes  2 healthy, 1 left"


@pytest.mark.parametrize("option", ["", " --state /srv/x"])
@pytest.mark.parametrize(
    ("held", "way"),
    [
        (r.PolicySet(policy=reports.Policy(observe=True)), "unicron down{0}; unicron up --act{0}"),
        (r.HealingFrozen(reason="a change of switches"), "unicron unfreeze{0}"),
    ],
)
def test_how_to_resume_healing_can_be_pasted(
    held: r.PolicySet | r.HealingFrozen, way: str, option: str
) -> None:
    d, alpha, _ = two_tasks({2: 2e12})
    d.tell("leader/abc" if isinstance(held, r.PolicySet) else "operator/freeze", held)
    d.exit(alpha, 2)
    view_ = view(d.state)
    task = next(x for x in view_["tasks"] if x["id"] == alpha)
    found = facts(d.log, option=option)
    for screen in (
        cluster.status(seen(d), cluster="test", now_s=d.now_s, option=option),
        past_screens.task_status(view_, task, History(), now_s=d.now_s, option=option),
        found["left"],
        page(found),
        up._mode(view_["cluster"], option),
    ):
        assert any(way.format(option) in line for line in screen), screen


def test_a_folder_with_blanks_in_its_name_can_be_pasted(tmp_path: Path) -> None:
    assert option_for(StateDir(tmp_path / "a b")) == f" --state '{tmp_path}/a b'"


def test_a_node_in_place_of_a_task_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    d, _, _ = gives()

    def get(path: str, *limits: float, **query: object) -> dict[str, object]:
        if path != "/v1/state":
            raise Refused(404, "there is no task n9 in the log", "")
        return seen(d)

    client = mock.Mock(get=get)
    monkeypatch.setattr(status, "connect_to_read", lambda state, url: client)
    with pytest.raises(UsageError, match="'n2' is a node") as error:
        status.status(StateDir(tmp_path), None, "n2", watch=False, as_json=False)
    assert error.value.hint == f"unicron status nodes --state {tmp_path}"
    with pytest.raises(UsageError, match="no task 'n9'") as error:
        status.status(StateDir(tmp_path), None, "n9", watch=False, as_json=False)
    assert error.value.hint == "there is alpha, beta"


def test_a_task_submitted_after_the_request_is_shown_by_number() -> None:
    d, _, beta = gives()
    state_view = seen(d)
    state_view["tasks"] = [task for task in state_view["tasks"] if task["id"] != beta]
    plan = next(x["body"] for x in reversed(plain(d)) if x["kind"] == "PlanChosen")
    found = Outcome(
        seq=1, plan=plan, placed=[{"task": beta, "seats": []}], waiting=[], withheld=[], orders=[]
    )
    assert plan_lines(found, state_view)[-1] == f"task {beta}  2 -> 1 slot"


# --- how long the status screen shows an event ---------------------------------------------------
def test_a_task_without_progress_needs_an_operator(d: Driver, task: int) -> None:
    one = view(d.state)["tasks"][0]
    told = past_screens.task_status(view(d.state), one, History(), now_s=d.now_s + 9.9)
    assert told[1].startswith("next")
    told = past_screens.task_status(view(d.state), one, History(), now_s=d.now_s + 75)
    assert told[1] == "silent     last progress 75 s ago, it has stopped training or is very slow"
    (line,) = [
        x
        for x in cluster.status(seen(d, 75), cluster="test", now_s=d.now_s + 75)
        if x.startswith("NEEDS YOU")
    ]
    assert line == (
        "NEEDS YOU  alpha: last progress 75 s ago, an iteration took 200 ms: unicron logs alpha -f"
    )
    d.tell(
        d.source("n1"),
        r.TaskProgressed(
            task=task,
            generation=1,
            first_iteration=1,
            losses=(2.0,),
            step_s=(60.0,),
            rate_flops=1e9,
            micro_batches=12,
        ),
    )
    assert not [
        x
        for x in cluster.status(seen(d, 150), cluster="test", now_s=d.now_s + 150)
        if x.startswith("NEEDS YOU")
    ], "alpha is slow, not silent"


def failed_command(d: Driver, name: str = "alpha") -> int:
    """A task whose command fails until its restart budget is used up."""
    task = d.submit(spec(name=name, train=None, command=["false"]))
    for _ in range(9):
        for rank in list(d.state.tasks[task].ranks):
            if rank in d.state.tasks[task].ranks:
                d.obey(d.exit(task, rank, code=1))
    assert d.state.tasks[task].outcome == "failed"
    return task


def test_a_failure_is_shown_for_a_day_or_until_the_name_is_reused(d: Driver) -> None:
    first = failed_command(d)

    def news(after_s: float) -> list[str]:
        lines = cluster.status(seen(d, after_s), cluster="test", now_s=d.now_s + after_s)
        return [x for x in lines if x.startswith("NEEDS YOU  alpha failed")]

    assert news(3600)
    assert not news(25 * 3600)
    again = failed_command(d)
    assert len(news(1)) == 1, "the later failure of alpha replaces the earlier one"
    lines = cluster.status(seen(d, 1), cluster="test", now_s=d.now_s + 1)
    screen = " ".join(" ".join(lines).split())
    assert f"unicron logs {first};" not in screen
    assert f"unicron logs {again}; shown for a day, or until you submit alpha again" in screen
    for name in ("beta", "gamma", "delta"):
        last = failed_command(d, name)
    assert news(1) == [], "several failures share one line"
    lines = cluster.status(seen(d, 1), cluster="test", now_s=d.now_s + 1)
    (counted,) = [x for x in lines if x.startswith("NEEDS YOU")]
    assert counted.startswith("NEEDS YOU  4 tasks failed, the last: delta failed: ")
    assert f"unicron logs {last}" in "\n".join(lines)
    view = seen(d)
    ended_s = {task["name"]: task["since_s"] for task in view["tasks"]}
    for task in view["tasks"]:
        if task["name"] == "beta":
            task["since_s"] = max(ended_s.values()) + 0.5
    view["needs"] = msgspec.to_builtins(needs(view, d.now_s + 1))
    (counted,) = [
        x
        for x in cluster.status(view, cluster="test", now_s=d.now_s + 1)
        if x.startswith("NEEDS YOU")
    ]
    assert "the last: beta failed: " in counted, "of those, the one that ended last"
    d.submit(spec())
    assert not news(1)


def test_an_open_incident_is_above_a_failed_task(d: Driver) -> None:
    failed_command(d)
    task = d.running(spec(name="beta"))
    d.exit(task, 2)
    lines = cluster.status(seen(d, 1), cluster="test", now_s=d.now_s + 1)
    assert [x.split()[0] for x in lines[1:] if x.startswith(("HEALING", "NEEDS"))] == [
        "HEALING",
        "NEEDS",
    ]


def test_healed_incidents_are_shown_for_a_day_and_open_ones_always(d: Driver, task: int) -> None:

    def news(after_s: float) -> list[str]:
        lines = cluster.status(seen(d, after_s), cluster="test", now_s=d.now_s + after_s)
        return [line.split()[0] for line in lines if line.startswith(("HEALED", "HEALING"))]

    carry_out(d, d.exit(task, 2))
    d.heal(task)
    assert (news(23 * 3600), news(25 * 3600)) == (["HEALED"], [])
    d.exit(task, 2)
    assert news(25 * 3600) == ["HEALING"]
    one = view(d.state)["incidents"][-1]
    view_ = seen(d)
    view_["incidents"] += [
        {
            **view_["incidents"][0],
            "id": one["id"] + n,
            "closed_s": d.now_s,
            "evidence": [one["id"] + 10 + n],
        }
        for n in range(1, 5)
    ]
    lines = cluster.status(view_, cluster="test", now_s=d.now_s + 1)
    assert [line.split()[0] for line in lines if line.startswith("HEAL")] == [
        "HEALING",
        "HEALED",
        "HEALED",
        "HEALED",
    ]


@pytest.mark.parametrize(
    ("now", "target", "words"), [(3, 3, "3"), (3, 4, "3 of 4"), (4, 3, "4 -> 3"), (2, 0, "2 -> 0")]
)
def test_slots_now_and_target_in_the_row_of_a_task(
    d: Driver, now: int, target: int, words: str
) -> None:
    d.running()
    state_view = seen(d)
    state_view["tasks"][0]["slots"] |= {"now": now, "target": target}
    row = cluster.status(state_view, cluster="test", now_s=d.now_s)[-1]
    assert f"  {words}  " in row


def test_the_current_work_span_counts_up_to_now(d: Driver, task: int) -> None:
    for _ in range(40):  # one iteration of 1 GFLOP every 100 s: 10 MFLOP/s
        d.now_s += 99.99
        d.progress(task)
    means = cluster.earned(view(d.state), d.now_s)
    assert len(means) == 3
    assert means == pytest.approx([1e7] * 3, rel=0.15)


@pytest.mark.parametrize("kept", [True, False])
def test_status_says_what_a_task_without_a_kept_sum_redoes(d: Driver, kept: bool) -> None:
    d.submit(spec(train={"iterations": 50, "output": "/tmp/out", "kept_sum": kept}))
    lines = past_screens.task_status(
        view(d.state), view(d.state)["tasks"][0], history(d.log), now_s=d.now_s
    )
    assert kept != any(line.startswith("kept sum   none: a fault during") for line in lines)


@pytest.mark.parametrize(
    ("why", "told"),
    [("", "exact"), ("a mixture of experts", "rounded, not bit for bit: a mixture of experts")],
)
def test_status_says_whether_the_sums_are_exact(d: Driver, why: str, told: str) -> None:
    d.rounding_why = why
    for asked in ("rounding", "bitwise"):
        task = d.running(
            spec(
                name=asked,
                slots={"min": 1, "max": 2},
                train={"iterations": 50, "output": "/tmp/out", "reproducible": asked},
            )
        )
        (shown,) = (one for one in view(d.state)["tasks"] if one["id"] == task)
        lines = past_screens.task_status(view(d.state), shown, history(d.log), now_s=d.now_s)
        assert (f"sums       {told}" in lines) == (asked == "bitwise")
    d.state.tasks[task].generation = 0
    (shown,) = (one for one in view(d.state)["tasks"] if one["id"] == task)
    lines = past_screens.task_status(view(d.state), shown, history(d.log), now_s=d.now_s)
    assert ("sums       exact" in lines) is False, "before its ranks are ready it is not known"
    d.state.tasks[task].declined = "its optimizer is not Adam"
    assert view(d.state)["tasks"][-1]["rounding_why"]


def test_skipped_steps_are_shown(d: Driver, task: int) -> None:
    lines = "\n".join(
        past_screens.task_status(
            view(d.state), view(d.state)["tasks"][0], history(d.log), now_s=d.now_s
        )
    )
    assert "skipped" not in lines
    d.tell(
        d.source("n1"),
        r.TaskProgressed(
            task=task,
            generation=1,
            first_iteration=1,
            losses=(2.0,) * 9,
            step_s=(0.2,) * 9,
            rate_flops=1e9,
            micro_batches=12,
            skipped=8,
        ),
    )
    told = past_screens.task_status(
        view(d.state), view(d.state)["tasks"][0], history(d.log), now_s=d.now_s
    )
    assert "skipped    8 of 10 steps: loss or gradient were not finite" in told


def test_origins_are_shown_so_that_units_do_not_mix() -> None:
    d, _, _ = gives()
    (line,) = [
        x for x in cluster.status(seen(d), cluster="test", now_s=d.now_s) if x.startswith("plan")
    ]
    assert line.endswith("declared: compares with plans only")


def test_the_normal_step_time_is_of_the_training_ranks() -> None:
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 4}))
    d.progress(task, 9)
    one = view(d.state)["tasks"][0]
    one["ranks"] = [*one["ranks"], {**one["ranks"][0], "rank": 4, "state": "preparing"}]
    told = past_screens.task_status(view(d.state), one, history(d.log), now_s=d.now_s)
    assert any("own normal on 4 slots 200 ms (median of 10)" in line for line in told)


# --- random moments of the simulated cluster ----------------------------------------------------
COLUMNS_MAX = 110
"""Above the usual 100, because node, host and task names of these worlds are longer."""


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("seed", range(10_000, 10_006))
def test_screens_at_random_moments(seed: int) -> None:
    _, records = simulate(lambda: World(seed))
    dice = random.Random(seed)
    cuts = sorted({len(records), *(dice.randrange(1, len(records)) for _ in range(4))})
    told, done = History(), 0
    for cut in cuts:
        for record in records[done:cut]:
            told.add(record)
        done = cut
        seen, now_s = view(told.state), told.at_s + 0.5
        lines = [
            *cluster.status(seen, cluster="x", now_s=now_s),
            *nodes.nodes(seen, now_s=now_s),
            *past_screens.every(told, now_s=now_s),
        ]
        for task in seen["tasks"]:
            lines += past_screens.task_status(seen, task, told, now_s=now_s)
        for one in told.incidents.values():
            found = incident_records(one, records[:cut])
            facts = {
                **incident_facts.facts_of(told, found, seen, now_s=now_s),
                "verify": "unicron replay",
            }
            lines += incident.page(facts)
            seqs = [record.seq for record in found.records]
            assert seqs == sorted(set(seqs)), f"inc-{one.id}: a record twice or out of order"
        assert max(map(len, lines)) <= COLUMNS_MAX, max(lines, key=len)
        _agrees(told, records[:cut])


def _agrees(told: History, records: Sequence[Record]) -> None:
    """The history's times and work equal the sums that the state keeps."""
    state = told.state
    if len(state.earned) < NUM_WORK_SPANS_MAX:
        rates = waf(records, 20)
        assert math.fsum(rates.achieved) * rates.bucket_s == pytest.approx(
            math.fsum(state.earned.values())
        )
    for one in told.incidents.values():
        if one.outcome in ("healed", "set back"):  # slots may stay down after the task's pause
            assert one.slot_s >= 0.999 * one.incident.pause_s * one.num_slots
