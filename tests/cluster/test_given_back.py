"""A slot that was taken out is given back: the next task uses it, and other ranks there run on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from real_cluster import running
from twins import small


def test_a_slot_is_given_back_beside_a_task_that_runs_on(tmp_path: Path) -> None:
    policy = {"restarts_max": 0, "restart_iterations": 2}
    with running(tmp_path, policy=policy, num_slots=3) as cluster:
        other = cluster.submit(small("other", tmp_path, slots=(1, 1)))
        cluster.wait_whole(other, 1)
        pids = cluster.pids(other)
        task = cluster.submit(
            small("job", tmp_path, slots=(3, 3), batch={"global": 12, "micro": 2})
        )
        view = cluster.wait_whole(task, 3)
        rank = cluster.on(task, "n1")[0]
        (slot,) = [one["slot"] for one in view["ranks"] if one["rank"] == rank]
        after = cluster.seq()
        cluster.rest(other, task)
        os.kill(cluster.pids(task)[rank], signal.SIGKILL)
        cluster.wait_told(after, "SlotsJudged", verdict="slot")
        (told,) = [
            one for one in cluster.client().get("/v1/state")["needs"] if one["what"] == "disabled"
        ]
        assert told["why"].startswith(f"n1 slot {slot} out")
        assert f"repair, then `unicron lift n1/{slot}`" in told["do"]
        slots = "there are n1/0, n1/1, n1/2"
        for name, why, hint in (
            ("n1/7", "there is no slot n1/7", slots),
            ("n9/0", "no node 'n9'", "there is n1, n2"),
            ("n1/x", "there is no slot n1/x", slots),
            ("n2/0", "n2/0 is not out", "unicron status nodes"),
            ("n2/*", "no slot that is out has a name like 'n2/*'", f"there is n1/{slot}"),
        ):
            refused = cluster.unicron("lift", name)
            error, told_hint = refused.stderr.splitlines()
            assert (refused.returncode, refused.stdout, error) == (2, "", f"error: {why}")
            assert told_hint.partition(" (with --state ")[0] == f"hint: {hint}"
        done = cluster.unicron("lift", "n1/*", "--reason", "a new riser")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(
            f"n1/{slot}  may have tasks again; the next fault is the first ("
        )
        third = cluster.submit(small("third", tmp_path, slots=(2, 2)))
        view = cluster.wait_whole(third, 2)
        assert ("n1", slot) in {(one["node"], one["slot"]) for one in view["ranks"]}
        assert cluster.pids(other) == pids, "the other task's rank there runs on"
        assert not cluster.client().get("/v1/state")["needs"]
        cluster.verify()
