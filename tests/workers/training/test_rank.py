"""Real ranks: generations end and form again in the same processes, without losing work."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rank_driver import Drive, Twins
from reference import read
from unicron.events.records import reports as r
from unicron.events.records.statuses import WRONG_INPUT
from unicron.events.spec.model import Axes

ALL = [0, 1, 2, 3]
ITERATIONS = 14
WAIT_S = 60.0
FREED_S_MAX = 20.0
"""Limit for a member to stop after an order to stop at once, on a busy machine. Without an order it
waits for at least 25 s."""


def _forwards(driver: Any, iteration: int) -> list[tuple[int, int]]:
    """(rank, micro-batch) of every forward pass of an iteration."""
    return [
        (rank, line["micro_batch"])
        for rank in ALL
        for line in driver.trace(rank)
        if line["event"] == "forward" and line["iteration"] == iteration
    ]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.thorough), 0.1])
def test_a_killed_rank_costs_no_micro_batch_and_comes_back(
    drive: Drive, twin: Twins, dropout: float
) -> None:
    driver = drive(dropout=dropout)
    driver.start(*ALL)
    pids = {rank: driver.processes[rank].popen.pid for rank in ALL}
    path = driver.hold(2, "forward", 4, micro_batch=10)
    driver.form(ALL)
    left = [0, 1, 3]
    for rank in left:  # ranks complete a reduction at different times
        driver.strike(rank, iteration=4, event="forward")
    driver.held(2, 4)
    driver.kill(2)
    path.unlink()
    held = driver.quiesce(left, "now")
    assert all(report.step_version == 4 for report in held.values())
    reports = driver.form(left, progress_from=4)
    assert [reports[rank].kept_micro_batches for rank in left] == [
        held[rank].micro_batches for rank in left
    ]
    reassigned = sorted(item for rank in left for item in reports[rank].reassigned_micro_batches)
    assert reassigned == [2, 6, 10], "only the dead rank's micro-batches"
    assert all(reports[rank].source == rank for rank in left)

    driver.strike(0, iteration=7, event="forward")
    stopped = driver.quiesce(left, "boundary")
    assert len({report.step_version for report in stopped.values()}) == 1
    assert all(report.micro_batches == () for report in stopped.values())
    driver.start(2, attempt=2)
    reports = driver.form(ALL, progress_from=stopped[0].step_version)
    ready = driver.processes[2].ready
    assert {one.rank for one in reports[2].received_from} == set(left), "each survivor sends a part"
    assert reports[2].source in left
    assert reports[2].received_bytes == ready.state_bytes
    assert sorted(item for rank in ALL for item in reports[rank].remaining_micro_batches) == list(
        range(12)
    )
    assert not any(reports[rank].reassigned_micro_batches for rank in ALL)
    driver.finish(ALL)

    struck = _forwards(driver, 4)
    assert len([rank for rank, _ in struck if rank == 2]) == 3, "rank 2 died in iteration 4"
    assert sorted(item for rank, item in struck if rank != 2) == list(range(12))
    for iteration in [*range(4), *range(5, ITERATIONS)]:
        assert sorted(item for _, item in _forwards(driver, iteration)) == list(range(12))
    assert {rank: driver.processes[rank].popen.pid for rank in left} == {
        rank: pids[rank] for rank in left
    }
    assert sorted(driver.losses()) == list(range(ITERATIONS))
    assert twin(dropout).is_equal(driver.final_checkpoint(3))


def test_undisturbed_ranks_equal_the_twin_and_resume_from_a_checkpoint(
    drive: Drive, twin: Twins
) -> None:
    driver = drive(dropout=0.1, checkpoint_every=6)
    driver.start(*ALL)
    driver.form(ALL)
    driver.finish(ALL)
    assert twin(0.1).is_equal(driver.final_checkpoint(1))
    reports = driver.told(r.TaskProgressed)
    assert {report.micro_batches for report in reports} == {12}
    assert all(report.rate_flops > 0 for report in reports)
    assert [saved.path for saved in driver.told(r.CheckpointSaved)] == [
        "gen-1/iter-6",
        "gen-1/iter-12",
        "gen-1/iter-14",
    ]
    half = read(Path(driver.spec.train.output) / "gen-1/iter-6")
    assert half["numbers.step_version"] == 6
    assert half["numbers.consumed_samples"] == 6 * 24

    again = drive(dropout=0.1, output=driver.spec.train.output)
    again.start(0, 1)
    again.generation = 1
    first, second = again.form([0, 1], checkpoint="gen-1/iter-6").values()
    assert (first.step_version, first.source, first.origin) == (6, -1, "checkpoint")
    assert (second.step_version, second.source, second.origin) == (6, -1, "checkpoint")
    again.finish([0, 1])
    assert sorted(again.losses()) == list(range(ITERATIONS)), "the checkpoint contains the losses"
    assert twin(0.1).is_equal(again.final_checkpoint(2))


def test_a_stopped_peer_then_a_second_fault_while_reconfiguring(drive: Drive, twin: Twins) -> None:
    driver = drive()
    driver.start(*ALL)
    driver.hold(2, "forward", 3, micro_batch=6)
    driver.form(ALL)
    driver.held(2, 3)
    driver.processes[2].signal(signal.SIGSTOP)
    left = [0, 1, 3]
    for rank in left:
        driver.strike(rank, iteration=3, event="reduce")
    time.sleep(0.5)
    assert not driver.told(r.CollectiveFailed), "a stopped peer fails no collective"
    began_s = time.monotonic()
    held = driver.quiesce(left, "now")
    assert time.monotonic() - began_s < FREED_S_MAX
    assert all(len(report.micro_batches) == 3 for report in held.values())
    driver.kill(2)

    # Rank 0, which hosts the rendezvous store, stops and dies while the others wait for it.
    driver.processes[0].signal(signal.SIGSTOP)
    driver.reconfigure(left)
    time.sleep(0.5)
    began_s = time.monotonic()
    driver.kill(0)
    left = [1, 3]
    again = driver.quiesce(left, "now")
    assert time.monotonic() - began_s < FREED_S_MAX
    assert {rank: again[rank].micro_batches for rank in left} == {
        rank: held[rank].micro_batches for rank in left
    }
    assert len(driver.told(r.ReconfigureFailed)) == 2
    reports = driver.form(left, progress_from=3)
    assert sorted(item for rank in left for item in reports[rank].reassigned_micro_batches) == [
        0,
        2,
        4,
        6,
        8,
        10,
    ]
    driver.finish(left)
    assert twin(0.0).is_equal(driver.final_checkpoint(3))


@pytest.mark.thorough
def test_survivors_quiesce_without_an_order(drive: Drive, twin: Twins) -> None:
    """A survivor whose collective fails reports CollectiveFailed and Quiesced, and then waits."""
    driver = drive()
    driver.start(0, 1, 2)
    driver.hold(1, "reduce", 2)
    driver.form([0, 1, 2])
    driver.held(1, 2)
    driver.kill(1)
    alone = driver.left_by_themselves([0, 2])
    assert alone, "no survivor quiesced by itself"
    assert {report.rank for report in driver.told(r.CollectiveFailed)} == alone
    held = driver.quiesced([0, 2])
    versions = {report.step_version for report in held.values()}
    assert versions == {2}
    again = driver.quiesce([0, 2], "now")
    assert again == held, "a repeated Quiesce has the same answer"
    driver.form([0, 2], progress_from=2)
    driver.finish([0, 2])
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


def fails_after_its_fifth(module: str, function: str, error: str) -> str:
    """A patch: the fifth call of a function of the model does its work and raises."""
    return f"""
from unicron.workers.training.model import {module} as patched
right, calls = patched.{function}, []
def whole_and_yet_failed(*args, **options):
    calls.append(right(*args, **options))
    if len(calls) == 5:
        raise RuntimeError("{error}")
    return calls[-1]
patched.{function} = whole_and_yet_failed
"""


FAILS_AFTER_REDUCTION = fails_after_its_fifth(
    "megatron_gradients", "finalize_model_grads", "Connection closed by peer"
)


def test_members_that_disagree_on_a_step_settle_on_it(drive: Drive, twin: Twins) -> None:
    """A reduction fails on rank 1 and completes on ranks 0 and 2: they step, rank 1 does not."""
    driver = drive()
    driver.start(0, 2)
    driver.patch = FAILS_AFTER_REDUCTION
    driver.start(1)
    driver.form([0, 1, 2])
    held = driver.quiesced([0, 1, 2])
    assert {rank: report.step_version for rank, report in held.items()} == {0: 5, 1: 4, 2: 5}
    assert len(held[1].micro_batches) == 4
    reports = driver.form([0, 1, 2], progress_from=5)
    assert {report.step_version for report in reports.values()} == {5}
    assert [reports[rank].source == rank for rank in (0, 1, 2)] == [True, False, True]
    assert reports[1].received_bytes == driver.processes[1].ready.state_bytes
    assert reports[1].kept_micro_batches == ()
    driver.finish([0, 1, 2])
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


SCALES_SLOWLY = """
import time
from megatron.core.distributed import DistributedDataParallel
right, calls = DistributedDataParallel.scale_gradients, []
def slow(self, factor):
    calls.append(factor)
    if len(calls) == 3:
        print("scaling", flush=True)
        time.sleep(3)
    right(self, factor)
DistributedDataParallel.scale_gradients = slow
"""


@pytest.mark.thorough
def test_a_member_quiesced_while_it_scales_keeps_its_sum(drive: Drive, twin: Twins) -> None:
    """Rank 0 dies while rank 1 scales gradients for seconds, as with a big model on few cores."""
    driver = drive()
    driver.start(0)
    driver.patch = SCALES_SLOWLY
    driver.start(1)
    driver.form([0, 1])
    driver.says(1, "scaling")
    driver.kill(0)
    held = driver.quiesce([1], "now")[1]
    assert (held.step_version, len(held.micro_batches)) in ((2, 6), (3, 0))
    time.sleep(3)
    driver.form([1], progress_from=2)
    driver.finish([1])
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


LOADS_SLOWLY = (
    FAILS_AFTER_REDUCTION
    + """
import time
from unicron.workers.training.model import training_state
load = training_state.load
def slow(*args):
    print("taking", flush=True)
    time.sleep(2)
    return load(*args)
training_state.load = slow
"""
)

TOLD_ONCE_IT_HAS_RECEIVED = (
    FAILS_AFTER_REDUCTION
    + """
import time
from unicron.workers.training.state_recovery import StateRecovery
exchange = StateRecovery._exchange
def slow(self, *args):
    received = exchange(self, *args)
    print("taking", flush=True)
    end_s = time.monotonic() + 30
    while not self._communicators.woken and time.monotonic() < end_s:
        time.sleep(0.001)
    return received
StateRecovery._exchange = slow
"""
)


@pytest.mark.parametrize("patch", [LOADS_SLOWLY, TOLD_ONCE_IT_HAS_RECEIVED], ids=["loads", "has"])
def test_a_state_loaded_while_the_generation_ends_is_kept(
    drive: Drive, twin: Twins, patch: str
) -> None:
    """Rank 1 is told to quiesce while it loads a peer's state, or when its tensors are the peer's
    and only the numbers are missing. Then it is the only rank left."""
    driver = drive()
    driver.start(0, 2)
    driver.patch = patch
    driver.start(1)
    driver.form([0, 1, 2])
    assert driver.quiesced([0, 1, 2])[1].step_version == 4
    driver.reconfigure([0, 1, 2])
    driver.says(1, "taking")
    reports = driver.quiesce([0, 1, 2], "now")
    assert {rank: report.step_version for rank, report in reports.items()} == {0: 5, 1: 5, 2: 5}
    assert reports[1].micro_batches == (), "the sum belongs to the previous step"
    driver.kill(0)
    driver.kill(2)
    driver.form([1], progress_from=5)
    driver.finish([1])
    assert twin(0.0).is_equal(driver.final_checkpoint(3))


FAILS_IN_ITS_FIFTH_STEP = fails_after_its_fifth(
    "megatron_step", "step", "out of memory in the step"
)


def test_a_step_after_a_settlement_that_fails_ends_the_process(drive: Drive) -> None:
    """Both members of a replica are in the step barrier when they are told to quiesce, so both step
    in the next join. The state of rank 1 is then of no iteration: it must not join again."""
    driver = drive(parallel={"tensor": [2]})
    driver.start(0)
    driver.patch = FAILS_IN_ITS_FIFTH_STEP
    driver.start(1)
    hold = driver.hold(1, "gate", 4)
    driver.form([0, 1], axes=Axes(tp=2))
    driver.held(1, 4)
    driver.strike(0, iteration=4, event="gate")
    held = driver.quiesce([0, 1], "now", hold)
    assert {report.step_version for report in held.values()} == {4}
    driver.reconfigure([0, 1], axes=Axes(tp=2))
    assert "out of memory in the step" in driver.wait(r.RankErrored, 1).text
    assert driver.processes.pop(1).popen.wait(WAIT_S) == 1, driver.story()
    assert not driver.told(r.ReconfigureFailed, 1)


SMALL_CHUNKS = """
from unicron.workers.training.recovery import state_transfer
state_transfer.CHUNK_BYTES = 1 << 16
"""
TAKES_SLOWLY = (
    SMALL_CHUNKS
    + """
import time
unpack = state_transfer._unpack
def slow(chunk, tensors):
    print("taking", flush=True)
    time.sleep(0.1)
    return unpack(chunk, tensors)
state_transfer._unpack = slow
"""
)


@pytest.mark.parametrize("victim", ["giver", "taker"])
def test_an_interrupted_transfer_leaves_no_partial_state(
    drive: Drive, twin: Twins, victim: str
) -> None:
    driver = drive()
    driver.patch = SMALL_CHUNKS
    driver.start(0, 1)
    driver.patch = TAKES_SLOWLY
    driver.start(2)
    driver.form([0, 1])
    driver.strike(1, iteration=2, event="forward", nth=2)
    held = driver.quiesce([0, 1], "now")
    assert any(report.micro_batches for report in held.values())
    driver.reconfigure([0, 1, 2])
    driver.says(2, "taking", 9)
    dead = {"giver": 0, "taker": 2}[victim]
    driver.kill(dead)
    left = [rank for rank in (0, 1, 2) if rank != dead]
    reports = driver.quiesce(left, "now")
    assert reports[1].micro_batches == held[1].micro_batches, "a survivor keeps its sum"
    if victim == "giver":
        assert reports[2].step_version == -1, "a partial state does not count"
    # Another rank dies between Reconfigured and Resume: the remaining ranks settle again.
    driver.reconfigure(left)
    again = driver.reconfigured(left)
    assert len({report.step_version for report in again.values()}) == 1
    driver.kill(left[-1])
    driver.quiesce(left[:-1], "now")
    driver.form(left[:-1], progress_from=2)
    driver.finish(left[:-1])
    assert twin(0.0).is_equal(driver.final_checkpoint(4))


def test_a_partial_state_without_a_source_restarts_from_the_seed(drive: Drive) -> None:
    """The partial transfer overwrote the initial weights, so the rank builds them again."""
    driver = drive(iterations=10_000)
    driver.patch = SMALL_CHUNKS
    driver.start(0)
    driver.patch = TAKES_SLOWLY
    driver.start(1)
    driver.form([0])
    driver.quiesce([0], "boundary")
    driver.reconfigure([0, 1])
    driver.says(1, "taking", 9)
    driver.kill(0)
    assert driver.quiesce([1], "now")[1].step_version == -1
    first = driver.losses()[0]
    assert driver.form([1])[1].origin == "seed"
    report = driver.wait(r.TaskProgressed, 1)
    assert report.first_iteration == 0
    assert report.losses[0] == pytest.approx(first, rel=1e-6)


OTHER_TORCH = """
from unicron.workers.training import state_recovery
state_recovery.VERSIONS = "torch 1.0.0"
"""


def test_a_rank_of_another_version_ends_and_is_named(drive: Drive, twin: Twins) -> None:
    driver = drive()
    driver.start(0)
    driver.patch = OTHER_TORCH
    driver.start(1)
    driver.reconfigure([0, 1])
    errored = driver.wait(r.RankErrored, 1)
    failed = driver.wait(r.ReconfigureFailed, 0)
    assert errored.status == WRONG_INPUT
    for told in (errored.text, failed.error):
        assert "rank 1 on" in told
        assert "has torch 1.0.0, the other ranks have torch 2" in told
    driver.form([0])
    driver.finish([0])
    assert twin(0.0).is_equal(driver.final_checkpoint())


REMEMBERS_MUCH = """
from unicron.workers.training.process.history import History
right = History.add
def add(self, iteration, loss, step_s):
    right(self, iteration, loss, step_s)
    if self.first == 0:
        self.replace(-600_000, [1.5] * 600_000 + self.losses, [0.25] * 600_000 + self.step_s)
History.add = add
"""


@pytest.mark.thorough
def test_a_newcomer_receives_half_a_million_losses(drive: Drive) -> None:
    driver = drive(iterations=10_000)
    driver.patch = REMEMBERS_MUCH
    driver.start(0)
    driver.patch = ""
    driver.start(1)
    driver.form([0])
    driver.quiesce([0], "boundary")
    reports = driver.form([0, 1])
    assert {rank: report.source for rank, report in reports.items()} == {0: 0, 1: 0}
    driver.quiesce([0, 1], "boundary")


WRONG = """
from unicron.workers.training.model.engine import Passes
from unicron.workers.training.model.losses import Losses
from unicron.workers.training.step.passes import PassRunner
right = PassRunner.unit
def wrong(self, unit, *rest, **named):
    struck = self.part.state.step_version == 4 and unit == (5,)
    if struck and fault == "dropped":
        return Passes(1, Losses())
    if struck:
        right(self, unit, *rest, is_last=False, is_probe=False)
    return right(self, unit, *rest, **named)
PassRunner.unit = wrong
"""


@pytest.mark.parametrize("fault", ["dropped", "doubled"])
def test_one_wrong_micro_batch_fails_the_comparison(drive: Drive, twin: Twins, fault: str) -> None:
    driver = drive()
    driver.patch = f"fault = {fault!r}{WRONG}"
    driver.start(0, 1)
    driver.form([0, 1])
    driver.finish([0, 1])
    assert not twin(0.0).is_equal(driver.final_checkpoint(1))
