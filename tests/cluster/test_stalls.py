"""Real ranks that hold the GIL, loop, are stopped or are slow: what the agents report.

Each fault has its own task. The control plane acts on none of these faults.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import past_screens
import pytest
from real_cluster import RealCluster, running
from twins import small
from unicron.cli.app import run_command
from unicron.cli.terminal.format import UNBROKEN
from unicron.control_plane.history.history import History

VICTIM = 1
NUM = 4


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster whose control plane acts on no stall and no stop during a test."""
    with running(
        tmp_path_factory.mktemp("patient"),
        policy={"stopped_s_max": 600.0, "evidence_s_max": 4.0, "hang_s_min": 600.0},
    ) as made:
        yield made


def begun(cluster: RealCluster, output: Path, name: str) -> int:
    """Submit a task of four ranks and wait until their step times are known."""
    task = cluster.submit(small(name, output, checkpoint_every=0))
    cluster.wait_whole(task, NUM)
    cluster.wait_paced(task, NUM)
    return task


def stalls(cluster: RealCluster, task: int, after: int) -> dict[int, Any]:
    for rank in range(NUM):
        cluster.wait_told(after, "RankStalled", task=task, rank=rank)
    return {
        record.body.rank: record.body  # type: ignore[attr-defined]
        for record in cluster.told(after, "RankStalled", task=task)
    }


@pytest.fixture(autouse=True)
def alone(patient: RealCluster) -> Iterator[None]:
    """Free all slots after each test, also after a failed one."""
    yield
    patient.restore()


@pytest.mark.parametrize(
    "then", ["gil", *(pytest.param(then, marks=pytest.mark.thorough) for then in ("loop", "stop"))]
)
def test_a_stalled_rank_is_distinguished_from_those_that_wait(
    patient: RealCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], then: str
) -> None:
    cluster = patient
    task = begun(cluster, tmp_path, then)
    after = cluster.seq()
    assert not cluster.told(0, "RankStalled", task=task), cluster.tail(0)
    if then == "stop":
        cluster.hold(task, VICTIM, event="forward")
        line = cluster.wait_held(task, VICTIM, 0.0)
        os.kill(line["pid"], signal.SIGSTOP)
    else:
        cluster.hold(task, VICTIM, event="forward", then=then)
    reported = stalls(cluster, task, after)
    guilty = reported.pop(VICTIM)
    assert (guilty.where, guilty.what, guilty.collective) == ("own", "micro_batch", 0), guilty
    assert guilty.stack.startswith(
        {"gil": "sleeps", "loop": "computes", "stop": "stopped by a signal"}[then]
    ), guilty
    for waits in reported.values():
        assert (waits.where, waits.iteration) == ("collective", guilty.iteration), waits
        assert waits.collective > 0, waits
    assert {
        len(cluster.told(after, "RankStalled", task=task, rank=rank)) for rank in range(NUM)
    } == {1}
    if then == "gil":
        page_names_the_dumps(cluster, task, capsys)


def page_names_the_dumps(
    cluster: RealCluster, task: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task screen names the dump folder for `unicron locate`, which finds the hung rank."""
    view = cluster.client().get("/v1/state")
    (one,) = [x for x in view["tasks"] if x["id"] == task]
    page = past_screens.task_status(view, one, History(), now_s=time.time())
    (line,) = [x.replace(UNBROKEN, " ") for x in page if x.startswith("dumps")]
    folder = Path(line.partition("unicron locate ")[2].partition(":")[0])
    (folder / "rank-0.attempt-1.error.json").write_text('{"message": "of an earlier process"}')
    # The rank that holds the GIL writes no dump.
    cluster.wait(lambda: len(list(folder.glob("flight-rank-*.json"))) >= NUM - 1 or None, "dumps")
    assert run_command(["locate", str(folder), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [x["rank"] for x in answer["suspects"]] == [VICTIM], answer


@pytest.mark.thorough
def test_a_rank_stalled_in_an_overlapped_reduction_is_reported(
    patient: RealCluster, tmp_path: Path
) -> None:
    cluster = patient
    task = begun(cluster, tmp_path, "held")
    after = cluster.seq()
    hold = cluster.hold(task, VICTIM, event="bucket")
    reported = stalls(cluster, task, after)
    guilty = reported.pop(VICTIM)
    assert guilty.where == "own", guilty
    for waits in reported.values():
        assert (waits.where, waits.iteration) == ("collective", guilty.iteration), waits
        assert waits.collective > guilty.collective, (waits, guilty)
    hold.unlink()
    for rank in range(NUM):
        ended = cluster.wait_told(after, "RankUnstalled", task=task, rank=rank).body
        assert ended.iteration >= guilty.iteration, ended
        assert ended.stalled_s >= 1.0


def test_a_slow_rank_is_found_by_its_own_work(patient: RealCluster, tmp_path: Path) -> None:
    cluster = patient
    task = begun(cluster, tmp_path, "slow")
    first = {
        rank: cluster.told(0, "StepTimeChanged", task=task, rank=rank)[0].body
        for rank in range(NUM)
    }
    after = cluster.seq()
    each_s = max(0.4, first[VICTIM].iteration_s)  # type: ignore[attr-defined]
    hold = cluster.hold(task, VICTIM, then="slow", slow_s=each_s)  # delays every event
    slow = cluster.wait(
        lambda: next(
            (
                record.body
                for record in cluster.told(after, "StepTimeChanged", task=task, rank=VICTIM)
                if record.body.own_s >= 2 * record.body.normal_s
            ),
            None,
        ),  # type: ignore[attr-defined]
        "the slow rank is reported",
    )
    assert slow.iteration_s >= slow.own_s
    for record in cluster.told(after, "StepTimeChanged", task=task):
        if record.body.rank != VICTIM:  # type: ignore[attr-defined]
            assert record.body.own_s < slow.own_s  # type: ignore[attr-defined]
    hold.unlink()
