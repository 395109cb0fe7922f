"""Screens of a cluster with a straggler or a hung task, compared with snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import msgspec
import past_screens
import pytest
from decider import Driver, spec
from hangs import hung, stalled
from plan_pages import INPUT
from snapshots import check
from stragglers import VICTIM, known, paced
from two_tasks import plain, seen, two_tasks
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import status
from unicron.cli.screens import cluster, nodes, plan, stragglers
from unicron.cli.terminal.format import UNBROKEN
from unicron.control_plane.api.dry_run import Change, run_dry
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.control_plane.state.cluster import encode_state
from unicron.events.records import in_words
from unicron.events.records.decisions import StragglerCostEstimated


def slow() -> tuple[Driver, int]:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    known(d, alpha)
    paced(d, alpha, VICTIM, 2.6, iteration_s=2.7)
    d.now_s += 60 * 39
    d.progress(alpha, times_s=[2.7])
    return d, alpha


def test_a_slow_rank_is_shown_with_its_cost_and_a_command() -> None:
    d, alpha = slow()
    lines = cluster.status(seen(d, 0.5), cluster="test", now_s=d.now_s + 0.5)
    check("status-degraded", lines, columns_max=100)
    assert lines[1].startswith("NEEDS YOU  n2 is degraded, alpha 2.45 x slower: draining it earns")
    assert "unicron plan --without n2" in " ".join(lines[1:3])
    (row,) = [line for line in lines if " alpha " in line and "DP4" in line]
    assert "DEGRADED" in row
    task = next(x for x in view(d.state)["tasks"] if x["id"] == alpha)
    check(
        "task-degraded",
        past_screens.task_status(view(d.state), task, history(d.log), now_s=d.now_s + 0.5),
    )
    check("nodes-degraded", nodes.nodes(view(d.state), now_s=d.now_s + 0.5), columns_max=100)


def test_json_output_shows_the_straggler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d, alpha = slow()
    client = mock.Mock()
    client.get.return_value = view(d.state)
    with mock.patch.object(status, "connect_to_read", return_value=client):
        status.status(StateDir(tmp_path), None, "", watch=False, as_json=True)
    output = json.loads(capsys.readouterr().out)
    (node,) = [x["degraded"] for x in output["nodes"] if x["degraded"]]
    assert node["tasks"] == [alpha]
    assert node["cost_waf"] > 0
    (task,) = [x for x in output["tasks"] if x["state"] == "degraded"]
    assert [x["rank"] for x in task["slow"]] == [VICTIM]


def the_task(d: Driver, task: int, healing: str = "on") -> str:
    state_view = view(d.state)
    state_view["cluster"]["healing"] = healing
    (one,) = [x for x in state_view["tasks"] if x["id"] == task]
    return " ".join(
        " ".join(past_screens.task_status(state_view, one, history(d.log), now_s=d.now_s)).split()
    )


def test_a_drain_that_costs_more_is_not_suggested(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.15, iteration_s=1.25)
    assert "NEEDS YOU" not in " ".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    text = " ".join(" ".join(nodes.nodes(view(d.state), now_s=d.now_s)).split())
    assert "holds up 3 others, 1.14 x, its own work 1.15 x; draining it would cost " in text
    assert "% of all WAF" in text
    assert "--without" not in text + the_task(d, task)
    assert "holds up 3 others, 1.14 x. Reported, not acted on: below 3 x" in the_task(d, task)
    (line,) = [in_words.line(x) for x in plain(d) if x["kind"] == "StragglerCostEstimated"]
    assert "draining it would cost " in line
    assert "earns" not in line


@pytest.mark.parametrize(
    ("share", "worth", "lasts", "words"),
    [
        (2.3, True, True, "draining it earns 230 %: unicron plan --without n2"),
        (2.3, False, False, "draining it would earn 230 %, if it lasts longer than 60 s"),
        (0.004, False, True, "draining it would earn 0.4 %, below gain_min"),
        (0.0, False, True, "draining it would earn nothing"),
        (-0.29, False, True, "draining it would cost 29 % of all WAF"),
    ],
)
def test_the_gain_of_a_drain_is_in_per_cent(
    share: float, worth: bool, lasts: bool, words: str
) -> None:
    node = {
        "id": "n2",
        "contact": "heard",
        "drained": False,
        "degraded": {
            "tasks": [5],
            "ratios": [1.5],
            "why": "w",
            "drain_share": share,
            "worth_draining": worth,
            "lasts": lasts,
        },
    }
    text = stragglers.node_degraded(node, "").replace(UNBROKEN, " ")
    assert text == f"w; {words}"


def test_the_screen_says_why_a_straggler_is_not_restarted(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 4.0, iteration_s=4.1)
    assert (
        "3.73 x. Above 3 x, not acted on: no other process has confirmed yet that its "
        "iterations take as long"
    ) in the_task(d, task)
    d.obey(paced(d, task, 1, 1.0, iteration_s=4.1))
    d.progress(task)


@pytest.mark.parametrize(
    ("healing", "words"),
    [
        ("on", "Above 3 x: it is about to start again"),
        ("frozen: a test", "Above 3 x: not acted on, healing is frozen: a test"),
    ],
)
def test_a_confirmed_straggler_is_about_to_restart(healing: str, words: str) -> None:
    task = {
        "slow": [{"rank": 2, "node": "n2", "slot": 0, "holds_up": 3.73, "confirmed": True}],
        "ranks": [{"state": "member"}] * 4,
    }
    assert stragglers.degraded_why(task, healing).endswith(f"3.73 x. {words}")


def test_a_task_that_is_slower_as_a_whole_names_no_node(d: Driver, task: int) -> None:
    known(d, task)
    for rank in range(4):
        paced(d, task, rank, 1.4, iteration_s=1.54)
    assert (
        "slower all ranks alike, 1.4 x slower than it was: the machines, the network or the job"
    ) in the_task(d, task)
    assert "NEEDS YOU" not in " ".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))


def test_a_dry_run_shows_the_cost_of_a_straggler() -> None:
    d, _ = slow()
    found = msgspec.to_builtins(
        run_dry(encode_state(d.state), Change(without=("n2",))), str_keys=True
    ) | {"took_s": 0.01, "input": INPUT}
    lines = plan.dry_run(found, "--without n2")
    check("plan-degraded", lines)
    (told,) = [x for x in d.log if isinstance(x.body, StragglerCostEstimated)][-1:]
    assert isinstance(told.body, StragglerCostEstimated)
    assert found["degraded"][0]["drain_waf"] == pytest.approx(told.body.drain_waf)
    at = next(i for i, line in enumerate(lines) if line.startswith("worth"))
    assert lines[at + 1].startswith("degraded   n2 slows alpha 2.45 x now: without it the cluster")


def test_a_task_hung_for_a_shared_reason_needs_a_person(d: Driver) -> None:
    task = d.running(spec())
    hung(d, task, 0, 1, 2, 3)
    d.now_s += 100
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s)
    check("status-stands", lines, columns_max=100)
    state_view = view(d.state)["tasks"][0]
    check(
        "task-stands",
        past_screens.task_status(view(d.state), state_view, history(d.log), now_s=d.now_s),
    )


def test_a_hang_before_its_recovery_is_shown(d: Driver, task: int) -> None:
    for rank in range(4):
        stalled(d, task, rank, "own" if rank == VICTIM else "collective", normal_s=16.0, in_s=50.0)
    text = " ".join(cluster.status(seen(d), cluster="test", now_s=d.now_s))
    assert "alpha has stalled for 50 s: rank 2 on n2 is stalled after backward" in text
