"""Checkpoints: written during training or on preemption, completely or not at all."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import LocalKeeper
from rank_driver import TASK, Drive, Twins
from unicron.events.records import reports as r
from unicron.events.records.orders import Quiesce
from unicron.events.records.types import QuiesceMode
from unicron.workers.training.checkpoint import folder

ITERATIONS = 14


@pytest.fixture
def driver(drive: Drive) -> Any:
    return drive(checkpoint_every=3, copy_every=0)


def partial_checkpoints(output: Path) -> list[Path]:
    """Partial checkpoints that were not removed."""
    return [path for path in output.glob("gen-*/*") if path.suffix]


def saved(driver: Any) -> list[tuple[int, int, bool]]:
    return [(one.generation, one.step_version, one.final) for one in driver.told(r.CheckpointSaved)]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_is_skipped(
    driver: Any, twin: Twins
) -> None:
    driver.start(0, 1)
    log = driver.processes[0].log
    path = driver.hold(0, "saved", 3)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.strike(0, iteration=8, event="forward")
    assert saved(driver) == [], "a partial checkpoint was reported"
    path.unlink()
    driver.finish([0, 1])
    assert saved(driver)[0] == (1, 3, False)
    assert saved(driver)[-1] == (1, ITERATIONS, True)
    assert "checkpoint skipped" in log.read_text()
    assert twin(0.0).is_equal(driver.final_checkpoint())


def test_a_checkpoint_written_during_training_is_the_state_of_its_step(
    driver: Any, twin: Twins
) -> None:
    driver.start(0)
    path = driver.hold(0, "saving", 6)
    driver.form([0])
    driver.held(0, 6)
    driver.strike(0, iteration=8, event="forward")
    path.unlink()
    report = driver.wait(r.CheckpointSaved, 0, where=lambda one: one.step_version == 6)
    driver.kill(0)
    driver.start(0, attempt=2)
    (came,) = driver.form([0], checkpoint=report.path).values()
    assert (came.step_version, came.origin) == (6, "checkpoint")
    driver.finish([0])
    assert sorted(driver.losses()) == list(range(ITERATIONS))
    assert twin(0.0).is_equal(driver.final_checkpoint())


@pytest.mark.parametrize("event", ["saving", "save_mid", "saved"])
def test_after_a_death_while_saving_the_next_generation_saves(
    driver: Any, twin: Twins, event: str
) -> None:
    """The unfinished checkpoint is not reported. The next checkpoint removes it."""
    driver.start(0, 1)
    driver.hold(0, event, 3)
    waits = driver.hold(1, "reduce", 4)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.held(1, 4)
    driver.kill(0)
    waits.unlink()
    output = Path(driver.spec.train.output)
    driver.until(lambda: bool(partial_checkpoints(output)) == (event != "saved"))
    assert (output / "gen-1/iter-3").exists() == (event == "saved")
    assert saved(driver) == []
    driver.quiesce([1], "now")
    driver.form([1])
    driver.finish([1])
    assert (saved(driver)[0], saved(driver)[-1]) == ((2, 6, False), (2, ITERATIONS, True))
    assert {generation for generation, _, _ in saved(driver)} == {2}
    assert partial_checkpoints(output) == []
    assert sorted(driver.losses()) == list(range(ITERATIONS))
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


@pytest.mark.parametrize("then", ["raise", "fail"])
def test_an_error_in_the_writing_thread_ends_the_rank(driver: Any, then: str) -> None:
    driver.start(0)
    driver.hold(0, "saving", 3, then=then)
    driver.form([0])
    report = driver.wait(r.RankErrored, 0)
    assert report.error == {"raise": "InjectedFault", "fail": "RuntimeError"}[then]
    assert "injected: saving of iteration 3" in report.text
    assert report.iteration >= 3
    assert driver.processes[0].popen.wait(20) == 1
    assert saved(driver) == []


def test_a_full_disk_is_logged_once_and_so_is_its_recovery(driver: Any) -> None:
    driver.start(0)
    log, output = driver.processes[0].log, Path(driver.spec.train.output)
    blocked = output / "gen-1"
    driver.hold(0, "forward", 2, micro_batch=0)
    driver.form([0])
    driver.held(0, 2)
    blocked.write_text("no folder can be made here")
    for iteration in (4, 10):
        driver.hold(0, "forward", iteration, micro_batch=0)
        driver.held(0, iteration)
        driver.says(0, "checkpoint not saved")
    assert log.read_text().count("checkpoint not saved; training continues") == 1
    assert f"{output}/gen-1/iter-3: Not a directory" in log.read_text()
    blocked.unlink()
    driver.hold(0, "forward", ITERATIONS, micro_batch=0)
    driver.finish([0])
    assert saved(driver)[-1] == (1, ITERATIONS, True)
    assert log.read_text().count("checkpoints are saved again") == 1
    assert driver.told(r.RankErrored) == []


def test_a_member_that_leaves_abandons_an_older_checkpoint(driver: Any) -> None:
    driver.start(0)
    path = driver.hold(0, "save_mid", 3)
    driver.form([0])
    driver.held(0, 3)
    driver.strike(0, iteration=4, event="forward")
    driver.order(
        Quiesce(nodes=("n1",), task=TASK, generation=1, mode="boundary", ranks=(0,), save=True), [0]
    )
    driver.until(
        lambda: any(line["event"] == "save" and line["iteration"] > 3 for line in driver.trace(0))
    )
    path.unlink()
    held = driver.quiesced([0])[0]
    assert saved(driver) == [(1, held.step_version, False)]
    output, log = Path(driver.spec.train.output), driver.processes[0].log.read_text()
    assert [one.name for one in output.glob("gen-1/*")] == [f"iter-{held.step_version}"]
    assert "checkpoint abandoned: a newer one is needed" in log
    assert "not saved" not in log
    assert driver.told(r.RankErrored) == []


def test_a_folder_that_cannot_be_listed_is_left_to_the_next_generation(tmp_path: Path) -> None:
    half = tmp_path / "gen-1" / f"iter-3.1{folder.PARTIAL}"
    half.mkdir(parents=True)
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, few[1]))  # no folder can be opened
    try:
        folder.clear(str(tmp_path), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, few)
    assert half.exists()
    folder.clear(str(tmp_path), 2)
    assert not half.exists()


def test_a_member_ends_its_old_write_before_it_saves_again(driver: Any, twin: Twins) -> None:
    """The others wait for its share of the final checkpoint. The old one was given up."""
    driver.start(0, 1)
    path = driver.hold(0, "save_mid", 3)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.quiesce([0, 1], "now")
    driver.form([1, 0])
    driver.until(
        lambda: any(
            line["event"] == "save" and line["iteration"] == ITERATIONS for line in driver.trace(1)
        )
    )
    assert driver.told(r.RankFinished) == []
    assert "checkpoint skipped" in driver.processes[1].log.read_text()
    path.unlink()
    driver.finish([0, 1])
    assert saved(driver)[-1] == (2, ITERATIONS, True)
    assert partial_checkpoints(Path(driver.spec.train.output)) == []
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


def test_a_late_checkpoint_reports_the_generation_it_was_taken_in(driver: Any) -> None:
    driver.start(0, 1)
    path = driver.hold(0, "saving", 3)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.strike(1, iteration=3, event="saving")  # otherwise it may leave before it saves
    driver.quiesce([0, 1], "now")
    driver.form([0, 1])
    path.unlink()
    report = driver.wait(r.CheckpointSaved, 0)
    assert (report.generation, report.path) == (1, "gen-1/iter-3")
    driver.finish([0, 1])


# --- saved on preemption -------------------------------------------------------------------------
def _resumed(drive: Drive, driver: Any, saved: r.CheckpointSaved, ranks: list[int]) -> Path:
    """Resume in new processes from `saved` and finish; return the final checkpoint."""
    for process in driver.started:
        process.popen.kill()
    again = drive(dropout=driver.spec.train.model.dropout, output=driver.spec.train.output)
    again.start(*ranks)
    again.generation = saved.generation
    for report in again.form(ranks, checkpoint=saved.path).values():
        assert (report.step_version, report.source, report.origin) == (
            saved.step_version,
            -1,
            "checkpoint",
        )
    again.finish(ranks)
    assert sorted(again.losses()) == list(range(ITERATIONS)), "the checkpoint contains the losses"
    final: Path = again.final_checkpoint()
    return final


@pytest.mark.parametrize("mode", ["boundary", "now"])
def test_the_first_named_member_saves_and_no_iteration_is_lost(
    drive: Drive, twin: Twins, mode: QuiesceMode
) -> None:
    driver = drive(dropout=0.1)
    driver.start(0, 1)
    # Held in its second micro-batch, rank 1 has taken the step before and has a sum to discard.
    # Rank 0 may still be a step behind, because ranks complete a reduction at different times.
    path = driver.hold(1, "backward", 4, micro_batch=3)
    driver.form([0, 1])
    driver.held(1, 4)
    reports = driver.leave([1, 0], mode, path)  # rank 1 is named first, but rank 0 is member 0
    saved, held = reports[1]
    assert reports[0] == driver.told(r.Quiesced, 0)
    assert isinstance(saved, r.CheckpointSaved)
    assert isinstance(held, r.Quiesced)
    assert saved.step_version == held.step_version >= 4
    assert (saved.generation, held.generation, saved.final) == (1, 1, False)
    assert saved.path == f"gen-1/iter-{held.step_version}"
    assert held.micro_batches == ((1, 3) if mode == "now" else ())
    assert saved.ckpt_bytes > driver.processes[1].ready.state_bytes
    assert twin(0.1).is_equal(_resumed(drive, driver, saved, [0, 1]))


def test_a_member_that_has_quiesced_saves_when_asked(drive: Drive, twin: Twins) -> None:
    driver = drive(dropout=0.1)
    driver.start(0, 1, 2)
    driver.form([0, 1])
    driver.strike(1, iteration=3, event="reduce")
    driver.kill(1)
    held = driver.quiesced([0])[0]
    assert driver.told(r.CollectiveFailed, 0)
    assert not driver.told(r.CheckpointSaved)
    saved, again = driver.leave([0], "now")[0]
    assert isinstance(saved, r.CheckpointSaved)
    assert again == held
    assert (saved.generation, saved.step_version) == (1, held.step_version)
    # A repeated order writes nothing, because the checkpoint may already be published and in use.
    folder = Path(driver.spec.train.output) / saved.path
    inode = folder.stat().st_ino
    assert driver.leave([0], "now")[0] == [saved, again]
    assert folder.stat().st_ino == inode
    # A ready rank that was in no generation has nothing to save.
    (empty,) = driver.leave([2], "now")[2]
    assert (empty.generation, empty.step_version) == (1, -1)
    assert twin(0.1).is_equal(_resumed(drive, driver, saved, [0]))


def _limit_files(driver: Any, num_bytes: int, rank: int = 0) -> None:
    """Limit the size of the files that a rank writes from now on, as a full disk does."""
    pid = driver.processes[rank].popen.pid
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def _failed(driver: Any, *, final: bool) -> list[r.CheckpointFailed]:
    return [one for one in driver.told(r.CheckpointFailed) if one.final == final]


def test_a_full_disk_ends_no_rank(drive: Drive, twin: Twins) -> None:
    driver = drive(checkpoint_every=2)
    driver.start(0)
    log, output = driver.processes[0].log, Path(driver.spec.train.output)
    _limit_files(driver, driver.processes[0].ready.state_bytes // 4)
    driver.form([0])
    driver.strike(0, iteration=5, event="forward")
    *failed, held = driver.leave([0], "boundary")[0]
    assert isinstance(held, r.Quiesced)
    assert not driver.told(r.CheckpointSaved)
    assert log.read_text().count("checkpoint not saved") >= 2, "the periodic and the last one"
    told = _failed(driver, final=False)
    assert [(one.step_version, one.errno) for one in told] == [
        (2, "EFBIG"),
        (held.step_version, "EFBIG"),
    ], "the first one, and what was ordered"
    assert set(failed) <= set(told)
    assert list(output.glob("*/*")) == [], "partial checkpoints are removed"
    _limit_files(driver, resource.RLIM_INFINITY)
    saved, _ = driver.leave([0], "now")[0]
    assert saved.path == f"gen-1/iter-{held.step_version}"
    assert (output / saved.path).is_dir()

    _limit_files(driver, driver.processes[0].ready.state_bytes // 4)
    driver.form([0], progress_from=held.step_version)
    driver.until(lambda: len(_failed(driver, final=True)) == 2, "it is tried again")
    first, _ = _failed(driver, final=True)
    assert (first.generation, first.step_version) == (2, ITERATIONS)
    assert first.path == f"{output}/gen-2/iter-{ITERATIONS}"
    assert first.why == "File too large"
    assert driver.processes[0].popen.poll() is None, "it holds the final state"
    assert driver.told(r.RankFinished) == []
    _limit_files(driver, resource.RLIM_INFINITY)
    driver.finish([0])
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


def test_all_members_hold_the_final_state_until_each_has_saved_its_share(
    drive: Drive, twin: Twins
) -> None:
    """One of them cannot write. The state goes to the checkpoint stores meanwhile."""
    driver = drive()
    driver.keepers = [LocalKeeper("n1")]
    driver.start(0, 1)
    _limit_files(driver, driver.processes[1].ready.state_bytes // 4, rank=1)
    driver.form([0, 1])
    driver.until(lambda: {one.rank for one in _failed(driver, final=True)} == {0, 1})
    driver.until(
        lambda: (
            {
                one.rank
                for one in driver.told(r.MemoryCheckpointStored)
                if one.step_version == ITERATIONS
            }
            == {0, 1}
        ),
        "both have put their shares into memory",
    )
    assert [driver.processes[rank].popen.poll() for rank in (0, 1)] == [None, None]
    _limit_files(driver, resource.RLIM_INFINITY, rank=1)
    driver.finish([0, 1])
    output = Path(driver.spec.train.output)
    assert partial_checkpoints(output) == []
    assert twin(0.0).is_equal(driver.final_checkpoint(1))


def test_the_final_state_goes_to_another_folder(drive: Drive, twin: Twins, tmp_path: Path) -> None:
    """It is ordered while both members wait to try again."""
    driver, moved = drive(), tmp_path / "moved"
    driver.start(0, 1)
    Path(driver.spec.train.output, "gen-1").write_text("no folder can be made here")
    driver.form([0, 1])
    driver.until(lambda: len(_failed(driver, final=True)) >= 3, "the second pause is 4 s")
    assert {one.errno for one in _failed(driver, final=True)} <= {"ENOTDIR", "EEXIST", ""}
    begun_s = time.monotonic()
    driver.order(
        Quiesce(
            nodes=("n1",),
            task=TASK,
            generation=1,
            mode="boundary",
            ranks=(0, 1),
            output=str(moved),
        ),
        [0, 1],
    )
    driver.quiesced([0, 1])
    assert time.monotonic() - begun_s < 3.0, "the pause ends at the order"
    driver.form([0, 1], progress_from=ITERATIONS)
    driver.finish([0, 1])
    (saved,) = driver.told(r.CheckpointSaved)
    assert (saved.output, saved.path, saved.final) == (str(moved), f"gen-2/iter-{ITERATIONS}", True)
    assert twin(0.0).is_equal(moved / saved.path)


TELLS_AT_ONCE = """
from unicron.workers.training import member
member.PROGRESS_S = 0.0
"""
MANY_ITERATIONS = 400
"""A socket buffer holds about 280 reports on Linux, whatever their size. These are more."""


def test_an_agent_that_reads_nothing_delays_no_iteration(drive: Drive) -> None:
    model = {"num_layers": 1, "hidden": 16, "num_heads": 1, "sequence": 8}
    driver = drive(model=model, batch={"global": 4, "micro": 1}, iterations=MANY_ITERATIONS)
    driver.patch = TELLS_AT_ONCE
    driver.start(0)
    driver.reconfigure([0])
    driver.reconfigured([0])
    driver.hears.clear()
    driver.resume([0])
    for iteration in (*range(50, MANY_ITERATIONS, 50), MANY_ITERATIONS - 1):
        driver.strike(0, iteration=iteration, event="step")  # each wait has its own time limit
    assert not driver.losses(), "the driver read reports"
    time.sleep(1.0)
    assert driver.processes[0].popen.poll() is None, "the rank exited with unsent reports"
    driver.hears.set()
    driver.finish([0])
    assert sorted(driver.losses()) == list(range(MANY_ITERATIONS))
    reports = driver.told(r.TaskProgressed)
    assert [report.first_iteration for report in reports] == [
        sum(len(before.losses) for before in reports[:index]) for index in range(len(reports))
    ]
    assert len(reports) < MANY_ITERATIONS, "waiting reports are merged"
