"""A rank is stopped (SIGSTOP) in the middle of a reduction: the others wait less than a minute.

The rank is first held before its bucket, so that the others wait in their collective.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from twins import Twins, small
from unicron.workers.agent.agent import LOOK_S
from unicron.workers.host import linux
from up_cluster import until

VICTIM = 2
STOPPED_S_MAX = 4.0
"""In the cluster's policy; enough time to continue a rank on a busy machine."""
BUSY_S_MAX = 30.0
"""Limit for the survivors' step on a busy machine; any other deadline is a minute or more."""


def stop(pid: int) -> None:
    """Stop all threads of a process. One of them takes the signal and stops the others: until it
    has a core, they go on."""
    os.kill(pid, signal.SIGSTOP)
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    until(lambda: all((one := linux.read(thread)) and one.state == "T" for thread in threads))


class Story:
    """The task, and the way to stop one of its ranks inside a reduction."""

    def __init__(self, cluster: Any, output: Path) -> None:
        self.cluster = cluster
        self.spec = small("stands", output, checkpoint_every=20)
        self.task = cluster.submit(self.spec)
        cluster.wait_whole(self.task, 4)

    def stop_in_reduction(self) -> tuple[int, int, float]:
        """Stop the victim in the reduction of its gradients; the iteration, pid and time."""
        cluster, task = self.cluster, self.task
        asked_s = time.time()
        hold = cluster.hold(task, VICTIM, event="bucket")  # in the next iteration
        line = cluster.wait_held(task, VICTIM, asked_s)
        iteration = line["iteration"]
        for rank in range(4):
            if rank != VICTIM:  # in the collective that the victim does not enter
                cluster.wait_traced(task, event="bucket", iteration=iteration, rank=rank)
        struck_s = time.time()  # before the kill, because this process may lose its core there
        stop(line["pid"])
        hold.unlink()
        return iteration, line["pid"], struck_s


@pytest.fixture(scope="module")
def story(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(cluster, tmp_path_factory.mktemp("out"))


def test_a_rank_that_continues_in_time_opens_no_incident(story: Story) -> None:
    cluster, task, after = story.cluster, story.task, story.cluster.seq()
    before, generation = cluster.pids(task), cluster.task(task)["generation"]
    iteration, pid, _ = story.stop_in_reduction()
    cluster.wait_told(after, "RankSuspended", task=task, rank=VICTIM, pid=pid)
    os.kill(pid, signal.SIGCONT)
    cluster.wait_told(after, "RankContinued", task=task, rank=VICTIM, pid=pid)
    cluster.wait_traced(task, event="done", iteration=iteration, pid=pid)
    cluster.wait_steps(task)
    assert not cluster.told(after, "IncidentOpened"), cluster.tail(after)
    assert cluster.kept(task, before) == set(before)
    assert cluster.task(task)["generation"] == generation


def test_a_stopped_rank_is_ended_and_the_others_finish_the_iteration(story: Story) -> None:
    cluster, task, after = story.cluster, story.task, story.cluster.seq()
    before = cluster.pids(task)
    iteration, pid, struck_s = story.stop_in_reduction()
    opened = cluster.wait_told(after, "IncidentOpened", task=task).body
    suspended = cluster.told(after, "RankSuspended", task=task)[0]
    assert (opened.severity, opened.status, opened.why) == (
        "SEV2",
        "task hang",
        f"rank {VICTIM} on {opened.node} is stopped (SIGSTOP) (stopped_s_max: 4 s)",
    )
    assert suspended.seq in opened.evidence
    cluster.wait_told(
        after, "RankExited", task=task, rank=VICTIM, pid=pid, signal=int(signal.SIGKILL)
    )
    proc = linux.read(pid)
    assert proc is None or proc.state in "ZX", "SIGKILL ends a stopped process"

    # the survivors completed the same iteration within the limit
    survivors = {rank: own for rank, own in before.items() if rank != VICTIM}
    steps = [
        cluster.wait_traced(task, event="done", iteration=iteration, pid=own)
        for own in survivors.values()
    ]
    took_s = max(line["t"] for line in steps) - struck_s
    assert STOPPED_S_MAX <= took_s <= STOPPED_S_MAX + LOOK_S + BUSY_S_MAX, cluster.tail(after)

    cluster.wait_whole(task, 4)
    closed = cluster.wait_healed(after)
    assert closed.pause_s >= STOPPED_S_MAX, "the pause starts at the stop"
    assert closed.pause_s == pytest.approx(took_s, abs=BUSY_S_MAX)
    assert cluster.kept(task, before) == set(survivors)


def test_the_task_equals_its_undisturbed_twin(story: Story, twins: Twins) -> None:
    twins.compare_and_cancel(story.cluster, story.task, story.spec)
