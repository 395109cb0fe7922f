"""A rank of a replica of several ranks hangs: it alone is named and replaced, in every layout.

All of its peers wait for it, some for each other: only the counts of what each rank has entered in
each group show who is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_cluster import RealCluster, running
from twins import Twins, small

HANG_S_MIN = 3.0
"""In the policy; longer than the delay of a rank on a busy machine."""
NUM = 4
COPY_EVERY = 10
"""Iterations between two copies in memory."""
MODEL = {"num_layers": 2, "hidden": 64, "num_heads": 2, "sequence": 64}


class Case(NamedTuple):
    """Rank `victim` hangs at `event`."""

    changes: Mapping[str, Any]
    victim: int
    event: str
    then: str = "sleep"


TENSOR, PIPELINE = {"parallel": {"tensor": [2]}}, {"parallel": {"pipeline": [2]}}
CASES = {
    "tensor": Case(TENSOR, 1, "forward"),
    "pipeline": Case(PIPELINE, 2, "backward"),
    "pipeline-first": Case(PIPELINE, 0, "forward"),
    "overlapped": Case({"overlap": True}, 3, "backward"),
    "sharded": Case({"parallel": {"tensor": [2], "optimizer": "sharded"}}, 2, "backward", "loop"),
    "step": Case(TENSOR, 0, "step", "gil"),
}

THOROUGH = {"pipeline-first", "step"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(tmp_path_factory.mktemp("hang"), policy={"hang_s_min": HANG_S_MIN}) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.thorough] * (one in THOROUGH)) for one in CASES]
)
def test_the_rank_for_which_the_others_wait_is_replaced_alone(
    cluster: RealCluster, twins: Twins, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    spec = small(
        name,
        tmp_path,
        checkpoint_every=20,
        copy_every=COPY_EVERY,
        model=MODEL,
        batch={"global": 8, "micro": 2},
    )
    spec["train"] |= case.changes
    task = cluster.submit(spec)
    cluster.rest(task)
    cluster.wait_whole(task, NUM)
    cluster.wait_paced(task, NUM)
    before, after = cluster.pids(task), cluster.seq()
    asked_s = float(cluster.traced(task)[-1]["t"])
    cluster.hold(task, case.victim, event=case.event, then=case.then)
    line = cluster.wait_held(task, case.victim, asked_s)

    opened = cluster.wait_told(after, "IncidentOpened", task=task)
    body = opened.body
    assert (body.severity, body.status) == ("SEV2", "task hang"), cluster.tail(after)
    assert body.ranks == (case.victim,), cluster.tail(after)
    assert body.why.startswith(f"rank {case.victim} on {body.node} is stalled"), body
    stalls = cluster.told(after, "RankStalled", task=task)
    normal_s = max(record.body.normal_s for record in stalls)
    # On a machine with too few cores, an agent leaves out the time in which its rank had none.
    told_s = max(record.at_s for record in stalls) + normal_s
    due_s = max(line["t"] + max(3 * normal_s, HANG_S_MIN), told_s)
    assert opened.at_s <= due_s + 5, cluster.tail(after)

    cluster.wait_whole(task, NUM)
    closed = cluster.wait_told(after, "IncidentClosed").body
    assert not closed.ckpt_read, cluster.tail(after)
    if name == "sharded":  # nobody else has its part of the optimizer: it comes from a copy
        assert closed.iterations_lost <= COPY_EVERY, cluster.tail(after)
    else:
        assert (closed.outcome, closed.iterations_lost) == ("healed", 0), cluster.tail(after)
    assert cluster.kept(task, before) == set(before) - {case.victim}
    ended = [record.body.rank for record in cluster.told(after, "RankExited", task=task)]
    assert ended == [case.victim], cluster.tail(after)
    cluster.wait_steps(task)
    assert len(cluster.told(after, "IncidentOpened")) == 1, cluster.tail(after)
    twins.compare_and_cancel(cluster, task, spec)
