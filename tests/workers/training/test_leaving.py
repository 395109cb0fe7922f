"""A task that leaves saves what it holds; no full disk and no deaf agent ends it before."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unicron.events.records.reports import (
    CheckpointSaved,
    CollectiveFailed,
    Quiesced,
    RankErrored,
    TaskProgressed,
)
from unicron.events.records.types import QuiesceMode

Drive = Callable[..., Any]
Twins = Callable[[float], Any]
ITERATIONS = 14


def _takes_up(drive: Drive, driver: Any, saved: CheckpointSaved, ranks: list[int]) -> Path:
    """Other processes go on from what was saved, to the end; the final checkpoint."""
    for process in driver.started:
        process.popen.kill()
    again = drive(dropout=driver.spec.train.model.dropout, output=driver.spec.train.output)
    again.start(*ranks)
    again.generation = saved.generation
    first, *others = again.form(ranks, checkpoint=saved.path).values()
    assert (first.step_version, first.source, first.origin) == (
        saved.step_version, -1, "checkpoint")
    for report in others:
        assert (report.step_version, report.source, report.origin) == (
            saved.step_version, first.rank, "peer")
    again.finish(ranks)
    assert sorted(again.losses()) == list(range(ITERATIONS)), "what was saved remembers losses"
    final = again.told(CheckpointSaved)[-1]
    assert final.final
    return Path(again.spec.train.output) / final.path


@pytest.mark.parametrize("mode", ["boundary", "now"])
def test_who_leaves_as_the_first_saves_and_no_iteration_is_lost(
        drive: Drive, twin: Twins, mode: QuiesceMode) -> None:
    driver = drive(dropout=0.1)
    driver.start(0, 1)
    # In its second: whoever saves has taken the step before, and has a sum to leave behind. The
    # other may be a step behind it yet: a reduction is not done everywhere at one moment.
    path = driver.hold(1, "backward", 4, micro_batch=3)
    driver.form([0, 1])
    driver.held(1, 4)
    said = driver.leave([1, 0], mode, path)  # the first to be named, not the generation's first
    saved, held = said[1]
    assert said[0] == driver.told(Quiesced, 0)
    assert isinstance(saved, CheckpointSaved)
    assert isinstance(held, Quiesced)
    assert saved.step_version == held.step_version >= 4
    assert (saved.generation, held.generation, saved.final) == (1, 1, False)
    assert saved.path == f"gen-1/iter-{held.step_version}"
    assert held.micro_batches == ((1, 3) if mode == "now" else ())
    assert saved.ckpt_bytes > driver.processes[1].ready.state_bytes
    assert twin(0.1).is_equal(_takes_up(drive, driver, saved, [0, 1]))


def test_who_has_left_already_saves_when_told(drive: Drive, twin: Twins) -> None:
    driver = drive(dropout=0.1)
    driver.start(0, 1, 2)
    driver.form([0, 1])
    driver.strike(1, iteration=3, event="reduce")
    driver.kill(1)
    held = driver.quiesced([0])[0]
    assert driver.told(CollectiveFailed, 0)
    assert not driver.told(CheckpointSaved)
    saved, again = driver.leave([0], "now")[0]
    assert isinstance(saved, CheckpointSaved)
    assert again == held
    assert (saved.generation, saved.step_version) == (1, held.step_version)
    # Told twice, it is written once: it may be published, and read, by now.
    folder = Path(driver.spec.train.output) / saved.path
    inode = folder.stat().st_ino
    assert driver.leave([0], "now")[0] == [saved, again]
    assert folder.stat().st_ino == inode
    # Who is ready and was in no generation has nothing to save.
    (empty,) = driver.leave([2], "now")[2]
    assert (empty.generation, empty.step_version) == (1, -1)
    assert twin(0.1).is_equal(_takes_up(drive, driver, saved, [0]))


def _limit_files(driver: Any, num_bytes: int) -> None:
    """From now on the rank's files may grow to this and no further, as on a full disk."""
    pid = driver.processes[0].popen.pid
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def test_a_full_disk_ends_neither_training_nor_leaving_but_the_final_one_is_told(
        drive: Drive) -> None:
    driver = drive(checkpoint_every=2)
    driver.start(0)
    log, output = driver.processes[0].log, Path(driver.spec.train.output)
    _limit_files(driver, driver.processes[0].ready.state_bytes // 4)
    driver.form([0])
    driver.strike(0, iteration=5, event="forward")
    (held,) = driver.leave([0], "boundary")[0]
    assert isinstance(held, Quiesced)
    assert not driver.told(CheckpointSaved)
    assert log.read_text().count("checkpoint not saved") >= 2, "a periodic one, and the last"
    assert list(output.glob("*/*")) == [], "what cannot be whole does not fill the disk"
    _limit_files(driver, resource.RLIM_INFINITY)
    saved, _ = driver.leave([0], "now")[0]
    assert saved.path == f"gen-1/iter-{held.step_version}"
    assert (output / saved.path).is_dir()

    _limit_files(driver, driver.processes[0].ready.state_bytes // 4)
    driver.form([0], progress_from=held.step_version)
    told = driver.wait(RankErrored, 0)
    assert (told.error, told.iteration) == ("NotSaved", ITERATIONS)
    assert f"{output}/gen-2/iter-{ITERATIONS}: " in told.text.splitlines()[-1]
    assert driver.processes[0].popen.wait(20) == 1


TELLS_AT_ONCE = """
from unicron.workers.training import member
member.PROGRESS_S = 0.0
"""
MANY_ITERATIONS = 400
"""More reports than a socket's buffer holds: about 280 on Linux, whatever their size."""


def test_an_agent_that_reads_nothing_holds_up_no_iteration(drive: Drive) -> None:
    model = {"num_layers": 1, "hidden": 16, "num_heads": 1, "sequence": 8}
    driver = drive(model=model, batch={"global": 4, "micro": 1}, iterations=MANY_ITERATIONS)
    driver.patch = TELLS_AT_ONCE
    driver.start(0)
    driver.reconfigure([0])
    driver.reconfigured([0])
    driver.hears.clear()
    driver.resume([0])
    for iteration in (*range(50, MANY_ITERATIONS, 50), MANY_ITERATIONS - 1):
        driver.strike(0, iteration=iteration, event="step")  # each in its time, on a busy machine
    assert not driver.losses(), "it is deaf"
    time.sleep(1.0)
    assert driver.processes[0].popen.poll() is None, "it has not told all"
    driver.hears.set()
    driver.finish([0])
    assert sorted(driver.losses()) == list(range(MANY_ITERATIONS))
    told = driver.told(TaskProgressed)
    assert [report.first_iteration for report in told] == [
        sum(len(before.losses) for before in told[:index]) for index in range(len(told))]
    assert len(told) < MANY_ITERATIONS, "what has to wait is told together"
