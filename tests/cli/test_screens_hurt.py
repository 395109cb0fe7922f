"""The screens of a cluster that was hurt, is held, or has tasks that wait or fell silent.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_screens_hurt.py` writes them anew; read the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from decider import Driver, spec
from snapshots import check
from two_tasks import carry_out, facts, gives, plain, seen, train, two_tasks, waits
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import status, up
from unicron.cli.commands.request_outcome import Outcome, plan_lines
from unicron.cli.commands.tasks import option_for
from unicron.cli.screens import cluster, nodes
from unicron.cli.screens import task as task_screen
from unicron.cli.screens.incident import page
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History, history
from unicron.events.errors import UsageError
from unicron.events.records import reports as r
from unicron.events.spec import policy as reports
from unicron.events.spec.policy import Policy


# --- the screens after such faults --------------------------------------------------------------
def test_status_after_a_lost_node() -> None:
    d, alpha, _ = gives()
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + 0.5)
    check("status-lost", lines, columns_max=100)
    assert lines[1].startswith("NEEDS YOU  n2 lost for")
    task = next(x for x in view(d.state)["tasks"] if x["id"] == alpha)
    check("task-shrunk", task_screen.task_status(view(d.state), task, history(d.log),
                                             now_s=d.now_s + 0.5))
    check("nodes-lost", nodes.nodes(view(d.state), now_s=d.now_s + 0.5), columns_max=100)


def test_status_while_a_task_waits() -> None:
    d, _, beta = waits()
    check("status-waits", cluster.status(seen(d), cluster="test", now_s=d.now_s + 0.5),
          columns_max=100)
    told = seen(d)
    task = next(x for x in told["tasks"] if x["id"] == beta)
    check("task-waits", task_screen.task_status(told, task, history(d.log),
                                            now_s=d.now_s + 0.5))


def test_status_while_healing_is_held() -> None:
    d, alpha, _ = two_tasks({2: 2e12})
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.exit(alpha, 2)
    d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans"))
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + 0.5)
    check("status-frozen", lines, columns_max=100)
    assert "unicron unfreeze" in " ".join(lines[1:3])
    d.tell("leader/abc", r.PolicySet(policy=reports.Policy(observe=True)))
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert lines[1].startswith("NEEDS YOU  observing")


def test_drained_nodes_are_told_where_they_are_waited_for() -> None:
    d, _, _ = two_tasks({2: 2e12})
    carry_out(d, d.tell("operator/drain", r.NodeDrained(node="n3", reason="fans")))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    check("nodes-drained", nodes.nodes(view(d.state), now_s=d.now_s), columns_max=100)
    assert not any("n3 is drained" in line for line in told), "nobody waits"
    d.submit(train("gamma", 0.01, {4: 1e9}, slots={"min": 4, "max": 4}))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert not any("n3 is drained" in line for line in told), "others earn more, drained or not"
    d.submit(train("delta", 0.01, {6: 1e9}, slots={"min": 6, "max": 6}))
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    assert ("NEEDS YOU  n3 is drained (fans), too few slots are left for delta: unicron undrain n3"
            in told)


def test_a_spare_is_told_beside_the_idle_slots() -> None:
    d = Driver(nodes=4)
    policy = Policy(hot_spare=True, mtbf_gpu_s=8 * 60.0, mtbf_faults=1e6, transition_s=600.0)
    d.tell("leader/abc", r.PolicySet(policy=policy))
    d.running(spec(slots={"sizes": [6]}, throughput={6: 1e12}))
    d.submit(spec(name="beta", slots={"sizes": [2]}, throughput={2: 1e10}))
    told = "\n".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    assert "6 train, 2 idle (hot spare), 0 out" in told
    d.join("n9", slots=1)
    told = "\n".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    assert "6 train, 3 idle (2 of them hot spare), 0 out" in told


def test_a_node_that_has_left_has_no_slots() -> None:
    d = Driver(nodes=3)
    d.running(spec(slots={"min": 1, "max": 4}))
    d.tell(d.source("n3"), r.NodeLeft(node="n3", incarnation=d.state.nodes["n3"].incarnation,
                                      reason="SIGTERM"))
    lines = nodes.nodes(view(d.state), now_s=d.now_s)
    assert lines[0].endswith("  2 nodes, 4 slots")
    assert lines[1] == "n1 AA   n2 AA   n3 __"
    assert lines[2].endswith("x out  _ left")
    told = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    (line,) = [x for x in told if x.startswith("slots")]
    assert line == "slots  4 train, 0 idle, 0 out     nodes  2 healthy, 1 left"


@pytest.mark.parametrize("option", ["", " --state /srv/x"])
@pytest.mark.parametrize(("held", "way"), [
    (r.PolicySet(policy=reports.Policy(observe=True)), "unicron down{0}; unicron up --act{0}"),
    (r.HealingFrozen(reason="a change of switches"), "unicron unfreeze{0}"),
])
def test_how_to_act_again_can_be_pasted_wherever_it_is_told(
        held: r.PolicySet | r.HealingFrozen, way: str, option: str) -> None:
    d, alpha, _ = two_tasks({2: 2e12})
    d.tell("leader/abc" if isinstance(held, r.PolicySet) else "operator/freeze", held)
    d.exit(alpha, 2)
    told = view(d.state)
    task = next(x for x in told["tasks"] if x["id"] == alpha)
    found = facts(d.log, option=option)
    for screen in (cluster.status(seen(d), cluster="test", now_s=d.now_s, option=option),
                   task_screen.task_status(told, task, History(), now_s=d.now_s, option=option),
                   found["left"], page(found), up._mode(told["cluster"], option)):
        assert any(way.format(option) in line for line in screen), screen


def test_a_folder_with_blanks_in_its_name_can_be_pasted(tmp_path: Path) -> None:
    assert option_for(StateDir(tmp_path / "a b")) == f" --state '{tmp_path}/a b'"


def test_a_node_where_a_task_is_asked_for_is_told_where_nodes_are(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    d, _, _ = gives()
    client = mock.Mock(get=lambda path, **query: seen(d))
    monkeypatch.setattr(status, "connect", lambda state, url: client)
    with pytest.raises(UsageError, match="'n2' is a node") as error:
        status.status(StateDir(tmp_path), None, "n2", watch=False, as_json=False)
    assert error.value.hint == f"unicron status nodes --state {tmp_path}"
    with pytest.raises(UsageError, match="no task 'n9'") as error:
        status.status(StateDir(tmp_path), None, "n9", watch=False, as_json=False)
    assert error.value.hint == "there is alpha, beta"


def test_a_task_that_came_between_the_question_and_the_plan_has_its_number() -> None:
    d, _, beta = gives()
    told = seen(d)
    told["tasks"] = [task for task in told["tasks"] if task["id"] != beta]
    plan = next(x["body"] for x in reversed(plain(d)) if x["kind"] == "PlanChosen")
    found = Outcome(seq=1, plan=plan, placed=[{"task": beta, "seats": []}], waiting=[],
                     withheld=[], orders=[])
    assert plan_lines(found, told)[-1] == f"task {beta}  2 -> 1 slot"
    assert json.loads(found.as_json())["placed"] == found.placed


# --- what is no news, and what is ---------------------------------------------------------------
def test_a_silent_task_is_told(d: Driver, task: int) -> None:
    one = view(d.state)["tasks"][0]
    told = task_screen.task_status(view(d.state), one, History(), now_s=d.now_s + 9.9)
    assert told[1].startswith("next")
    told = task_screen.task_status(view(d.state), one, History(), now_s=d.now_s + 75)
    assert told[1] == "silent     last progress 75 s ago, it has stopped training or is very slow"
    (line,) = [x for x in cluster.status(seen(d), cluster="test", now_s=d.now_s + 75)
               if x.startswith("NEEDS YOU")]
    assert line == ("NEEDS YOU  alpha: last progress 75 s ago, an iteration took 200 ms: "
                    "unicron logs alpha -f")
    d.tell(d.source("n1"), r.TaskProgressed(
        task=task, generation=1, first_iteration=1, losses=(2.0,), step_s=(60.0,), rate_flops=1e9,
        micro_batches=12))
    assert not [x for x in cluster.status(seen(d), cluster="test", now_s=d.now_s + 150)
                if x.startswith("NEEDS YOU")], "it is slow, not silent"


def fails(d: Driver) -> int:
    """A task whose command fails until it is given up."""
    task = d.submit(spec(train=None, command=["false"]))
    for _ in range(9):
        for rank in list(d.state.tasks[task].ranks):
            if rank in d.state.tasks[task].ranks:
                carry_out(d, d.exit(task, rank, code=1))
    assert d.state.tasks[task].outcome == "failed"
    return task


def test_a_failure_is_news_for_a_day_or_until_a_later_task_of_the_name(d: Driver) -> None:
    first = fails(d)

    def news(after_s: float) -> list[str]:
        lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + after_s)
        return [x for x in lines if x.startswith("NEEDS YOU  alpha failed")]

    assert news(3600)
    assert not news(25 * 3600)
    again = fails(d)
    assert len(news(1)) == 2, "each has its own reason, and its own log"
    screen = "\n".join(cluster.status(seen(d), cluster="test", now_s=d.now_s + 1))
    assert f"unicron logs {first}" in screen
    assert f"unicron logs {again}" in screen
    for _ in range(2):
        last = fails(d)
    assert news(1) == [], "they are counted"
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + 1)
    (counted,) = [x for x in lines if x.startswith("NEEDS YOU")]
    assert counted.startswith("NEEDS YOU  4 tasks failed, the last: alpha failed: ")
    assert f"unicron logs {last}" in "\n".join(lines)
    d.submit(spec())
    assert not news(1)


def test_an_incident_that_is_open_stands_above_a_task_that_has_failed(d: Driver) -> None:
    fails(d)
    task = d.running(spec(name="beta"))
    d.exit(task, 2)
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + 1)
    assert [x.split()[0] for x in lines[1:] if x.startswith(("HEALING", "NEEDS"))] == [
        "HEALING", "NEEDS"]


def test_what_was_healed_is_news_for_a_day_and_what_is_open_always_is(d: Driver, task: int) -> None:

    def news(after_s: float) -> list[str]:
        lines = cluster.status(seen(d), cluster="test", now_s=d.now_s + after_s)
        return [line.split()[0] for line in lines if line.startswith(("HEALED", "HEALING"))]

    carry_out(d, d.exit(task, 2))
    assert (news(23 * 3600), news(25 * 3600)) == (["HEALED"], [])
    d.exit(task, 2)
    assert news(25 * 3600) == ["HEALING"]
    one = view(d.state)["incidents"][-1]
    told = seen(d)
    told["incidents"] += [{**told["incidents"][0], "id": one["id"] + n, "closed_s": d.now_s}
                          for n in range(1, 5)]
    lines = cluster.status(told, cluster="test", now_s=d.now_s + 1)
    assert [line.split()[0] for line in lines if line.startswith("HEAL")] == [
        "HEALING", "HEALED", "HEALED", "HEALED"]


@pytest.mark.parametrize(("now", "target", "words"), [
    (3, 3, "3"), (3, 4, "3 of 4"), (4, 3, "4 -> 3"), (2, 0, "2 -> 0")])
def test_slots_that_are_given_away_are_no_part_of_the_rest(
        d: Driver, now: int, target: int, words: str) -> None:
    d.running()
    told = seen(d)
    told["tasks"][0]["slots"] |= {"now": now, "target": target}
    row = cluster.status(told, cluster="test", now_s=d.now_s)[-1]
    assert f"  {words}  " in row


def test_the_running_span_counts_only_so_far(d: Driver, task: int) -> None:
    for _ in range(40):  # one iteration of 1 GFLOP every 100 s: 10 MFLOP/s
        d.now_s += 99.99
        d.progress(task)
    means = cluster.earned(view(d.state), d.now_s)
    assert len(means) == 3
    assert means == pytest.approx([1e7] * 3, rel=0.15)


def test_steps_that_were_skipped_are_told(d: Driver, task: int) -> None:
    lines = "\n".join(task_screen.task_status(view(d.state), view(d.state)["tasks"][0],
                                              history(d.log), now_s=d.now_s))
    assert "skipped" not in lines
    d.tell(d.source("n1"), r.TaskProgressed(
        task=task, generation=1, first_iteration=1, losses=(2.0,) * 9, step_s=(0.2,) * 9,
        rate_flops=1e9, micro_batches=12, skipped=8))
    told = task_screen.task_status(view(d.state), view(d.state)["tasks"][0], history(d.log),
                                   now_s=d.now_s)
    assert "skipped    8 of 10 steps: the gradient was not finite" in told


def test_origins_are_told_so_that_units_do_not_mix() -> None:
    d, _, _ = gives()
    (line,) = [x for x in cluster.status(seen(d), cluster="test", now_s=d.now_s)
               if x.startswith("plan")]
    assert line.endswith("declared: compares with plans only")


def test_the_normal_pace_is_that_of_those_who_train() -> None:
    """A rank that prepares is on a slot of the task and has no part in its pace."""
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 4}))
    d.progress(task, 9)
    one = view(d.state)["tasks"][0]
    one["ranks"] = [*one["ranks"], {**one["ranks"][0], "rank": 4, "state": "preparing"}]
    told = task_screen.task_status(view(d.state), one, history(d.log), now_s=d.now_s)
    assert any("own normal on 4 slots 200 ms (median of 10)" in line for line in told)
