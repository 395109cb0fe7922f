"""A task whose processes all die, or whose node is lost, recovers from an in-memory checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from twins import small
from unicron.workers.host import linux

EVERY = 5


def hold_after_the_first_copy(cluster: Any, task: int) -> Path:
    """Hold rank 0 after the first copy, so that all reports about copies are of that copy."""
    return Path(cluster.hold(task, 0, event="forward", iteration=EVERY + 1))


def wait_copied(cluster: Any, task: int, after: int, node: str) -> Any:
    """The next report of a copy on this node."""
    return cluster.wait_told(after, "MemoryCheckpointStored", task=task, node=node)


def expected_outcome(closed: Any) -> str:
    """The expected outcome: "set back" if reported iterations had to be repeated."""
    return "set back" if closed.iterations_lost else "healed"


def test_a_task_whose_ranks_all_die_recovers_from_a_copy(three: Any, tmp_path: Path) -> None:
    cluster, job = three, small("wiped", tmp_path, slots=(2, 2), copy_every=EVERY)
    task = cluster.submit(job)
    hold = hold_after_the_first_copy(cluster, task)
    cluster.wait_whole(task, 2)
    order = cluster.told(0, "Reconfigure", task=task)[-1].body
    for member, node in zip(order.members, order.stores, strict=True):
        assert member.node == node.node not in node.stores
        assert len(node.stores) == 2
        for name in node.stores:
            cluster.wait_told(0, "MemoryCheckpointStored", task=task, node=name, rank=member.rank)
    begin = cluster.seq()
    for pid in cluster.pids(task).values():
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    came = cluster.wait_told(begin, "Reconfigured", task=task, origin="copy").body
    assert came.step_version == EVERY
    assert came.origin_node in {keeper.node for keeper in order.keepers}
    closed = cluster.wait_told(begin, "IncidentClosed").body
    reports = [x.body for x in cluster.told(begin, "Reconfigured", task=task)]
    assert [x.origin for x in reports] == ["copy", "copy"], "each rank reads its state itself"
    assert (closed.outcome, closed.origin) == (expected_outcome(closed), "copy")
    assert closed.origin_node in {x.origin_node for x in reports}
    assert closed.received_bytes >= came.received_bytes > 0
    assert not closed.ckpt_read
    assert closed.iterations_lost <= EVERY
    cluster.wait_steps(task, 20)
    losses = cluster.losses(task, again_rel=1e-5)
    assert len(losses) > came.step_version + 10
    cluster.cancel(task)
    drop = cluster.wait_told(begin, "DropMemoryCheckpoints", task=task)
    for node in drop.body.nodes:
        cluster.wait_told(begin, "MemoryCheckpointsLost", task=task, node=node, order=drop.seq)
    cluster.verify()


@pytest.mark.thorough
def test_a_task_on_a_lost_node_recovers_from_the_stores_of_other_nodes(
    three: Any, tmp_path: Path
) -> None:
    cluster, job = three, small("moved", tmp_path, slots=(1, 1), copy_every=EVERY)
    task = cluster.submit(job)
    hold = hold_after_the_first_copy(cluster, task)
    (rank,) = cluster.wait_whole(task, 1)["ranks"]
    order = cluster.told(0, "Reconfigure", task=task)[-1].body
    own, stores = rank["node"], order.stores[0].stores
    assert own not in stores
    for name in stores:
        wait_copied(cluster, task, 0, name)
    begin = cluster.seq()
    cluster.kill_node(own)
    cluster.wait(lambda: linux.read(rank["pid"]) is None or None, "the held rank is gone")
    hold.unlink()
    came = cluster.wait_told(begin, "Reconfigured", task=task).body
    assert (came.origin, came.step_version) == ("copy", EVERY)
    assert came.origin_node in stores
    closed = cluster.wait_told(begin, "IncidentClosed").body
    assert (closed.outcome, closed.origin) == (expected_outcome(closed), "copy")
    assert closed.iterations_lost <= EVERY
    cluster.cancel(task)
    cluster.verify()
    cluster.start_agent(own)
    cluster.wait_told(begin, "NodeJoined", node=own)


@pytest.mark.thorough
def test_a_task_that_a_fault_hurt_and_the_plan_preempts_comes_back_from_memory(
    three: Any, tmp_path: Path
) -> None:
    """A node is lost. A heavier task needs all slots that are left, so the other one leaves."""
    cluster = three
    task = cluster.submit(small("light", tmp_path, slots=(1, 2), rates={1: 1.0, 2: 1.9}))
    cluster.wait_whole(task, 2)
    heavy = cluster.submit(small("heavy", tmp_path, weight=100.0, slots=(4, 4), rates={4: 3.0}))
    cluster.wait_whole(heavy, 4)
    nodes = {rank["node"] for rank in cluster.wait_whole(task, 2)["ranks"]}
    assert len(nodes) == 2, "each of its ranks is on a node of its own"
    cluster.wait_steps(task)
    lost = min(nodes)
    begin = cluster.seq()
    cluster.kill_node(lost)
    cluster.wait_told(begin, "TaskWaiting", task=task)
    cluster.wait(lambda: not cluster.task(task)["ranks"] or None, "its processes have ended")
    saved = cluster.told(begin, "CheckpointSaved", task=task)[-1].body
    cluster.start_agent(lost)
    cluster.wait_whole(task, 2)
    came = [record.body for record in cluster.told(begin, "Reconfigured", task=task)]
    assert {(one.origin, one.step_version) for one in came[-2:]} == {("copy", saved.step_version)}
    assert not any(one.origin == "checkpoint" for one in came)
    assert cluster.task(task)["iterations_lost"] == 0
    cluster.wait_steps(task)
    assert len(cluster.losses(task, again_rel=1e-5)) > saved.step_version
    cluster.cancel(task, heavy)
