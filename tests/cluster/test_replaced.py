"""A task whose nodes are all unreachable continues elsewhere; its old ranks become stale."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_story import RATES, stopped
from twins import small
from unicron.events.log.embedded_server import start_time


def test_a_damaged_checkpoint_ends_the_task_with_its_reason(three: Any, tmp_path: Path) -> None:
    cluster, output = three, tmp_path / "damaged"
    # Each rank reads its own part: only one of them sees the damage.
    task = cluster.submit(
        small(
            "damaged",
            tmp_path,
            slots=(2, 2),
            checkpoint_every=5,
            copy_every=0,
            parallel={"tensor": [2]},
        )
    )
    hold = cluster.hold(task, 0, event="forward", iteration=6)
    cluster.wait_told(0, "CheckpointPublished", task=task)
    pids = cluster.pids(task)
    (file, *_) = sorted((output / "latest").glob("__*.distcp"))
    with file.open("r+b") as data:
        data.truncate(file.stat().st_size // 2)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    ended = cluster.wait_ended(task)
    assert ended["state"] == "failed"
    assert f"the checkpoint is damaged: its file {file.name} is cut" in ended["why"], ended["why"]
    assert ended["why"].endswith("names, else at iteration 0)"), ended["why"]
    opened = cluster.told(0, "IncidentOpened", task=task)[-1]
    status = [opened, *cluster.told(opened.seq, "IncidentEscalated", of=opened.seq)][-1].body.status
    assert status == "wrong input"
    read_in = {one.body.generation for one in cluster.told(opened.seq, "RankErrored", task=task)}
    assert len(read_in) == 2, "it is read again once"


@pytest.mark.thorough
def test_a_stale_generation_publishes_nothing_and_is_ended(three: Any, tmp_path: Path) -> None:
    cluster, output = three, tmp_path / "solo"
    task = cluster.submit(small("solo", tmp_path, slots=(1, 1), checkpoint_every=20, copy_every=0))
    (old,) = cluster.wait_whole(task, 1)["ranks"]
    first = cluster.wait_told(0, "CheckpointPublished", task=task).seq
    with stopped(cluster.agent(old["node"]).pid):
        lost = cluster.wait_told(first, "IncidentOpened", task=task).body
        assert (lost.severity, lost.node) == ("SEV1", old["node"])
        assert "the whole task on it" in lost.why
        new = cluster.wait_told(first, "Reconfigure", task=task).body
        assert new.members[0].node != old["node"]
        again = cluster.wait_told(
            first,
            "CheckpointPublished",
            task=task,
            path=f"gen-{new.generation}/iter-{20 + int(new.checkpoint.rpartition('-')[2])}",
        ).seq
        # both train at once: the old rank cannot receive orders, and still writes checkpoints
        cluster.wait_traced(
            task,
            pid=old["pid"],
            event="step",
            iteration=1
            + max(x["iteration"] for x in cluster.traced(task) if x["pid"] == old["pid"]),
        )
    heard = cluster.wait_told(again, "NodeReachable", node=old["node"]).seq
    cluster.wait_told(heard - 1, "StopRank", task=task, rank=old["rank"], attempt=old["attempt"])
    cluster.wait(lambda: start_time(old["pid"]) == "" or None, "the old rank is gone")
    cluster.wait_told(heard, "RankExited", task=task, attempt=old["attempt"])
    cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task)

    # its checkpoints exist but are unused: the log and `latest` name the new generation only
    saved = sorted(
        int(path.name.removeprefix("iter-"))
        for path in (output / "gen-1").iterdir()
        if path.name[5:].isdecimal()
    )
    assert saved[-1] > int(new.checkpoint.rpartition("-")[2])
    assert (output / "latest").readlink().parts[0] == f"gen-{new.generation}"
    lost_seq = cluster.told(first, "IncidentOpened", task=task)[0].seq
    # The agent may have been stopped before it reported a checkpoint that it had published.
    ordered = {
        record.body.path
        for record in cluster.told(0, "PublishCheckpoint", task=task)
        if record.seq < lost_seq
    }
    published = [
        record
        for record in cluster.told(lost_seq, "CheckpointPublished", task=task)
        if record.body.path not in ordered
    ]
    assert {record.body.path.split("/")[0] for record in published} == {f"gen-{new.generation}"}
    steps = [int(record.body.path.rpartition("-")[2]) for record in published]
    assert steps == sorted(steps)
    (closed,) = cluster.told(first, "IncidentClosed")
    outcome = "set back" if closed.body.iterations_lost else "healed"
    assert (closed.body.outcome, closed.body.ckpt_read) == (outcome, True)
    assert cluster.losses(task, again_rel=1e-6)
    cluster.verify()
    cluster.cancel(task)


@pytest.mark.thorough
def test_a_task_that_lost_both_its_nodes_resumes_from_its_checkpoint(
    three: Any, tmp_path: Path
) -> None:
    cluster = three
    task = cluster.submit(
        small("wide", tmp_path, slots=(1, 2), rates=RATES, checkpoint_every=20, copy_every=0)
    )
    nodes = {rank["node"] for rank in cluster.wait_whole(task, 2)["ranks"]}
    assert len(nodes) == 2
    after = cluster.wait_told(task, "CheckpointPublished", task=task).seq
    cluster.wait_steps(task)
    for node in nodes:
        cluster.kill_node(node)
    cluster.wait_told(after, "IncidentClosed")
    view = cluster.wait_whole(task, 2)
    assert {rank["node"] for rank in view["ranks"]}.isdisjoint(nodes)
    (closed,) = cluster.told(after, "IncidentClosed")
    outcome = "set back" if closed.body.iterations_lost else "healed"
    assert (closed.body.outcome, closed.body.ckpt_read) == (outcome, True)
    begun = cluster.told(after, "Reconfigured", task=task, generation=view["generation"])
    published = cluster.told(0, "CheckpointPublished", task=task)
    steps = {
        int(record.body.path.rpartition("-")[2])
        for record in published
        if record.seq < begun[0].seq
    }
    assert {record.body.step_version for record in begun} == {max(steps)}
    resumed = cluster.told(after, "Resume", task=task)[-1].seq
    reported = max(
        record.body.first_iteration + len(record.body.losses)
        for record in cluster.told(0, "TaskProgressed", task=task)
        if record.seq < resumed
    )
    assert closed.body.iterations_lost == view["iterations_lost"] == max(reported - max(steps), 0)
    assert cluster.losses(task, again_rel=1e-5)
    cluster.verify()
