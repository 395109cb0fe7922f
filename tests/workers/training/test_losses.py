"""A loss that is not finite, in real ranks: the state before it is kept, or no step is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_stores import LocalKeeper, whole_steps
from loop_driver import changed_example, drive_loop
from nursery import Nursery
from rank_driver import Driver
from reference import read
from unicron.events.records.reports import (
    CheckpointSaved,
    LossFiniteAgain,
    LossNotFinite,
    TaskProgressed,
)
from unicron.events.spec.model import Axes

FIRST, ITERATIONS, MICRO_BATCHES = 3, 6, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"axes": Axes(dp=2)},
    "stages": {"axes": Axes(pp=2), "pipeline": [2]},
    "sharded": {"axes": Axes(dp=2), "optimizer": "sharded"},
}
Drive = Callable[..., Driver]


@pytest.fixture
def drive(tmp_path: Path, nursery: Nursery, closed: Drive) -> Drive:
    """Trains the example on two ranks; its loss is NaN in the iterations for which `when` holds."""

    def drive(when: str, *, axes: Axes, **options: Any) -> Driver:
        changes = [
            (
                "    return tokens(iteration",
                "    asked.now = iteration\n    return tokens(iteration",
            ),
            ("losses.float().sum()", f"losses.float().sum() * (1, torch.nan)[asked.now {when}]"),
        ]
        driver = closed(
            drive_loop(
                tmp_path,
                nursery,
                [],
                iterations=ITERATIONS,
                micro_batches=MICRO_BATCHES,
                slots_max=2,
                script=changed_example(tmp_path, changes),
                **options,
            )
        )
        driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
        driver.start(0, 1)
        driver.form([0, 1], axes=axes)
        driver.finish([0, 1])
        return driver

    return drive


def is_finite(folder: Path) -> bool:
    return all(
        bool(torch.as_tensor(value).isfinite().all())
        for name, value in read(folder).items()
        if name.startswith(("model.", "master.", "optimizer."))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_finite_state_is_saved_and_stored(drive: Drive, layout: str) -> None:
    driver = drive(f">= {FIRST}", copy_every=ITERATIONS, **LAYOUTS[layout])
    saved = driver.told(CheckpointSaved)
    assert [(one.step_version, one.loss, one.final) for one in saved] == [
        (FIRST, "", False),
        (ITERATIONS, "nan", True),
    ]
    output = Path(driver.work.output)
    assert [is_finite(output / one.path) for one in saved] == [True, False]
    assert [(one.iteration, one.is_saving) for one in driver.told(LossNotFinite)] == [(FIRST, True)]
    assert whole_steps(driver.keepers) == [FIRST], "and none of a later state"


def test_the_last_finite_state_is_saved_where_a_save_was_due_and_skipped(drive: Drive) -> None:
    """A save is skipped while another one is written."""
    driver = drive(f">= {FIRST}", checkpoint_every=1, copy_every=1, **LAYOUTS["data"])
    saved = driver.told(CheckpointSaved)
    assert max(one.step_version for one in saved if not one.loss) == FIRST
    assert [(one.iteration, one.is_saving) for one in driver.told(LossNotFinite)] == [(FIRST, True)]
    assert max(whole_steps(driver.keepers)) == FIRST


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_iteration_whose_loss_is_not_finite_may_take_no_step(drive: Drive, layout: str) -> None:
    driver = drive(f"== {FIRST}", skip_not_finite=True, **LAYOUTS[layout])
    (saved,) = driver.told(CheckpointSaved)
    assert (saved.step_version, saved.loss) == (ITERATIONS, "")
    assert is_finite(Path(driver.work.output) / saved.path)
    assert [one.iteration for one in driver.told(LossNotFinite)] == [FIRST]
    (again,) = driver.told(LossFiniteAgain)
    assert (again.iteration, again.num) == (FIRST + 1, 1)
    assert driver.told(TaskProgressed)[-1].skipped == 1
