"""All processes of a task die at once, or its node: it comes back from a copy in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from twins import small

EVERY = 5


def hold_behind_the_first_copy(cluster: Any, task: int) -> Path:
    """Rank 0 goes no further than that: whatever is told of copies is told by then."""
    return Path(cluster.hold(task, 0, event="forward", iteration=EVERY + 1))


def copied(cluster: Any, task: int, after: int, node: str) -> Any:
    """The next that is told of a copy on this node."""
    return cluster.wait_told(after, "MemoryCheckpointStored", task=task, node=node)


def closed_as(closed: Any) -> str:
    """By what it cost: iterations that were told as done may have been done again."""
    return "set back" if closed.iterations_lost else "healed"


def test_every_rank_is_killed_at_once_and_the_task_goes_on_from_a_copy(
        three: Any, tmp_path: Path) -> None:
    cluster, job = three, small("wiped", tmp_path, slots=(2, 2), copy_every=EVERY)
    task = cluster.submit(job)
    hold = hold_behind_the_first_copy(cluster, task)
    cluster.wait_whole(task, 2)
    order = cluster.told(0, "Reconfigure", task=task)[-1].body
    assert len(order.keepers) == 2
    for keeper in order.keepers:
        copied(cluster, task, 0, keeper.node)
    begin = cluster.seq()
    for pid in cluster.pids(task).values():
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    came = cluster.wait_told(begin, "Reconfigured", task=task, origin="copy").body
    assert (came.origin_node, came.step_version) == (order.keepers[0].node, EVERY)
    closed = cluster.wait_told(begin, "IncidentClosed").body
    assert (closed.outcome, closed.origin, closed.origin_node) == (
        closed_as(closed), "copy", came.origin_node)
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


def test_a_lost_node_takes_one_copy_with_it_and_the_other_serves(
        three: Any, tmp_path: Path) -> None:
    cluster, job = three, small("moved", tmp_path, slots=(1, 1), copy_every=EVERY)
    task = cluster.submit(job)
    hold = hold_behind_the_first_copy(cluster, task)
    (rank,) = cluster.wait_whole(task, 1)["ranks"]
    order = cluster.told(0, "Reconfigure", task=task)[-1].body
    own, other = (keeper.node for keeper in order.keepers)
    assert own == rank["node"] != other
    copied(cluster, task, 0, other)
    begin = cluster.seq()
    cluster.kill_agent(own)
    hold.unlink()
    came = cluster.wait_told(begin, "Reconfigured", task=task).body
    assert (came.origin, came.origin_node) == ("copy", other)
    assert came.step_version == EVERY
    closed = cluster.wait_told(begin, "IncidentClosed").body
    assert (closed.outcome, closed.origin) == (closed_as(closed), "copy")
    assert closed.iterations_lost <= EVERY
    cluster.cancel(task)
    cluster.verify()
