"""Ranks of layouts save in parts: during training, at the end, through faults and on preemption."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from rank_driver import TASK, Drive, Twins
from unicron.events.records import reports as r
from unicron.events.records.orders import Quiesce
from unicron.events.records.types import QuiesceMode
from unicron.events.spec.model import Axes
from unicron.workers.training.inference import stored_model

ITERATIONS = 14
RANKS = [0, 1, 2, 3]
LAYOUTS = {
    "tp2dp2": ({"tensor": [2]}, Axes(tp=2, dp=2)),
    "pp2": ({"pipeline": [2]}, Axes(pp=2, dp=2)),
    "zero1": ({"optimizer": "sharded"}, Axes(dp=4)),
    "mirrored": ({"optimizer": "mirrored"}, Axes(dp=4)),
}


def started(drive: Drive, layout: str, **changes: Any) -> tuple[Any, Axes]:
    parallel, axes = LAYOUTS[layout]
    driver = drive(parallel={**parallel}, copy_every=0, **changes)
    driver.start(*RANKS)
    return driver, axes


def leave_saving(driver: Any, ranks: list[int], saving: tuple[int, ...], mode: QuiesceMode) -> None:
    driver.order(
        Quiesce(
            nodes=("n1",),
            task=TASK,
            generation=driver.generation,
            mode=mode,
            ranks=tuple(ranks),
            save=True,
            saving=saving,
        ),
        ranks,
    )


def resumed(
    drive: Drive, driver: Any, path: str, layout: str, ranks: list[int], axes: Axes | None
) -> Path:
    """New processes read the checkpoint in this layout and finish; the final checkpoint."""
    for process in driver.started:
        process.popen.kill()
    again = drive(
        parallel=LAYOUTS[layout][0] if axes else {}, copy_every=0, output=driver.spec.train.output
    )
    again.start(*ranks)
    again.generation = driver.generation
    for report in again.form(ranks, checkpoint=path, axes=axes).values():
        assert (report.source, report.origin) == (-1, "checkpoint")
    again.finish(ranks)
    assert sorted(again.losses()) == list(range(ITERATIONS))
    final: Path = again.final_checkpoint()
    return final


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in ("pp2", "zero1")))
        for name in LAYOUTS
    ],
)
def test_each_member_writes_its_share_and_another_layout_reads_it(
    drive: Drive, twin: Twins, layout: str
) -> None:
    driver, axes = started(drive, layout, checkpoint_every=5)
    driver.form(RANKS, axes=axes)
    report = driver.wait(r.CheckpointSaved, 0, where=lambda one: one.step_version == 10)
    driver.finish(RANKS)
    output = Path(driver.spec.train.output)
    assert {file.name for file in (output / report.path).glob("*.distcp")} == {
        f"__{rank}_0.distcp" for rank in RANKS
    }
    assert twin(0.0).is_equal(driver.final_checkpoint())
    assert list(output.glob("gen-*/*.partial")) == []
    assert (
        stored_model.find(str(output / report.path)).of
        == stored_model.load(str(driver.final_checkpoint())).of
    )
    assert twin(0.0).is_equal(resumed(drive, driver, report.path, layout, [0, 1], None))


@pytest.mark.parametrize("layout", ["tp2dp2", "mirrored"])
@pytest.mark.thorough
def test_members_that_leave_save_in_parts(drive: Drive, twin: Twins, layout: str) -> None:
    driver, axes = started(drive, layout)
    driver.form(RANKS, axes=axes)
    driver.strike(0, iteration=4, event="forward")
    leave_saving(driver, RANKS, (0, 1, 2, 3), "boundary")
    held = driver.quiesced(RANKS)
    (saved,) = driver.told(r.CheckpointSaved)
    assert {each.step_version for each in held.values()} == {saved.step_version}
    assert twin(0.0).is_equal(resumed(drive, driver, saved.path, layout, RANKS, axes))


@pytest.mark.parametrize(
    ("layout", "lost", "saving"), [("tp2dp2", 0, (1, 2, 3)), ("mirrored", 2, (0, 1, 3))]
)
def test_the_rest_saves_after_a_fault(
    drive: Drive, twin: Twins, layout: str, lost: int, saving: tuple[int, ...]
) -> None:
    """Together they have the whole state. The first of them completes the checkpoint."""
    driver, axes = started(drive, layout)
    driver.form(RANKS, axes=axes)
    waits = [driver.hold(rank, "reduce", 4) for rank in RANKS]
    for rank in RANKS:
        driver.held(rank, 4)
    driver.kill(lost)
    for path in waits:
        path.unlink()
    driver.quiesce(list(saving), "now")
    leave_saving(driver, list(saving), saving, "now")
    saved = driver.wait(r.CheckpointSaved, saving[0])
    assert saved.step_version == 4
    assert twin(0.0).is_equal(resumed(drive, driver, saved.path, layout, RANKS, axes))


@pytest.mark.parametrize(
    ("event", "lost"),
    [
        ("save_mid", 3),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("saving", 0), ("saving", 3), ("save_mid", 0))
        ),
    ],
)
def test_a_fault_in_the_middle_of_a_save_leaves_the_one_before_in_force(
    drive: Drive, twin: Twins, event: str, lost: int
) -> None:
    driver, axes = started(drive, "tp2dp2", checkpoint_every=2)
    rest = [rank for rank in RANKS if rank != lost]
    driver.hold(lost, event, 4)
    waits = [driver.hold(rank, "reduce", 5) for rank in rest]
    driver.form(RANKS, axes=axes)
    driver.held(lost, 4)
    for rank in rest:
        driver.held(rank, 5)
    driver.kill(lost)
    for path in waits:
        path.unlink()
    assert [one.step_version for one in driver.told(r.CheckpointSaved)] == [2]
    driver.quiesce(rest, "now")
    driver.start(lost, attempt=2)
    driver.form([*rest, lost], axes=axes)
    driver.finish(RANKS)
    saved = [(one.generation, one.step_version) for one in driver.told(r.CheckpointSaved)]
    assert (1, 4) not in saved
    assert saved[-1] == (2, ITERATIONS)
    assert (2, 6) in saved, "the next one is not skipped"
    assert list(Path(driver.spec.train.output).glob("gen-*/*.partial")) == []
    assert twin(0.0).is_equal(driver.final_checkpoint(2))


def test_a_disk_that_fills_on_one_member_is_one_warning(drive: Drive, twin: Twins) -> None:
    driver, axes = started(drive, "tp2dp2", checkpoint_every=4)
    pid = driver.processes[2].popen.pid
    held = driver.hold(2, "saving", 8)
    driver.form(RANKS, axes=axes)
    driver.held(2, 8)
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))
    waits = driver.hold(1, "forward", 11, micro_batch=1)
    held.unlink()
    driver.says(2, "checkpoint not saved; training continues")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    waits.unlink()
    driver.finish(RANKS)
    assert 8 not in [one.step_version for one in driver.told(r.CheckpointSaved)]
    warnings = [driver.started[rank].log.read_text().count("not saved") for rank in RANKS]
    assert warnings == [1, 0, 1, 0], "the first member tells of the checkpoint, rank 2 of its share"
    assert {one.rank for one in driver.told(r.CheckpointFailed)} == {0, 2}
    assert twin(0.0).is_equal(driver.final_checkpoint())


@pytest.mark.thorough
def test_the_final_state_is_held_in_parts(drive: Drive, twin: Twins) -> None:
    """One of four members cannot write its share at first; all write theirs again."""
    driver, axes = started(drive, "tp2dp2")
    pid = driver.processes[2].popen.pid
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (150_000, hard))
    driver.form(RANKS, axes=axes)
    driver.until(lambda: len([one for one in driver.told(r.CheckpointFailed) if one.final]) > 2)
    assert {one.rank for one in driver.told(r.CheckpointFailed)} == {0, 2}
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    driver.finish(RANKS)
    assert list(Path(driver.spec.train.output).glob("gen-*/*.partial")) == []
    assert twin(0.0).is_equal(driver.final_checkpoint())
