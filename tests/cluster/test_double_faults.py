"""Two faults at once, and faults in the middle of a transition.

The tests run in this order on two tasks of three ranks, on three nodes. One member of each task
always survives, so no iteration is lost and no checkpoint is read.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import cluster_story
import pytest
from cluster_story import NODES, RATES, stopped
from twins import Twins, small
from unicron.events.records.envelope import Record
from unicron.events.spec.policy import Policy
from unicron.workers.diagnosis.step_time import WARM_UP_NUM

pytestmark = pytest.mark.thorough  # each fault alone is in other files
PAUSE_S_MAX = 30.0
"""Below the deadline of one minute for dead or unreachable ranks, so no deadline was awaited."""


class Pair(cluster_story.Pair):
    """Two equal tasks; their incidents are checked in the log only."""

    def __init__(self, cluster: Any, output: Path) -> None:
        super().__init__(
            cluster,
            *(
                small(name, output, slots=(1, 3), rates=RATES, seed=seed, checkpoint_every=40)
                for name, seed in (("one", 7), ("two", 8))
            ),
        )
        self.one, self.two = self.specs
        self.held: dict[int, tuple[Path, Path]] = {}
        """Task -> its checkpoint published after the faults in transitions, and its twin's."""

    def kill(self, task: int, *ranks: int) -> None:
        pids = self.cluster.pids(task)
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)

    def wait_exit(self, task: int, pid: int, after: int) -> None:
        """Wait until the log has the exit of a killed rank: until then the task looks complete."""
        self.cluster.wait_told(after, "RankExited", task=task, pid=pid)

    def healed(self, after: int, *tasks: int, num: int = 3) -> list[Record]:
        """Check that both are complete again, and that only `tasks` had incidents, without loss.

        A second kill that comes after the recovery of the first opens an incident of its own.
        """
        for task in tasks:
            self.cluster.wait_told(after, "IncidentOpened", task=task)
        self.wait_whole(num, num)
        for task in tasks:  # enough steps that the next test's fault does not exhaust the budget
            self.cluster.wait_steps(task, Policy().restart_iterations)
        closed: list[Record] = self.cluster.told(after, "IncidentClosed")
        of = {record.seq: record.body.task for record in self.cluster.told(after, "IncidentOpened")}
        assert sorted(set(of.values())) == sorted(tasks), self.cluster.tail(after)
        assert sorted(record.body.of for record in closed) == sorted(of)
        for record in closed:
            body: Any = record.body
            assert (body.outcome, body.iterations_lost, body.ckpt_read) == ("healed", 0, False), (
                self.cluster.tail(after)
            )
            assert body.pause_s < PAUSE_S_MAX, self.cluster.tail(after)
        return closed


@pytest.fixture(scope="module")
def pair(three: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(three, tmp_path_factory.mktemp("out"))


def test_two_ranks_on_two_nodes_die_and_a_quiesced_survivor(pair: Pair) -> None:
    cluster, after = pair.cluster, pair.cluster.seq()
    before = {task: cluster.pids(task) for task in pair.specs}
    ranks = {rank["node"]: rank["rank"] for rank in cluster.task(pair.two)["ranks"]}
    assert len(ranks) == 2
    pair.kill(pair.two, *ranks.values())
    victim, second, third = before[pair.one]
    with stopped(before[pair.one][third]):  # it does not answer, so the task remains quiescing
        pair.kill(pair.one, victim)
        cluster.wait_told(after, "Quiesced", task=pair.one, rank=second)
        os.kill(before[pair.one][second], signal.SIGKILL)
        pair.wait_exit(pair.one, before[pair.one][second], after)
        assert not cluster.told(after, "Reconfigure", task=pair.one)
    assert len(pair.healed(after, pair.one, pair.two)) == 2, "expected one incident per task"
    for task, killed in ((pair.one, {victim, second}), (pair.two, set(ranks.values()))):
        assert cluster.kept(task, before[task]) == set(before[task]) - killed


def test_a_member_of_the_next_generation_dies_and_a_joined_newcomer(pair: Pair) -> None:
    cluster, after = pair.cluster, pair.cluster.seq()
    before = {task: cluster.pids(task) for task in pair.specs}
    victim, *_ = before[pair.one]
    pair.kill(pair.one, victim)
    order = cluster.wait_told(after, "Reconfigure", task=pair.one).body
    second = order.members[0].rank
    os.kill(before[pair.one][second], signal.SIGKILL)
    first, *_ = before[pair.two]
    pair.kill(pair.two, first)
    newcomer = cluster.wait_told(after, "RankStarted", task=pair.two).body
    joined = cluster.wait_told(
        after, "Reconfigured", task=pair.two, rank=newcomer.rank, attempt=newcomer.attempt
    ).body
    os.kill(newcomer.pid, signal.SIGKILL)
    assert joined.received_bytes > 0
    pair.wait_exit(pair.two, newcomer.pid, after)
    closed = pair.healed(after, pair.one, pair.two)
    # One for each task. On a busy machine the task may have recovered when the newcomer is killed.
    (exited,) = cluster.told(
        after, "RankExited", task=pair.two, rank=newcomer.rank, attempt=newcomer.attempt
    )
    opened = {record.seq: record.body.task for record in cluster.told(after, "IncidentOpened")}
    had_recovered = any(
        record.seq < exited.seq and opened[record.body.of] == pair.two for record in closed
    )
    assert len(closed) == 2 + had_recovered
    for task, killed in ((pair.one, {victim, second}), (pair.two, {first})):
        assert cluster.kept(task, before[task]) == set(before[task]) - killed


def test_a_newcomer_dies_in_its_first_micro_batch(pair: Pair, twins: Twins) -> None:
    cluster, after = pair.cluster, pair.cluster.seq()
    before, calm = cluster.pids(pair.one), cluster.task(pair.two)["generation"]
    victim, *_ = before
    hold = cluster.hold(pair.one, victim, event="forward")  # holds the replacement process
    pair.kill(pair.one, victim)
    started = cluster.wait_told(after, "RankStarted", task=pair.one).body
    line = cluster.wait_traced(pair.one, event="held", pid=started.pid)
    os.kill(line["pid"], signal.SIGKILL)
    hold.unlink()
    pair.wait_exit(pair.one, line["pid"], after)
    assert (
        sum(
            line["event"] == "forward"
            for line in cluster.traced(pair.one)
            if line["pid"] == started.pid
        )
        <= 1
    ), "the newcomer was killed too late"
    pair.healed(after, pair.one)
    assert cluster.kept(pair.one, before) == set(before) - {victim}
    assert cluster.task(pair.two)["generation"] == calm
    healed = cluster.seq()
    for task, spec in pair.specs.items():
        cluster.wait_told(healed, "CheckpointPublished", task=task)
        pair.held[task] = twins.start(spec)


@pytest.mark.thorough
def test_a_rank_dies_and_then_the_agent_of_its_node(pair: Pair) -> None:
    cluster, after = pair.cluster, pair.cluster.seq()
    on = {node: cluster.on(pair.one, node) for node in NODES}
    node = next(node for node in NODES if len(on[node]) == 2)
    victim = cluster.pids(pair.one)[on[node][0]]
    os.kill(victim, signal.SIGKILL)
    pair.wait_exit(pair.one, victim, after)  # the agent must report the exit before it dies
    cluster.kill_node(node)
    cluster.wait_told(after, "IncidentEscalated", node=node, severity="SEV1")
    pair.healed(after, pair.one, num=2)
    back = cluster.seq()
    cluster.start_agent(node)
    pair.wait_whole()
    assert not cluster.told(back, "IncidentOpened")


def test_two_of_three_nodes_are_lost_and_both_tasks_continue(pair: Pair) -> None:
    cluster, after = pair.cluster, pair.cluster.seq()
    for task in pair.specs:  # new ranks must know their step time: gloo may not report a peer's
        cluster.wait_steps(task, 2 * WARM_UP_NUM)  # exit to them, which then counts as a hang
    third = next(
        (node for node in NODES if all(cluster.on(task, node) for task in pair.specs)), None
    )
    assert third, [cluster.task(task)["ranks"] for task in pair.specs]
    before = {task: cluster.pids(task) for task in pair.specs}
    lost = [node for node in NODES if node != third]
    for node in lost:
        cluster.kill_node(node)
    pair.healed(after, *pair.specs, num=1)
    for task in pair.specs:
        assert set(cluster.pids(task).values()) < set(before[task].values())
        assert cluster.losses(task)


def test_both_tasks_equal_their_undisturbed_twins(pair: Pair, twins: Twins) -> None:
    """Compares checkpoints after the faults in transitions, and verifies the whole log."""
    pair.cancel()  # the twins yield to any task that trains
    for task in pair.specs:
        twins.hold(*pair.held[task], pair.cluster.losses(task))
    pair.cluster.verify()
