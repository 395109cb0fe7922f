"""A fault of a task's own software takes no slot, and a bad slot does not end a task.

The inputs are after `bad_slot_command.yaml` and `same_bug_on_both_ranks.yaml` of a review: public
reports with made-up values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_cluster import RealCluster, running
from twins import small

POLICY = {"restarts_max": 1, "restart_pause_s_max": 0.2}


def command(name: str, num: int, script: str) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": num, "max": num},
        "command": ["sh", "-c", script],
    }


def out(cluster: RealCluster) -> int:
    nodes = cluster.client().get("/v1/state")["nodes"]
    return sum(slot["out"] for node in nodes for slot in node["slots"])


def test_a_bug_takes_no_slot_and_a_bad_slot_ends_no_task(tmp_path: Path) -> None:
    with running(tmp_path, policy=POLICY, num_slots=3) as cluster:
        witness = cluster.submit(small("witness", tmp_path, slots=(2, 2)))
        cluster.wait_whole(witness, 2)
        cluster.rest(witness)
        pids = cluster.pids(witness)
        bug = cluster.submit(command("bug", 4, "echo 'RuntimeError: shape mismatch' >&2; exit 1"))
        ended = cluster.wait_ended(bug)
        assert ended["state"] == "failed"
        assert "shape mismatch" in ended["why"]
        assert not cluster.told(0, "ExperimentBegun"), "it fails on two nodes"
        after = cluster.seq()
        script = 'test "$UNICRON_NODE" = n1 && { sleep 0.3; exit 9; }; sleep 0.5'
        bad = cluster.submit(command("bad", 1, script))
        assert cluster.wait_ended(bad)["state"] == "finished"
        (begun,) = cluster.told(after, "ExperimentBegun", task=bad)
        body: Any = begun.body
        assert [seat.slot.node for seat in body.suspects] == ["n1"]
        assert [seat.slot.node for seat in body.seats] == ["n2"]
        assert out(cluster) == 0
        assert cluster.pids(witness) == pids
        cluster.verify()
