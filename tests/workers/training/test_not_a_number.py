"""A micro-batch that Megatron rejects as not a number: no failed collective, one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_driver import FLAGS, NOT_A_NUMBER, changed_example, drive_loop
from nursery import Nursery
from unicron.events.records.reports import RankErrored
from unicron.events.records.statuses import WRONG_INPUT
from unicron.events.spec.model import Axes

OVERLAPPED = FLAGS["overlapped reduction"]


@pytest.mark.parametrize(
    ("axes", "check", "more", "rank"),
    [
        (Axes(dp=2), "loss", [], 1),
        (Axes(dp=2), "gradient", [], 1),
        (Axes(dp=2), "gradient", OVERLAPPED, 1),
        (Axes(tp=2), "loss", [], 1),
        (Axes(pp=2), "loss", [], 0),
    ],
    ids=str,
)
def test_the_rank_says_which_micro_batch_it_is(
    tmp_path: Path, nursery: Nursery, axes: Axes, check: str, more: list[tuple[str, str]], rank: int
) -> None:
    script = changed_example(tmp_path, [*more, *NOT_A_NUMBER[check]])
    parallel: dict[str, Any] = {"tensor": [axes.tp], "pipeline": [axes.pp]}
    driver = drive_loop(
        tmp_path, nursery, [], iterations=4, micro_batches=3, script=script, slots_max=2, **parallel
    )
    try:
        driver.start(0, 1)
        driver.form([0, 1], axes=axes)
        errored = driver.wait(RankErrored, rank)
    finally:
        driver.close()
    assert errored.status == WRONG_INPUT, errored
    assert errored.text.startswith(f"rank {rank}: found NaN in local "), errored.text
    assert ": nan, in micro-batch 1 of iteration 2 (" in errored.text
