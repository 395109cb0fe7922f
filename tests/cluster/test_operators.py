"""Operators' requests to a running cluster, in this order: freeze, drain, submit a heavier task."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_story import NODES, RATES
from twins import small
from unicron.events.records.envelope import Record

NO_FAULT = ("IncidentOpened", "RankErrored", "CollectiveFailed")


class One:
    """The task, and requests to its cluster."""

    def __init__(self, cluster: Any, output: Path) -> None:
        self.cluster, self.output = cluster, output
        self.spec = small("job", output, rates=RATES, checkpoint_every=40)
        self.task = cluster.submit(self.spec)
        cluster.wait_whole(self.task, 4)

    def post(self, path: str, reason: str = "a test") -> int:
        return int(self.cluster.client().post(path, {"reason": reason})["seq"])

    def drain(self, node: str, num: int) -> int:
        """Drain the node; wait until `num` members train on other nodes. The request's seq."""
        seq = self.post(f"/v1/nodes/{node}/drain")
        self.cluster.wait_whole(self.task, num)
        assert not self.cluster.on(self.task, node)
        return seq

    def nothing_lost(self, after: int) -> None:
        cluster = self.cluster
        assert not [kind for kind in NO_FAULT if cluster.told(after, kind)], cluster.tail(after)
        assert cluster.task(self.task)["iterations_lost"] == 0


@pytest.fixture(scope="module")
def one(three: Any, tmp_path_factory: pytest.TempPathFactory) -> One:
    return One(three, tmp_path_factory.mktemp("out"))


def test_while_frozen_a_killed_rank_is_not_started(one: One) -> None:
    cluster, task, before = one.cluster, one.task, one.cluster.pids(one.task)
    after = one.post("/v1/freeze", "the switch is being replaced")
    os.kill(before[1], signal.SIGKILL)
    withheld = cluster.wait_told(after, "OrderSuppressed", task=task).body
    assert withheld.why == "frozen: the switch is being replaced"
    cluster.wait_told(after, "RankExited", task=task, rank=1)
    cluster.wait(
        lambda: "start rank 1" in cluster.task(task)["withheld"] or None,
        "the suppressed order is shown",
    )
    survivors = {rank: pid for rank, pid in before.items() if rank != 1}
    assert cluster.kept(task, survivors) == set(survivors)
    frozen_seq = one.post("/v1/unfreeze")
    assert not [
        kind
        for kind in ("Quiesce", "StartRank", "StopRank", "Reconfigure")
        for record in cluster.told(after, kind)
        if record.seq < frozen_seq
    ]
    view = cluster.wait_whole(task, 4)
    assert cluster.kept(task, before) == set(survivors)
    cluster.wait_healed(after)
    assert view["iterations_lost"] == 0


def test_ranks_of_a_drained_node_are_replaced_before_they_stop(one: One) -> None:
    cluster, task = one.cluster, one.task
    node = next(node for node in NODES if cluster.on(task, node))
    leaving = {rank: cluster.pids(task)[rank] for rank in cluster.on(task, node)}
    staying = {rank: pid for rank, pid in cluster.pids(task).items() if rank not in leaving}
    after = one.drain(node, 4)
    # the successors have the state and are ready before any rank of the drained node is stopped
    joined = [
        record
        for record in cluster.told(after, "Reconfigured", task=task)
        if record.body.received_bytes > 0
    ]
    assert len(joined) == len(leaving)
    assert all(record.body.source in {*leaving, *staying} for record in joined)
    stops: list[Record] = cluster.told(after, "StopRank", task=task)
    assert {record.body.rank for record in stops} == set(leaving)
    ready = max(record.seq for record in cluster.told(after, "RankReady", task=task))
    assert ready < min(record.seq for record in stops)
    assert ready < min(record.seq for record in cluster.told(after, "Quiesce", task=task))
    now = cluster.pids(task)
    assert cluster.kept(task, staying) == set(staying)
    view = next(x for x in cluster.client().get("/v1/state")["nodes"] if x["id"] == node)
    assert view["drained"]
    assert [slot["task"] for slot in view["slots"]] == [0, 0]
    one.nothing_lost(after)

    seq = one.post(f"/v1/nodes/{node}/undrain")
    cluster.wait_told(seq, "PlanChosen")
    cluster.wait_steps(task)
    assert cluster.pids(task) == now, "an undrained node moves no rank"


def test_a_preempted_task_is_saved_and_continues_at_its_iteration(one: One) -> None:
    cluster, task = one.cluster, one.task
    home = next(node for node in NODES if len(cluster.on(task, node)) == 2)
    for num, node in zip((4, 2), [node for node in NODES if node != home], strict=True):
        after = one.drain(node, num)
        one.nothing_lost(after)
    urgent = cluster.submit(
        small("urgent", one.output, weight=100.0, slots=(2, 2), rates=RATES, iterations=20)
    )
    order = cluster.wait_told(urgent, "Quiesce", task=task).body
    assert order.save
    cluster.wait_told(urgent, "TaskWaiting", task=task)
    waits = cluster.client().get("/v1/state", explain=1)["tasks"]
    assert next(one for one in waits if one["id"] == task)["weight_from"] > 1, waits
    assert cluster.wait_ended(urgent)["state"] == "finished"
    # the last save of the generation: a periodic one may have come just before
    saved = cluster.told(urgent, "CheckpointSaved", task=task, generation=order.generation)[-1].body
    assert cluster.told(urgent, "CheckpointPublished", task=task, path=saved.path)
    cluster.wait_whole(task, 2)
    begun = [record.body for record in cluster.told(urgent, "Reconfigured", task=task)]
    assert {body.step_version for body in begun} == {saved.step_version}
    assert [(body.origin, body.source) for body in begun] == [("copy", -1)] * 2, (
        "both have the saved step, and memory comes before disk"
    )
    sources = cluster.told(urgent, "Reconfigure", task=task)[0].body.copies
    assert {copy.step_version for copy in sources} == {saved.step_version}
    assert {body.origin_node for body in begun} <= {copy.node for copy in sources}
    reports = cluster.told(urgent, "TaskProgressed", task=task, generation=order.generation)
    assert max(x.body.first_iteration + len(x.body.losses) for x in reports) == saved.step_version
    one.nothing_lost(urgent)
    assert len(cluster.losses(task)) > saved.step_version, "no loss after the saved step"
    cluster.verify()
