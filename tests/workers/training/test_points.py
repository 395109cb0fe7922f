"""A fault at every point of a task's life: the survivors finish the iteration and lose nothing.

Each point runs once, with the faults in rotation; `make test` runs two of five, in which each fault
is. `make fault-matrix` runs all cells.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matrix import run
from matrix.cells import BASE, FAULTS, Cell, cells, eight, exact_once, loops_once, once
from matrix.judge import complaints
from matrix.scenes import Play
from matrix.trial import Trials
from rank_driver import TASK, Driver, small_spec

COVERED = ("tp2dp2", "pp2dp2, 2 chunks", "tp2dp2 mirrored", "tp2dp4", "pp4dp2")
"""Layouts that only `make test-thorough` strikes. Their points are struck in other variants, and
test_replicas.py, test_forward_counts.py and test_sharded.py lose ranks of such layouts."""
USUAL_LOOPS = ("loop: clipping",)
"""`make test` strikes this one. test_usual_flags.py and test_own_layouts.py strike most others."""
EXACT = "tp2dp2, bitwise"
"""`make test` strikes this one. test_bitwise.py loses ranks in the other layouts."""


@pytest.fixture(scope="module")
def trials(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("matrix"), nursery)


@pytest.mark.parametrize(
    "cell",
    [
        *(
            pytest.param(
                cell,
                id=cell.name,
                marks=[pytest.mark.thorough]
                * (
                    (cell.variant.name in COVERED and cell.fault == FAULTS[0])
                    or (cell.variant is BASE and number % 5 not in {0, 3})
                ),
            )
            for number, cell in enumerate(once())
        ),
        *(
            pytest.param(
                cell,
                id=cell.name,
                marks=[pytest.mark.thorough] * (cell.variant.name not in USUAL_LOOPS),
            )
            for cell in loops_once()
        ),
        *(
            pytest.param(
                cell, id=cell.name, marks=[pytest.mark.thorough] * (cell.variant.name != EXACT)
            )
            for cell in exact_once()
        ),
        *(pytest.param(cell, id=cell.name, marks=pytest.mark.thorough) for cell in eight()),
    ],
)
def test_a_fault_at_this_point_changes_nothing(trials: Trials, cell: Cell) -> None:
    verdict = trials.run(cell)
    assert verdict.outcome == "equal", verdict.why


def test_the_judge_detects_a_manipulated_run(nursery: Any, tmp_path: Path, trials: Trials) -> None:
    cell = next(cell for cell in once() if cell.point.event == "backward_mid")
    driver = Driver(small_spec(tmp_path / "out", **cell.train()), tmp_path, nursery)
    try:
        play = Play(driver, cell)
        play.run()
        assert not list(complaints(play, trials.twin(cell)))
        other = next(cell for cell in cells() if cell.variant.name == "dropout")
        assert any("Difference" in complaint for complaint in complaints(play, trials.twin(other)))
        (report, *_), twin = play.settled.values(), trials.twin(cell)
        play.settled[report.rank] = msgspec.structs.replace(
            report, remaining_micro_batches=report.remaining_micro_batches[1:]
        )
        assert any("their shares are" in complaint for complaint in complaints(play, twin))
        play.settled[report.rank] = report
        trace = driver.trace_dir / f"{TASK}-{play.survivors[0]}.jsonl"
        forward = next(
            line for line in driver.trace(play.survivors[0]) if line["event"] == "forward"
        )
        with trace.open("a") as file:
            file.write(json.dumps(forward) + "\n")
        assert len(list(complaints(play, twin))) == 2, "one for the second pass, one for the count"
    finally:
        driver.close()


def test_the_judge_knows_another_loop_from_the_right_one(trials: Trials) -> None:
    """The reference run of a loop shows a loop without its flag as not equal."""
    cell = next(cell for cell in loops_once() if cell.variant.flags == ("clipping",))
    other = next(cell for cell in loops_once() if cell.variant.flags == ("per micro-batch",))
    twin = trials.twin(cell)
    assert twin.allows(twin.difference(twin.path))
    assert not twin.allows(twin.difference(trials.twin(other).path))


def test_no_cell_is_left_out_silently() -> None:
    there = list(cells())
    named = {(cell.point.name, cell.variant.name) for cell in there}
    points, variants = ({name[at] for name in named} for at in (0, 1))
    assert len(named) == len(points) * len(variants)
    assert len({cell.name for cell in there}) == len(there)
    for point in points:
        runs = [cell for cell in there if cell.point.name == point]
        assert all(cell.absent for cell in runs) or len({cell.fault for cell in runs}) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--points", "inside forward,joinx"],
            "POINTS: none begins with 'joinx'; there are start-up,",
        ),
        (
            ["--faults", "SIGSTOPP"],
            "FAULTS: none begins with 'SIGSTOPP'; there are SIGKILL, SIGSTOP,",
        ),
        (["--faults", "two at once", "--variants", "bf16"], "no point of these meets such a fault"),
    ],
)
def test_unknown_points_and_faults_are_errors(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_name_may_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--points", "clip, NORM", "--faults", "sigk"])
    assert {cell.point.name for cell in run._asked()} == {"clip", "norm"}
