"""Starts, recoveries and saves that read, receive, send and write for far longer than any limit;
storage that stands still. Each limit of the policy is a tenth of its default or less."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_trial
import pytest
import slow_storage
from real_cluster import RealCluster, running
from twins import small
from unicron.events.spec.policy import Policy

LIMITS = (
    "start_s_max",
    "quiesce_s_max",
    "boundary_s_max",
    "reconfigure_s_max",
    "restore_s_max",
    "storage_s_max",
)
TENTH = {name: getattr(Policy(), name) / 10 for name in LIMITS}
RECONFIGURE_S = TENTH["reconfigure_s_max"]
SHORT = {**TENTH, **dict.fromkeys(("start_s_max", "boundary_s_max", "storage_s_max"), 3.0)}
"""Ten times a tenth of these takes many minutes."""
SHORT_S = 3.0
assert {SHORT[name] for name in ("start_s_max", "boundary_s_max")} == {SHORT_S}
TIMES = 10
"""A recovery lasts so many times as long as its limit."""
EVERY = 5
LARGE = megatron_trial.Case(2, {}, model=["--hidden-size", "256"])
BYTES_A_PARAMETER = 12
"""In fp32: the parameter and two moments."""
PREPARES = """import os, time
if os.environ["RANK"] == "0":
    time.sleep({seconds})
"""


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    yield from with_limits(tmp_path_factory.mktemp("slowed"), TENTH)


@pytest.fixture
def cluster(slowed: RealCluster) -> Iterator[RealCluster]:
    yield from as_it_was(slowed)


@pytest.fixture(scope="module")
def hastened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    yield from with_limits(tmp_path_factory.mktemp("hastened"), SHORT)


@pytest.fixture
def hasty(hastened: RealCluster) -> Iterator[RealCluster]:
    """With shorter limits."""
    yield from as_it_was(hastened)


def with_limits(folder: Path, limits: dict[str, float]) -> Iterator[RealCluster]:
    policy = {**limits, "evidence_s_max": 4.0, "restart_pause_s_max": 0.0}
    with running(folder, policy=policy) as made:
        slow_storage.install(made.path / "trace")
        yield made


def as_it_was(cluster: RealCluster) -> Iterator[RealCluster]:
    set_rates(cluster)
    yield cluster
    set_rates(cluster)
    cluster.restore()


def job(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A state of some 40 MB."""
    given: dict[str, Any] = {
        "slots": (2, 2),
        "iterations": 100_000,
        "model": {"num_layers": 3, "hidden": 256, "num_heads": 4, "sequence": 32},
        "batch": {"global": 4, "micro": 1},
    }
    return small(name, folder, **(given | changes))


def state_bytes(cluster: RealCluster, task: int) -> int:
    body: Any = cluster.told(0, "RankReady", task=task)[-1].body
    return int(body.state_bytes)


def kill_all(cluster: RealCluster, task: int) -> None:
    for pid in cluster.pids(task).values():
        os.kill(pid, signal.SIGKILL)


def set_rates(cluster: RealCluster, **bytes_per_s: float) -> None:
    slow_storage.set_rates(cluster.path / "trace", **bytes_per_s)


def watch_status(cluster: RealCluster, task: int, wanted: str) -> str:
    """The line of `status TASK` that shows this progress, with an estimate."""

    def look() -> str | None:
        printed = cluster.unicron("status", cluster.task(task)["name"]).stdout
        lines = [line for line in printed.splitlines() if line.startswith("works ")]
        return next((line for line in lines if wanted in line and " left" in line), None)

    return cluster.wait(look, f"status shows {wanted!r}")


def comes_up_late(cluster: RealCluster, task: int, after: int, began_s: float) -> Any:
    """It comes back in one generation, after many times its limit."""
    came: Any = cluster.wait_told(after, "Reconfigured", task=task).body
    took_s = time.monotonic() - began_s
    assert took_s > TIMES * RECONFIGURE_S, f"{took_s:.1f} s were no test"
    cluster.wait_steps(task, 3)
    assert len(cluster.told(after, "Reconfigure", task=task)) == 1, cluster.tail(after)
    assert not cluster.told(after, "ReconfigureFailed"), cluster.tail(after)
    worked = cluster.told(after, "RankWorked", task=task)
    assert worked
    members = 2
    assert len(worked) <= members * (took_s / (RECONFIGURE_S / 3) + 4), "seldom"
    return came


def rate(cluster: RealCluster, task: int) -> float:
    """With this one the state takes a little more than TIMES its limit."""
    return state_bytes(cluster, task) / (1.2 * TIMES * RECONFIGURE_S)


def test_a_checkpoint_that_is_read_for_ten_times_the_limit(
    cluster: RealCluster, tmp_path: Path
) -> None:
    task = cluster.submit(job("folder", tmp_path, checkpoint_every=EVERY, copy_every=0))
    cluster.wait_told(0, "CheckpointPublished", task=task)
    after, began_s = cluster.seq(), time.monotonic()
    set_rates(cluster, read=rate(cluster, task))
    kill_all(cluster, task)
    line = watch_status(cluster, task, "reads its checkpoint, ")
    print(line)
    assert " MB, " in line
    came = comes_up_late(cluster, task, after, began_s)
    assert came.origin == "checkpoint"
    cluster.cancel(task)


def test_copies_that_are_read_for_ten_times_the_limit(cluster: RealCluster, tmp_path: Path) -> None:
    task = cluster.submit(job("copies", tmp_path, copy_every=EVERY))
    cluster.wait_told(0, "MemoryCheckpointStored", task=task)
    cluster.wait_steps(task, 3 * EVERY)
    after, began_s = cluster.seq(), time.monotonic()
    set_rates(cluster, copy=rate(cluster, task))
    kill_all(cluster, task)
    print(watch_status(cluster, task, "reads its state from memory, "))
    came = comes_up_late(cluster, task, after, began_s)
    assert came.origin == "copy"
    cluster.cancel(task)


def test_a_state_that_is_sent_for_ten_times_the_limit(cluster: RealCluster, tmp_path: Path) -> None:
    task = cluster.submit(job("peer", tmp_path, copy_every=0))
    cluster.wait_steps(task, 3)
    after = cluster.seq()
    set_rates(cluster, peer=rate(cluster, task))
    os.kill(cluster.pids(task)[1], signal.SIGKILL)
    cluster.wait_told(after, "Resume", task=task)
    began_s = time.monotonic()
    print(watch_status(cluster, task, "receives its state, "))
    cluster.wait(
        lambda: cluster.told(after, "Reconfigured", task=task, rank=1) or None, "rank 1 came back"
    )
    assert time.monotonic() - began_s > TIMES * RECONFIGURE_S
    assert not cluster.told(after, "ReconfigureFailed"), cluster.tail(after)
    cluster.cancel(task)


@pytest.mark.thorough
def test_another_layout_that_takes_ten_times_the_limit(
    cluster: RealCluster, tmp_path: Path
) -> None:
    """PP 2 x DP 2 goes on as PP 3 without a rank: one member receives two layers, one another."""
    model = {"num_layers": 6, "hidden": 256, "num_heads": 4, "sequence": 32}
    # With fewer micro-batches PP 3 and a spare rank would be faster.
    parallel, batch = {"pipeline": [2, 3]}, {"global": 128, "micro": 2}
    changes = {"model": model, "parallel": parallel, "batch": batch}
    task = cluster.submit(job("layout", tmp_path, slots=(1, 4), copy_every=0, **changes))
    cluster.wait_whole(task, 4)
    after = cluster.seq()
    layer_bytes = 12 * model["hidden"] ** 2 * BYTES_A_PARAMETER
    set_rates(cluster, peer=2 * layer_bytes / (1.2 * TIMES * RECONFIGURE_S))
    came = cluster.hold(task, 3, event="start", iteration=-1)  # not before the others go on
    os.kill(cluster.pids(task)[3], signal.SIGKILL)
    order: Any = cluster.wait_told(after, "Reconfigure", task=task).body
    began_s = time.monotonic()
    came.unlink()
    assert order.axes.pp == 3
    print(watch_status(cluster, task, "its state, "))
    cluster.wait_told(after, "Resume", task=task)
    assert time.monotonic() - began_s > TIMES * RECONFIGURE_S
    set_rates(cluster)
    cluster.wait_whole(task, 4)
    assert not cluster.told(after, "ReconfigureFailed"), cluster.tail(after)
    assert len(cluster.told(after, "Reconfigure", task=task)) == 2, cluster.tail(after)
    cluster.cancel(task)


@pytest.mark.thorough
def test_a_task_that_saves_and_one_that_starts_for_ten_times_their_limits(
    hasty: RealCluster, tmp_path: Path
) -> None:
    """A task that is preempted saves slowly; then the other one reads its data slowly."""
    task = hasty.submit(job("saved", tmp_path, checkpoint_every=1000, copy_every=0))
    hasty.wait_steps(task, 3)
    data = tmp_path / "data"
    data.write_bytes(bytes(range(256)) * (16 << 12))
    set_rates(
        hasty,
        write=state_bytes(hasty, task) / 2 / (1.2 * TIMES * SHORT_S),  # each member writes a half
        data=data.stat().st_size / (1.2 * TIMES * SHORT_S),
    )
    after, began_s = hasty.seq(), time.monotonic()
    urgent = hasty.submit(
        job(
            "urgent",
            tmp_path,
            slots=(4, 4),
            weight=100.0,
            iterations=3,
            copy_every=0,
            data=[str(data)],
        )
    )
    print(watch_status(hasty, task, "saves its state, "))
    order: Any = hasty.wait_told(after, "Quiesce", task=task).body
    assert order.save
    saved: Any = hasty.wait_told(after, "CheckpointPublished", task=task).body
    hasty.wait_told(after, "TaskWaiting", task=task)
    assert time.monotonic() - began_s > TIMES * SHORT_S
    set_rates(hasty, data=data.stat().st_size / (1.2 * TIMES * SHORT_S))
    began_s = time.monotonic()
    assert hasty.wait_ended(urgent)["state"] == "finished", hasty.tail(after)
    assert time.monotonic() - began_s > TIMES * SHORT_S
    starts = hasty.told(after, "RankStarted", task=urgent)
    assert [x.body.attempt for x in starts] == [1] * 4, hasty.tail(after)  # type: ignore[attr-defined]
    hasty.wait_steps(task, 1)
    came: Any = hasty.told(after, "Reconfigured", task=task)[0].body
    assert f"iter-{came.step_version}" in saved.path
    assert not hasty.told(after, "IncidentOpened"), hasty.tail(after)
    hasty.cancel(task)


@pytest.mark.thorough
def test_a_save_that_stands_still_is_named_and_holds_no_slots(
    hasty: RealCluster, tmp_path: Path
) -> None:
    """The storage of a task that is preempted takes a part of its state, and no more."""
    task = hasty.submit(job("stands", tmp_path, checkpoint_every=1000, copy_every=0))
    hasty.wait_steps(task, 3)
    set_rates(hasty, write=state_bytes(hasty, task) / 2 / (10 * SHORT_S))
    after = hasty.seq()
    changes: dict[str, Any] = {"slots": (4, 4), "weight": 100.0, "iterations": 3}
    urgent = hasty.submit(job("next", tmp_path, copy_every=0, **changes))
    watch_status(hasty, task, "saves its state, ")
    set_rates(hasty, write=0.0)
    opened: Any = hasty.wait_told(after, "IncidentOpened", task=task).body
    print(opened.why)
    assert f"_s_max: nothing moved for {SHORT_S:g} s; rank " in opened.why
    assert " saves its state, " in opened.why
    assert " of 14.7 MB, moved " in opened.why  # each member writes a half
    hasty.wait_steps(urgent, 1)
    set_rates(hasty)
    assert hasty.wait_ended(urgent)["state"] == "finished", hasty.tail(after)
    hasty.wait_whole(task, 2)
    hasty.cancel(task)


@pytest.mark.thorough
def test_a_script_that_builds_an_index_and_loads_for_ten_times_the_limits(
    hasty: RealCluster, tmp_path: Path
) -> None:
    """A job of Megatron-LM: rank 0 prepares slowly before it adopts, `--load` reads slowly."""
    clone = megatron_trial.stand_in(tmp_path / "megatron-lm")
    words = ("--save", str(tmp_path / "saved"), "--save-interval", "8", "--exit-interval", "8")
    first = hasty.submit(megatron_trial.job(clone, LARGE, tmp_path / "first", *words, iterations=8))
    assert hasty.wait_ended(first)["state"] == "finished", hasty.endings(first)
    script = clone / "pretrain_gpt.py"
    script.write_text(PREPARES.format(seconds=1.2 * TIMES * SHORT_S) + script.read_text())
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*.distcp"))
    set_rates(hasty, read=num_bytes / (1.2 * TIMES * RECONFIGURE_S))
    after, began_s = hasty.seq(), time.monotonic()
    words = ("--load", str(tmp_path / "saved"))
    task = hasty.submit(
        megatron_trial.job(clone, LARGE, tmp_path / "second", *words, iterations=12)
    )
    hasty.wait_told(after, "Reconfigure", task=task)
    assert time.monotonic() - began_s > TIMES * SHORT_S
    began_s = time.monotonic()
    print(watch_status(hasty, task, "reads its checkpoint, "))
    hasty.wait_told(after, "Resume", task=task)
    assert time.monotonic() - began_s > TIMES * RECONFIGURE_S
    assert hasty.wait_ended(task)["state"] == "finished", hasty.endings(task)
    starts = hasty.told(after, "RankStarted", task=task)
    assert [x.body.attempt for x in starts] == [1, 1], hasty.tail(after)  # type: ignore[attr-defined]
    progressed: list[Any] = hasty.told(after, "TaskProgressed", task=task)
    assert progressed[0].body.first_iteration == 8
    assert min(loss for one in progressed for loss in one.body.losses) > 0
    assert not hasty.told(after, "IncidentOpened"), hasty.tail(after)


def test_a_storage_that_stands_still_is_named_with_the_bytes(
    cluster: RealCluster, tmp_path: Path
) -> None:
    task = cluster.submit(job("stuck", tmp_path, checkpoint_every=EVERY, copy_every=0))
    cluster.wait_told(0, "CheckpointPublished", task=task)
    after, slowly = cluster.seq(), rate(cluster, task)
    set_rates(cluster, read=slowly)
    kill_all(cluster, task)
    cluster.wait(
        lambda: [x for x in cluster.told(after, "RankWorked", task=task) if x.body.done] or None,
        "it reads",
    )
    set_rates(cluster, read=0.0)
    time.sleep(2 * RECONFIGURE_S)
    set_rates(cluster, read=slowly)
    time.sleep(2 * RECONFIGURE_S)
    assert not cluster.told(after, "ReconfigureFailed"), "it may stand still for a while"
    assert cluster.task(task)["generation"] == 2
    set_rates(cluster, read=0.0)
    failed = cluster.wait(
        lambda: (
            [
                x.body.why
                for kind in ("IncidentOpened", "IncidentEscalated")
                for x in cluster.told(after, kind)
                if "storage_s_max" in x.body.why
            ]
            or None
        ),
        "the limit acts",
    )
    print(failed[0])
    assert f"(storage_s_max: nothing moved for {TENTH['storage_s_max']:g} s; rank " in failed[0]
    assert "reads its checkpoint, " in failed[0]
    assert " MB, moved " in failed[0]
    set_rates(cluster)  # it goes on
    cluster.wait_whole(task, 2)
    cluster.cancel(task)


@pytest.mark.thorough
def test_a_checkpoint_that_is_read_for_300_s_at_the_defaults(tmp_path: Path) -> None:
    length_s = 300.0
    with running(tmp_path, policy={"restart_pause_s_max": 0.0}) as cluster:
        slow_storage.install(cluster.path / "trace")
        set_rates(cluster)
        task = cluster.submit(job("hours", tmp_path, checkpoint_every=EVERY, copy_every=0))
        cluster.wait_told(0, "CheckpointPublished", task=task)
        after, began_s = cluster.seq(), time.monotonic()
        set_rates(cluster, read=state_bytes(cluster, task) / length_s)
        kill_all(cluster, task)
        while not cluster.told(after, "Resume", task=task):
            assert time.monotonic() < began_s + 3 * length_s, cluster.tail(after)
            time.sleep(1)
        assert time.monotonic() - began_s > 0.8 * length_s
        assert len(cluster.told(after, "Reconfigure", task=task)) == 1, cluster.tail(after)
        assert len(cluster.told(after, "RankWorked", task=task)) < 2 * (3 * length_s / 10)
