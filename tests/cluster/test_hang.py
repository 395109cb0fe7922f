"""A rank hangs inside an iteration: the hang is located, the rank ended, and no iteration lost.

One task of four ranks. In turn one rank holds the GIL, one loops, and one is far too slow. No
process exits and no timeout expires; only the ranks' progress marks show the hang.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import RealCluster, running
from twins import Twins, small
from unicron.workers.host import linux

NUM = 4
HANG_S_MIN = 3.0
"""In the policy; longer than the delay of a rank on a busy machine."""
SLOW_S = 0.9
"""The delay at each of the dozen events of an iteration: shorter than a stall."""


class Story:
    """The task, and its spec for the comparison with its twin."""

    def __init__(self, cluster: RealCluster, output: Path) -> None:
        self.cluster = cluster
        self.spec = small("hangs", output, checkpoint_every=20)
        self.task = cluster.submit(self.spec)
        cluster.rest(self.task)
        cluster.wait_whole(self.task, NUM)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with running(tmp_path_factory.mktemp("hang"), policy={"hang_s_min": HANG_S_MIN}) as cluster:
        yield Story(cluster, tmp_path_factory.mktemp("out"))


# On a machine whose host takes its cores away, a loop gets less CPU time than one that computes.
@pytest.mark.parametrize(
    ("then", "victim", "does"),
    [
        pytest.param("gil", 1, ("sleeps",), marks=pytest.mark.thorough),
        ("loop", 2, ("computes", "runs")),
    ],
)
def test_a_hung_rank_is_ended_and_the_others_finish_the_iteration(
    story: Story, then: str, victim: int, does: tuple[str, ...]
) -> None:
    cluster, task = story.cluster, story.task
    cluster.wait_paced(task, NUM)
    before, generation, after = cluster.pids(task), cluster.task(task)["generation"], cluster.seq()
    asked_s = float(cluster.traced(task)[-1]["t"])
    cluster.hold(task, victim, event="forward", then=then)
    line = cluster.wait_held(task, victim, asked_s)
    iteration, pid = line["iteration"], line["pid"]
    assert pid == before[victim]

    # the victim is reported in its own work, and all others as waiting for it in a collective
    stalled = cluster.wait_told(after, "RankStalled", task=task, rank=victim)
    assert (stalled.body.where, stalled.body.iteration) == ("own", iteration), stalled
    assert stalled.body.stack.startswith(does), stalled
    opened_record = cluster.wait_told(after, "IncidentOpened", task=task)
    opened = opened_record.body
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (victim,))
    assert opened.why.startswith(f"rank {victim} on {opened.node} is stalled"), opened
    assert "3 others wait (" in opened.why, opened
    waits = {
        record.body.rank: record.seq
        for record in cluster.told(after, "RankStalled", task=task, where="collective")
    }
    assert set(waits) == set(before) - {victim}, cluster.tail(after)
    assert {stalled.seq, *waits.values()} <= set(opened.evidence)

    # its process is killed; the survivors complete the same iteration in the same processes
    cluster.wait_told(
        after, "RankExited", task=task, rank=victim, pid=pid, signal=int(signal.SIGKILL)
    )
    proc = linux.read(pid)
    assert proc is None or proc.state in "ZX"
    survivors = {rank: own for rank, own in before.items() if rank != victim}
    steps = [
        cluster.wait_traced(task, event="done", iteration=iteration, pid=own)
        for own in survivors.values()
    ]
    assert min(step["generation"] for step in steps) > generation
    assert min(step["t"] for step in steps) - line["t"] >= HANG_S_MIN

    # the rank is replaced within one incident, and no other rank was restarted
    cluster.wait_whole(task, NUM)
    ended = cluster.wait_told(after, "IncidentClosed")
    closed = ended.body
    assert ended.incident == opened_record.incident
    assert (closed.outcome, closed.iterations_lost, closed.ckpt_read) == ("healed", 0, False), (
        cluster.tail(after)
    )
    assert closed.pause_s >= HANG_S_MIN, "the pause starts at the rank's last mark"
    assert cluster.kept(task, before) == set(survivors)
    assert [record.body.rank for record in cluster.told(after, "RankExited", task=task)] == [victim]
    cluster.wait_steps(task)
    assert len(cluster.told(after, "IncidentOpened")) == 1, cluster.tail(after)


@pytest.mark.thorough
def test_a_rank_that_is_far_too_slow_is_ended(story: Story) -> None:
    cluster, task, victim = story.cluster, story.task, 3
    cluster.wait_paced(task, NUM)
    before, after = cluster.pids(task), cluster.seq()
    hold = cluster.hold(task, victim, then="slow", slow_s=SLOW_S)
    opened_record = cluster.wait_told(after, "IncidentOpened", task=task)
    hold.unlink()
    opened = opened_record.body
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (victim,))
    assert opened.why.startswith(f"rank {victim} on {opened.node} is still working"), opened
    (slow,) = [
        record
        for record in cluster.told(after, "StepTimeChanged", task=task, rank=victim)
        if record.seq in opened.evidence
    ]
    assert slow.body.num_iterations == 1
    assert slow.body.own_s >= max(HANG_S_MIN, 10 * slow.body.normal_s)
    stalled_s = [
        record.body.in_s for record in cluster.told(after, "RankStalled", task=task, rank=victim)
    ]
    assert all(one < slow.body.own_s / 2 for one in stalled_s), "a slow rank still passes marks"
    waits = cluster.told(
        after, "RankStalled", task=task, where="collective", iteration=slow.body.iteration
    )
    assert {record.body.rank for record in waits} == set(before) - {victim}
    assert {record.seq for record in waits} <= set(opened.evidence)
    cluster.wait_whole(task, NUM)
    cluster.wait_healed(after)
    assert cluster.kept(task, before) == set(before) - {victim}
    cluster.wait_steps(task)
    assert len(cluster.told(after, "IncidentOpened")) == 1, cluster.tail(after)


def test_the_task_equals_its_undisturbed_twin(story: Story, twins: Twins) -> None:
    twins.compare_and_cancel(story.cluster, story.task, story.spec)
