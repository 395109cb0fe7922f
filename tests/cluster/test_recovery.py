"""A rank is killed, or its collective fails: the result equals that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_cluster import RealCluster
from reference import compare, read, tolerance
from twins import Twins, small

ITERATION = 3
VICTIM = 2
GROWN = 8
"""In this iteration the others wait for the newcomer, so the task can be short."""
ITERATIONS = 12
FAILED_ITERATION = 12
REATTEMPT_ITERATIONS = 40
Parallel = dict[str, list[int]]


def max_difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("sums", ["rounding", "bitwise"])
def test_a_killed_rank_changes_no_result(
    cluster: Any, spec: Callable[..., Any], twins: Twins, sums: str
) -> None:
    struck = spec("struck", dropout=0.1, iterations=ITERATIONS, reproducible=sums)
    after = cluster.seq()
    struck_task = cluster.submit(struck)
    held = cluster.hold(struck_task, 0, event="forward", iteration=GROWN)
    line = cluster.wait_traced(struck_task, rank=VICTIM, iteration=ITERATION, event="backward")
    before = cluster.pids(struck_task)
    os.kill(line["pid"], signal.SIGKILL)
    # The newcomer is ready; on a busy machine perhaps before all survivors have stopped.
    cluster.wait(
        lambda: (
            cluster.told(after, "Quiesce", task=struck_task, mode="boundary")
            or cluster.told(after, "Reconfigured", task=struck_task, rank=VICTIM, attempt=2)
            or None
        ),
        "the newcomer is ready",
    )
    held.unlink()
    ended = cluster.wait_ended(struck_task)
    assert ended["state"] == "finished", ended

    # the survivors are the same processes, and no checkpoint was read
    pids: dict[int, set[int]] = {}
    for traced in cluster.traced(struck_task):
        pids.setdefault(traced["rank"], set()).add(traced["pid"])
    survivors = set(before) - {VICTIM}
    assert all(pids[rank] == {before[rank]} for rank in survivors), pids

    # the log reports the incident as healed, without loss, and every micro-batch as trained
    cluster.wait_healed(after)
    progress = cluster.told(after, "TaskProgressed")
    assert {record.body.micro_batches for record in progress} == {12}

    # forward calls: each micro-batch once, or twice if the dead rank had begun it
    generations = [
        traced["generation"]
        for traced in cluster.traced(struck_task)
        if traced["pid"] == line["pid"] and traced["event"] == "forward"
    ]
    assert len(set(generations)) == 1
    calls = Counter(
        (traced["iteration"], traced["micro_batch"])
        for traced in cluster.traced(struck_task)
        if traced["event"] == "forward"
    )
    lost = {
        (traced["iteration"], traced["micro_batch"])
        for traced in cluster.traced(struck_task)
        if traced["event"] == "forward" and traced["pid"] == line["pid"]
    }
    struck_at = max(iteration for iteration, _ in lost)
    begun = {call for call in lost if call[0] == struck_at}
    assert set(calls) == {(i, m) for i in range(ITERATIONS) for m in range(12)}
    again = {call for call, count in calls.items() if count > 1}
    assert again <= begun
    assert all(count <= 2 for count in calls.values())
    stepped = any(
        traced["event"] == "step" and traced["iteration"] == struck_at
        for traced in cluster.traced(struck_task)
        if traced["pid"] == line["pid"]
    )
    assert again == (set() if stepped else begun)

    reported = cluster.losses(struck_task)
    ours, calm = twins.start(struck)
    twin = twins.trained(calm)
    losses, gap = read(twin)["numbers.losses"], compare(ours, twin)
    assert len(reported) == len(losses) == gap.num_losses == ITERATIONS

    # losses, parameters and optimizer state equal those of the undisturbed run
    if sums == "bitwise":
        assert (gap.loss_rel, gap.param_rel, gap.optimizer_rel) == (0, 0, 0)
        assert reported == losses
        return
    reordered = twins.trained(twins.start(struck, "--order", "1")[1])
    noise = compare(reordered, twin)
    for name in ("loss_rel", "param_rel", "optimizer_rel"):
        assert getattr(gap, name) <= tolerance([getattr(noise, name)]), (name, gap, noise)
    noise_abs = max(max_difference(losses, read(reordered)["numbers.losses"]), 1e-7)
    assert max_difference(losses, reported) <= 3 * noise_abs
    # the comparison can fail: a run that lost one iteration is far outside the tolerance
    assert max_difference(losses[1:], losses[:-1]) > 1000 * noise_abs


# --- a failed collective: the same processes continue ---------------------------------------------
def fail_collective(cluster: Any, task: int, **where: int) -> None:
    """Fail the victim's collective as if its connection were cut; the others find it closed."""
    cluster.hold(task, VICTIM, event="bucket", iteration=FAILED_ITERATION, then="fail", **where)


@pytest.mark.thorough
@pytest.mark.parametrize(("overlap", "bucket"), [(False, 0), (True, 1)])
def test_after_a_failed_collective_the_same_members_continue(
    cluster: Any, tmp_path: Path, twins: Twins, overlap: bool, bucket: int
) -> None:
    spec = small(
        "again",
        tmp_path,
        iterations=REATTEMPT_ITERATIONS,
        overlap=overlap,
        bucket_params=20_000 if overlap else 0,
    )
    after = cluster.seq()
    task = cluster.submit(spec)
    fail_collective(cluster, task, bucket=bucket)
    assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)

    failures = cluster.told(after, "CollectiveFailed", task=task)
    assert any("injected" in record.body.error for record in failures)
    # A rank without CPU time may be ordered to quiesce before it notices the failure.
    ranks = {record.body.rank for record in failures}
    assert VICTIM in ranks
    assert len(ranks) > 1, "other ranks report the failure too"
    opened = cluster.told(after, "IncidentOpened", task=task)
    assert [record.body.severity for record in opened] == ["SEV3"]
    (closed,) = cluster.told(after, "IncidentClosed")
    assert (closed.body.outcome, closed.body.iterations_lost, closed.body.ckpt_read) == (
        "healed",
        0,
        False,
    )
    ordered = cluster.told(after, "Reconfigure", task=task)
    assert [record.body.generation for record in ordered] == [1, 2]
    assert not [
        record for record in cluster.told(after, "RankExited", task=task) if record.seq < closed.seq
    ]

    lines = cluster.traced(task)
    assert len({line["pid"] for line in lines}) == 4
    for iteration in range(REATTEMPT_ITERATIONS):
        assert sorted(
            line["micro_batch"]
            for line in lines
            if line["event"] == "forward" and line["iteration"] == iteration
        ) == [0, 1, 2, 3]
    twins.hold(*twins.start(spec), cluster.losses(task))
    cluster.verify()


# --- layouts: the next layout excludes the killed rank --------------------------------------------
class Case(NamedTuple):
    """A task's layout options, and its layouts (tp, pp, dp) before, without and with the rank."""

    parallel: Parallel
    layouts: tuple[tuple[int, int, int], ...]
    kept: bool
    """True if the micro-batches of an intact replica are kept."""


CASES = {
    "tensor": Case({"tensor": [2]}, ((2, 1, 2), (2, 1, 1), (2, 1, 2)), kept=True),
    "pipeline": Case({"pipeline": [2, 3]}, ((1, 2, 2), (1, 3, 1), (1, 2, 2)), kept=False),
}


@pytest.mark.parametrize(
    "name", ["tensor", pytest.param("pipeline", marks=pytest.mark.thorough)]
)  # as in test_replicas.py
def test_a_lost_rank_costs_no_iteration_in_any_layout(
    cluster: RealCluster, twins: Twins, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    spec = small(
        name,
        tmp_path,
        iterations=ITERATIONS,
        copy_every=0,
        parallel=case.parallel,
        model={"num_layers": 6, "hidden": 64, "num_heads": 2, "sequence": 64},
        batch={"global": 16, "micro": 2},
    )
    after = cluster.seq()
    task = cluster.submit(spec)
    grown = cluster.hold(task, 0, event="reduce", iteration=GROWN)
    begun = cluster.wait_told(after, "Resume", task=task).seq
    cluster.hold(task, 3, event="reduce", iteration=ITERATION)
    line = cluster.wait_held(task, 3, 0.0)
    before = cluster.pids(task)
    os.kill(line["pid"], signal.SIGSTOP)
    # The replacement must not start before the others train in the layout without it.
    came = cluster.hold(task, 3, event="start", iteration=-1)
    os.kill(line["pid"], signal.SIGKILL)
    cluster.wait_told(begun, "Resume", task=task)
    came.unlink()
    cluster.wait_told(after, "Quiesce", task=task, mode="boundary")
    grown.unlink()
    assert cluster.wait_ended(task)["state"] == "finished", cluster.tail(after)

    orders = [record.body.axes for record in cluster.told(after, "Reconfigure", task=task)]
    assert [(axes.tp, axes.pp, axes.dp) for axes in orders] == list(case.layouts)
    assert (cluster.wait_healed(after).kept > 0) == case.kept, cluster.tail(after)
    pids = {(traced["rank"], traced["pid"]) for traced in cluster.traced(task)}
    assert {(rank, pid) for rank, pid in before.items()} <= pids
    assert len(pids) == 5, "four ranks and one replacement"
    twins.hold(*twins.start(spec), cluster.losses(task))
    cluster.verify()
