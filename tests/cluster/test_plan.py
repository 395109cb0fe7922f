"""`unicron plan` on a running cluster: a dry run, a stale plan that is refused, and --apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster_story import RATES
from twins import small
from unicron.events.records import codec


def test_a_dry_run_equals_the_applied_plan(cluster: Any, tmp_path: Path) -> None:
    task = cluster.submit(small("job", tmp_path / "out", rates=RATES))
    cluster.wait_whole(task, 4)
    present = cluster.unicron("plan")
    assert present.returncode == 0, present.stderr
    assert "job" in present.stdout

    seq = cluster.seq()
    shown = cluster.unicron("plan", "--without", "n2")
    assert shown.returncode == 0, shown.stderr
    assert "why        job 4 -> 2: " in shown.stdout
    assert "--apply --check" in shown.stdout
    tried = json.loads(cluster.unicron("plan", "--without", "n2", "-o", "json").stdout)
    assert not cluster.told(seq, "NodeDrained"), "a dry run drains no node"

    stale = cluster.unicron(
        "plan", "--without", "n2", "--apply", "--check", str(tried["input"] - 1)
    )
    assert stale.returncode == 2
    assert stale.stderr.startswith(f"error: the plan's input is {tried['input']} now, not ")
    assert "hint: unicron plan --without n2 --state " in stale.stderr
    assert not cluster.told(seq, "NodeDrained")

    done = cluster.unicron(
        "plan", "--without", "n2", "--apply", "--check", str(tried["input"]), "--reason", "a test"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("applied  --without n2 (seq ")
    drained = cluster.wait_told(seq, "NodeDrained", node="n2")
    assert drained.body.reason == "a test"
    plan = cluster.wait_told(drained.seq, "PlanChosen")
    assert codec.to_plain(plan)["body"] == tried["plan"]
    cluster.wait_whole(task, 2)
    assert not cluster.on(task, "n2")
    assert cluster.task(task)["iterations_lost"] == 0
    cluster.verify()
