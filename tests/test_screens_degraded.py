"""The screens of a cluster with a slow rank, and of a task that stands.

`UNICRON_SNAPSHOTS=write pytest tests/test_screens_degraded.py` writes them anew; read the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from heart_driver import Driver, spec
from test_hang import hung, stalled
from test_pace import VICTIM, known, paced
from test_screens import check
from two_tasks import plain, seen, two_tasks
from unicron.cli import screen_nodes, screen_task, screens, status
from unicron.cli.history import history
from unicron.cli.state_dir import StateDir
from unicron.control_plane.view import view


def slow() -> tuple[Driver, int]:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    known(d, alpha)
    paced(d, alpha, VICTIM, 2.6, iteration_s=2.7)
    d.now_s += 60 * 39
    d.progress(alpha, times_s=[2.7])
    return d, alpha


def test_a_slow_rank_is_told_with_what_it_costs_and_what_to_type() -> None:
    d, alpha = slow()
    lines = screens.status(seen(d), cluster="test", now_s=d.now_s + 0.5)
    check("status-degraded", lines, columns_max=100)
    assert lines[1].startswith("NEEDS YOU  n2 is degraded, alpha 2.45 x slower; draining it earns")
    assert "unicron plan --without n2" in " ".join(lines[1:3])
    (row,) = [line for line in lines if " alpha " in line and "DP4" in line]
    assert "DEGRADED" in row
    task = next(x for x in view(d.state)["tasks"] if x["id"] == alpha)
    check("task-degraded", screen_task.task_status(view(d.state), task, history(plain(d)),
                                                   now_s=d.now_s + 0.5))
    check("nodes-degraded", screen_nodes.nodes(view(d.state), now_s=d.now_s + 0.5),
          columns_max=100)


def test_programs_read_the_same(tmp_path: Path) -> None:
    d, alpha = slow()
    client = mock.Mock()
    client.get.return_value = view(d.state)
    with mock.patch.object(status, "connect", return_value=client):
        (line,) = status._screen(StateDir(tmp_path), client, "", mock.Mock(), as_json=True)
    told = json.loads(line)
    (node,) = [x["degraded"] for x in told["nodes"] if x["degraded"]]
    assert node["tasks"] == [alpha]
    assert node["cost_waf"] > 0
    (task,) = [x for x in told["tasks"] if x["state"] == "degraded"]
    assert [x["rank"] for x in task["slow"]] == [VICTIM]


def test_draining_that_costs_more_is_told_so() -> None:
    d = Driver()
    task = d.running()
    known(d, task)
    paced(d, task, VICTIM, 1.15, iteration_s=1.25)
    told = " ".join(screens.status(seen(d), cluster="test", now_s=d.now_s))
    assert "n2 is degraded, alpha 1.14 x slower; draining it would cost" in told


def test_a_task_that_stands_for_a_reason_of_all_needs_a_person() -> None:
    d = Driver()
    task = d.running(spec())
    hung(d, task, 0, 1, 2, 3)
    d.now_s += 100
    lines = screens.status(seen(d), cluster="test", now_s=d.now_s)
    check("status-stands", lines, columns_max=100)
    told = view(d.state)["tasks"][0]
    check("task-stands", screen_task.task_status(view(d.state), told, history(plain(d)),
                                                 now_s=d.now_s))


def test_a_hang_that_is_about_to_be_healed_is_told_too() -> None:
    d = Driver()
    task = d.running()
    for rank in range(4):
        stalled(d, task, rank, "own" if rank == VICTIM else "collective", normal_s=16.0, in_s=50.0)
    told = " ".join(screens.status(seen(d), cluster="test", now_s=d.now_s))
    assert "alpha stands for 50 s: rank 2 on n2 stands still after backward" in told
