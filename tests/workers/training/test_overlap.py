"""Reduction overlapped with the last backward pass: no fault changes the result of training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix.cells import Cell, cells
from matrix.trial import Trials
from nursery import PATCH, Forked, Nursery
from rank_driver import Drive, Twins
from unicron.events.records.reports import CollectiveFailed
from unicron.events.spec.job import Model, Train
from unicron.events.spec.model import Axes
from unicron.workers.training.communicators import process_groups
from unicron.workers.training.communicators.operations import Operations
from unicron.workers.training.dependencies import private_megatron
from unicron.workers.training.model import cpu_device
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.megatron_gradients import GradientBackup
from unicron.workers.training.step.collective import END_S_MAX, end_all
from unicron.workers.training.step.overlapped import LaunchedReduction
from unicron.workers.training.step.stats import Stats

NO_STATS = Stats(0.0, 0.0)
STRUCK = 4
"""The iteration in which the fault occurs. Rank 1 of three has micro-batches 1, 4, 7, 10."""
BUCKETS = 4
KILLED = {
    "inside backward",
    "before the reduction",
    "token count",
    "entering a bucket",
    "entering the third bucket of four",
    "buckets whole on some ranks",
    "reduction whole",
    "scaling",
    "unscale, found-inf",
    "norm",
    "clip",
    "before the optimizer step",
    "inside the optimizer step",
    "after the optimizer step",
    "schedule update",
    "iteration done",
    "join: first micro-batch",
}
RAISING = {"entering the third bucket of four"}
AS_IN_BASE = {
    "inside backward",
    "before the reduction",
    "token count",
    "reduction whole",
    "scaling",
    "unscale, found-inf",
    "norm",
    "clip",
    "before the optimizer step",
    "inside the optimizer step",
    "after the optimizer step",
    "schedule update",
    "iteration done",
}
"""At these points the reduction is complete, or has not begun, as in the base variant that
test_points.py covers."""
PEER = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=1, world_size=2)
time.sleep(60)
sys.exit()
"""
FREED_S_MAX = 10.0
pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16),
    iterations=10,
    output="unused",
    overlap=True,
    bucket_params=3_000,
)


@pytest.fixture(scope="module")
def trials(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("matrix"), nursery)


def overlapped() -> list[Any]:
    """Cells that kill a rank at each point from the last backward on, and a cell that raises."""
    there = [
        cell
        for cell in cells()
        if cell.variant.name == "overlapped"
        and not cell.absent
        and (
            (cell.point.name in KILLED and cell.fault == "SIGKILL")
            or (cell.point.name in RAISING and cell.fault == "exception")
        )
    ]
    assert len(there) == len(KILLED) + len(RAISING)
    return [
        pytest.param(
            cell, id=cell.name, marks=[pytest.mark.thorough] * (cell.point.name in AS_IN_BASE)
        )
        for cell in there
    ]


@pytest.mark.parametrize("cell", overlapped())
def test_a_fault_at_this_point_changes_nothing(trials: Trials, cell: Cell) -> None:
    verdict = trials.run(cell)
    assert verdict.outcome == "equal", verdict.why


@pytest.fixture
def three(drive: Drive) -> Any:
    """A driver with three ranks that overlap the reduction."""
    driver = drive(overlap=True, bucket_params=20_000)
    driver.start(0, 1, 2)
    return driver


def finish(driver: Any, ranks: list[int], twin: Any) -> None:
    """Finish; check that no iteration is lost and that the result equals the twin's."""
    driver.finish(ranks)
    assert sorted(driver.losses()) == list(range(14))
    assert twin.is_equal(driver.final_checkpoint())


def forwards(driver: Any, ranks: list[int], iteration: int) -> list[int]:
    return sorted(
        line["micro_batch"]
        for rank in ranks
        for line in driver.trace(rank)
        if line["event"] == "forward" and line["iteration"] == iteration
    )


def buckets(driver: Any, rank: int, iteration: int, generation: int) -> list[tuple[int, bool]]:
    """(bucket, whether a backward pass was running) of each launch, in order."""
    return [
        (line["bucket"], line["micro_batch"] >= 0)
        for line in driver.trace(rank)
        if line["event"] == "bucket"
        and (line["iteration"], line["generation"]) == (iteration, generation)
    ]


def test_survivors_with_different_complete_buckets_agree(three: Any, twin: Twins) -> None:
    three.hold(1, "bucket", STRUCK, bucket=1)
    late = three.hold(2, "bucket_done", STRUCK, bucket=0)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    three.held(2, STRUCK)
    three.strike(0, iteration=STRUCK, event="bucket_done")
    three.kill(1)
    assert three.wait(CollectiveFailed, 0).iteration == STRUCK
    held = three.quiesce([0, 2], "now")
    late.unlink()
    assert {
        rank: (report.step_version, report.buckets_reduced, report.num_buckets)
        for rank, report in held.items()
    } == {0: (STRUCK, 1, BUCKETS), 2: (STRUCK, 0, BUCKETS)}
    reports = three.form([0, 2])
    assert {rank: reports[rank].kept_micro_batches for rank in (0, 2)} == {
        0: (0, 3, 6, 9),
        2: (2, 5, 8, 11),
    }
    finish(three, [0, 2], twin(0.0))
    assert forwards(three, [0, 2], STRUCK) == list(range(12)), "no micro-batch runs twice"


@pytest.mark.thorough
def test_a_launch_that_fails_is_reported_after_the_backward(three: Any, twin: Twins) -> None:
    """No process dies: the same members form again, and no micro-batch remains to be run."""
    three.hold(1, "bucket", STRUCK, then="fail", bucket=1)
    pids = {rank: three.processes[rank].popen.pid for rank in (0, 1, 2)}
    three.form([0, 1, 2])
    assert "injected" in three.wait(CollectiveFailed, 1).error
    for rank in three.left_by_themselves([0, 1, 2]):
        assert three.wait(CollectiveFailed, rank).iteration == STRUCK
    held = three.quiesced([0, 1, 2])
    assert held[1].micro_batches == (1, 4, 7, 10)
    assert buckets(three, 1, STRUCK, 1) == [(0, True), (1, True)]
    reports = three.form([0, 1, 2])
    assert not any(reports[rank].remaining_micro_batches for rank in reports)
    finish(three, [0, 1, 2], twin(0.0))
    assert {line["pid"] for rank in pids for line in three.trace(rank)} == set(pids.values())
    assert forwards(three, [0, 1, 2], STRUCK) == list(range(12))


def test_a_quiesce_in_the_last_backward_stops_bucket_launches(three: Any, twin: Twins) -> None:
    """Rank 0 waits, rank 1 is inside its last backward, rank 2 has two micro-batches left. In the
    next generation only rank 2 has a backward pass to run."""
    here = three.hold(1, "bucket", STRUCK, bucket=1)
    there = three.hold(2, "backward", STRUCK, micro_batch=8)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    three.held(2, STRUCK)
    three.strike(0, iteration=STRUCK, event="bucket", nth=BUCKETS)
    three.ask_to_leave([0, 1, 2], "now")
    assert not three.quiesced([0])[0].buckets_reduced
    here.unlink()
    there.unlink()
    held = three.quiesced([1, 2])
    assert held[1].micro_batches == (1, 4, 7, 10), "rank 1 completes its last backward"
    assert held[2].micro_batches == (2, 5, 8)
    assert buckets(three, 1, STRUCK, 1) == [(0, True), (1, True)]
    reports = three.form([0, 1, 2])
    assert {rank: reports[rank].remaining_micro_batches for rank in reports} == {
        0: (),
        1: (),
        2: (11,),
    }
    finish(three, [0, 1, 2], twin(0.0))
    for rank, in_backward in ((0, False), (1, False), (2, True)):
        assert buckets(three, rank, STRUCK, 2) == [(n, in_backward) for n in range(BUCKETS)]
    assert forwards(three, [0, 1, 2], STRUCK) == list(range(12))


def test_a_quiesce_before_the_reduction_starts_none(three: Any, twin: Twins) -> None:
    here = three.hold(1, "reduce", STRUCK)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    for rank in (0, 2):
        three.strike(rank, iteration=STRUCK, event="bucket")
    three.ask_to_leave([0, 1, 2], "now")
    three.heard(1)
    here.unlink()
    held = three.quiesced([0, 1, 2])
    assert held[1].micro_batches == (1, 4, 7, 10), "rank 1 completes its last backward"
    events = [line["event"] for line in three.trace(1) if line["iteration"] == STRUCK]
    assert events.count("reduce") == 1
    assert "stats" not in events
    three.form([0, 1, 2])
    finish(three, [0, 1, 2], twin(0.0))


@pytest.mark.thorough
def test_a_boundary_quiesce_in_the_last_backward(three: Any, twin: Twins) -> None:
    """The order comes too late for the stats of this iteration, so all stop after the next one."""
    here = three.hold(1, "bucket", STRUCK, bucket=1)
    three.form([0, 1, 2])
    three.held(1, STRUCK)
    for rank in (0, 2):
        three.strike(rank, iteration=STRUCK, event="bucket")
    three.ask_to_leave([0, 1, 2], "boundary")
    here.unlink()
    held = three.quiesced([0, 1, 2])
    assert {report.step_version for report in held.values()} == {STRUCK + 2}
    three.form([0, 1, 2])
    finish(three, [0, 1, 2], twin(0.0))


def test_a_newcomer_in_its_first_iteration_launches_in_the_same_order(
    drive: Drive, twin: Twins
) -> None:
    """Each parameter has its own bucket. A backward pass completes buckets in another order than
    Megatron's list. A rank in its first iteration follows the list."""
    driver = drive(overlap=True, bucket_params=1)
    driver.start(0, 1)
    driver.form([0, 1])
    driver.strike(0, iteration=STRUCK, event="backward")
    held = driver.quiesce([0, 1], "boundary")
    version = held[0].step_version
    driver.start(2)
    driver.form([0, 1, 2])
    finish(driver, [0, 1, 2], twin(0.0))
    newcomer, old = (buckets(driver, rank, version, 2) for rank in (2, 0))
    assert [number for number, _ in newcomer] == [number for number, _ in old]
    assert len(old) > 20
    assert not any(inside for _, inside in newcomer)
    assert all(inside for _, inside in old)


# --- one reduction under way ---------------------------------------------------------------------
@pytest.fixture
def peer(tmp_path: Path, nursery: Nursery) -> Iterator[Forked]:
    """A second member that joins the group and then does nothing."""
    file = str(tmp_path / "store")
    with (tmp_path / "log").open("wb") as output, open(os.devnull, "rb") as nothing:
        made = nursery.fork(
            {**os.environ, "UNICRON_RANK": "peer", PATCH: f"store = {file!r}{PEER}"},
            output.fileno(),
            nothing.fileno(),
        )
    store = dist.FileStore(file, 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)  # returns when both joined
    yield made
    made.kill()
    made.wait(10)
    if dist.is_initialized():
        dist.destroy_process_group()


def abandoned_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "abandoned"]


def test_a_reduction_that_cannot_be_ended_is_abandoned(peer: Forked) -> None:
    flight = LaunchedReduction(NO_STATS, torch.zeros(3), 0, lambda: False, Operations(None))
    began_s, woken = time.monotonic(), list[int]()
    end_all(flight.works, lambda: woken.append(1), flight.world)
    assert woken, "`wake` was not called"
    assert END_S_MAX <= time.monotonic() - began_s < FREED_S_MAX
    (thread,) = abandoned_threads()
    del flight
    began_s = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began_s < FREED_S_MAX, "the group waits for its reductions"
    assert thread.is_alive()
    peer.kill()
    thread.join(FREED_S_MAX)
    assert not thread.is_alive()


def test_buckets_are_launched_in_order_until_the_reduction_ends(peer: Forked) -> None:
    launched, over = list[int](), list[int]()
    flight = LaunchedReduction(NO_STATS, torch.zeros(3), 5, lambda: bool(over), Operations(None))

    def launch(bucket: int) -> list[Any]:
        launched.append(bucket)
        if bucket == 3:
            raise RuntimeError("cut")
        return []

    for bucket, wanted in ((1, []), (2, []), (0, [0, 1, 2]), (0, [0, 1, 2])):
        flight.ready(bucket, launch)
        assert launched == wanted
    over.append(1)
    flight.ready(3, launch)
    assert launched == [0, 1, 2]
    over.clear()
    flight.ready(3, launch)
    flight.ready(4, launch)
    assert launched == [0, 1, 2, 3], "a launch after a failed launch"
    with pytest.raises(RuntimeError, match="cut"):
        flight.wait_all(lambda event, bucket=-1: None, lambda: None)
    peer.kill()
    peer.wait(10)
    end_all(flight.works, lambda: None, flight.world)
    assert not abandoned_threads()


# --- the backup of the local sum -----------------------------------------------------------------
@pytest.fixture
def trainee() -> Iterator[model.TrainingModel]:
    """A model in a world of one process."""
    cpu_device.prepare_device()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    made = model.build(TRAIN, torch.device("cpu"), process_groups.build(Axes(), 60))
    made.clear()  # allocates the gradients
    yield made
    private_megatron.clear_globals()
    dist.destroy_process_group()


def backward(trainee: Any) -> None:
    trainee.draw.at(0, 0)
    with trainee.ddps[0].no_sync():
        trainee.loss(torch.arange(34).view(2, 17)).backward()


def test_late_writes_to_reduced_buckets_are_ignored(trainee: Any) -> None:
    """Two buckets were launched. The second is still being reduced after the backup is restored."""
    backward(trainee)
    (whole,) = (part.clone() for part in trainee.gradients)
    assert whole.abs().sum() > 0
    first, second, *others = trainee.bucket_groups
    assert others
    kept = GradientBackup(trainee)
    for group in (first, second):
        kept.keep(group)
        group.buckets[0].grad_data.mul_(7)
    late = second.buckets[0].grad_data
    assert sum(copy.numel() for copy in kept._copies) == whole.numel(), "one element per parameter"
    kept.restore()
    late.fill_(float("nan"))
    assert trainee.gradients[0].equal(whole)

    # Megatron's views refer to the restored memory, and the next backward pass adds to it.
    memory = trainee.gradients[0].untyped_storage().data_ptr()
    views = [bucket.grad_data for group in trainee.bucket_groups for bucket in group.buckets]
    views += [param.main_grad for param in trainee.modules[0].parameters()]
    assert {view.untyped_storage().data_ptr() for view in views} == {memory}
    backward(trainee)
    torch.testing.assert_close(trainee.gradients[0], 2 * whole)
    trainee.ddps[0].zero_grad_buffer()
    assert not trainee.gradients[0].any()


def test_a_dropped_backup_restores_nothing(trainee: Any) -> None:
    backward(trainee)
    (whole,) = (part.clone() for part in trainee.gradients)
    kept = GradientBackup(trainee)
    for group in trainee.bucket_groups:
        kept.keep(group)
    trainee.gradients[0].mul_(3)
    kept.drop()
    kept.restore()
    assert trainee.gradients[0].equal(3 * whole)
    kept.keep(trainee.bucket_groups[0])
    trainee.bucket_groups[0].buckets[0].grad_data.zero_()
    kept.restore()
    assert trainee.gradients[0].equal(3 * whole), "other buckets are unchanged"
