"""A node is lost, an agent stopped, the log's server stopped: two tasks lose no iteration.

The tests run in this order. The last one compares both tasks with their undisturbed twins.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cluster_story
import pytest
from cluster_story import NODES, RATES, stopped
from twins import Twins, small
from unicron.events.log import embedded_server
from unicron.events.log.redis_streams import REPLY_S_MAX

SERVER_STOPPED_S = float(os.environ.get("UNICRON_TEST_SERVER_STOPPED_S", REPLY_S_MAX + 2))
"""How long the log's server is stopped: longer than any call waits for a reply."""
UNTOLD_S_MAX = 2.0
"""Iterations are reported once a second, so a cancelled task may have some that are not."""


class Pair(cluster_story.Pair):
    """Two tasks on three nodes of two slots: 4 and 2 slots, or 3 and 1 after a node is lost."""

    def __init__(self, cluster: Any, output: Path) -> None:
        super().__init__(
            cluster,
            small("heavy", output, weight=2.0, checkpoint_every=40, rates=RATES),
            small(
                "light", output, slots=(1, 2), seed=8, checkpoint_every=40, rates={1: 2.0, 2: 2.9}
            ),
        )
        self.heavy, self.light = self.specs

    def generations(self) -> list[int]:
        return [self.cluster.task(task)["generation"] for task in self.specs]


@pytest.fixture(scope="module")
def pair(three: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(three, tmp_path_factory.mktemp("out"))


def test_a_lost_node_takes_one_plan_and_rejoins(pair: Pair) -> None:
    cluster, heavy, light = pair.cluster, pair.heavy, pair.light
    node = next(node for node in NODES if cluster.on(heavy, node) and not cluster.on(light, node))
    hurt, before = cluster.on(heavy, node), {task: cluster.pids(task) for task in pair.specs}
    after = cluster.seq()
    cluster.kill_node(node)
    pair.wait_whole(3, 1)

    # the node counts as lost only after a second source
    opened = cluster.told(after, "IncidentOpened")
    assert [record.body.task for record in opened] == [heavy], cluster.tail(after)
    assert (opened[0].body.severity, opened[0].body.node) == ("SEV1", node)
    assert sorted(opened[0].body.ranks) == sorted(hurt)
    evidence = [cluster.records()[seq - 1].kind for seq in opened[0].body.evidence]
    assert "NodeUnreachable" in evidence, evidence
    assert len(set(evidence)) > 1 or "too late" in opened[0].body.why, opened[0]
    # one plan for both: the task without a fault yields the slot that is worth more elsewhere
    (plan,) = cluster.told(after, "PlanChosen")
    assert plan.cause == opened[0].cause
    assert {x.task: (x.slots_before, x.slots) for x in plan.body.allocations} == {
        heavy: (4, 3),
        light: (2, 1),
    }
    assert any(x.what == "the next best" for x in plan.body.alternatives)
    # the survivors are the same processes
    assert cluster.kept(heavy, before[heavy]) == set(before[heavy]) - set(hurt)
    assert set(cluster.pids(light).values()) < set(before[light].values())
    cluster.wait_healed(after)

    back, before = cluster.seq(), {task: cluster.pids(task) for task in pair.specs}
    cluster.start_agent(node)
    pair.wait_whole()
    assert cluster.told(back, "NodeJoined", node=node)
    for task in pair.specs:
        now = cluster.pids(task)
        assert cluster.kept(task, before[task]) == set(before[task]), "a survivor was killed"
        grown = [
            record.body
            for record in cluster.told(back, "Reconfigured", task=task)
            if record.body.rank not in before[task]
        ]
        assert {body.rank for body in grown} == set(now) - set(before[task])
        assert all(body.source in before[task] and body.received_bytes > 0 for body in grown)
        assert cluster.task(task)["iterations_lost"] == 0
    assert not cluster.told(back, "IncidentOpened")


def test_a_stopped_agent_interrupts_no_task(pair: Pair) -> None:
    cluster, before, after = pair.cluster, pair.generations(), pair.cluster.seq()
    with stopped(cluster.agent("n3").pid):
        cluster.wait_told(after, "NodeUnreachable", node="n3")
        for task in pair.specs:
            line = cluster.traced(task)[-1]
            cluster.wait_traced(task, event="step", iteration=line["iteration"] + 2)
    cluster.wait_told(after, "NodeReachable", node="n3")
    for task in pair.specs:
        cluster.wait_steps(task)
    assert pair.generations() == before
    for kind in ("Quiesce", "StartRank", "StopRank", "IncidentOpened"):
        assert not cluster.told(after, kind), cluster.tail(after)


def test_a_stopped_log_server_interrupts_no_task(pair: Pair) -> None:
    cluster, before, after = pair.cluster, pair.generations(), pair.cluster.seq()
    server = embedded_server.adopt(cluster.state.server)
    assert server is not None
    pids = [cluster.pids(task) for task in pair.specs]
    with stopped(server.pid):
        begun_s = time.monotonic()
        stepped = {task: cluster.traced(task)[-1]["iteration"] for task in pair.specs}
        for task, iteration in stepped.items():
            cluster.wait_traced(task, event="step", iteration=iteration + 5)
        # The twins must train all iterations from here on, so rank 0 of each task is held.
        holds = [cluster.hold(task, 0, event="forward") for task in pair.specs]
        time.sleep(max(SERVER_STOPPED_S - (time.monotonic() - begun_s), 0.0))
        for hold in holds:
            hold.unlink()
    for task in pair.specs:
        cluster.wait_steps(task)
    assert pair.generations() == before
    assert [cluster.pids(task) for task in pair.specs] == pids
    for kind in ("NodeUnreachable", "Quiesce", "StartRank", "StopRank", "IncidentOpened"):
        assert not cluster.told(after, kind), cluster.tail(after)


def test_both_tasks_equal_their_undisturbed_twins(pair: Pair, twins: Twins) -> None:
    """The published checkpoints and the losses reported by then equal the twins'."""
    cluster, after = pair.cluster, pair.cluster.seq()
    for task in pair.specs:
        cluster.wait_told(after, "CheckpointPublished", task=task)
    pair.cancel()
    held = {task: twins.start(spec) for task, spec in pair.specs.items()}
    cluster.verify()
    for task, (ours, twin) in held.items():
        twins.hold(ours, twin, cluster.losses(task), UNTOLD_S_MAX)
