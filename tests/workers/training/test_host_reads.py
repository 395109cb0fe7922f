"""An undisturbed iteration makes the host wait for the device as often as Megatron's own loop."""

from __future__ import annotations

import json
import pprint
from pathlib import Path
from typing import Any

import host_reads
import pytest
import world_work
import worlds
from loop_driver import drive_loop, flagged_example
from nursery import Nursery
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions

NUM_ITERATIONS, NUM_MICRO_BATCHES, USUAL = 4, 8, 2
COUNT = """
import os, sys
sys.path.insert(0, {drivers!r})
import host_reads
host_reads.count_iterations({folder!r}, int(os.environ["UNICRON_RANK"]))
"""
CASES: dict[str, tuple[Axes, list[str], dict[str, Any]]] = {
    "data-parallel": (Axes(dp=2), [], {}),
    "overlapped": (Axes(dp=2), ["bf16", "overlapped gather"], {"optimizer": "sharded"}),
    "tensor-parallel": (Axes(tp=2, dp=2), ["sequence parallel"], {"tensor": [2]}),
    "pipeline": (Axes(pp=2), [], {"pipeline": [2]}),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.thorough] * (case in ("data-parallel", "pipeline")))
        for case in CASES
    ],
)
def test_a_healed_iteration_reads_as_often_as_stock(
    tmp_path: Path, nursery: Nursery, case: str
) -> None:
    axes, flags, parallel = CASES[case]
    script = flagged_example(tmp_path, flags)
    words = ["--sharded"] * (parallel.get("optimizer") == "sharded")
    ranks = list(range(num_positions(axes)))
    stock = worlds.run(
        len(ranks),
        world_work.stock_reads,
        str(script),
        ["--iterations", str(NUM_ITERATIONS), "--micro-batches", str(NUM_MICRO_BATCHES), *words],
        axes,
        NUM_ITERATIONS,
    )
    driver = drive_loop(
        tmp_path,
        nursery,
        words,
        iterations=NUM_ITERATIONS,
        micro_batches=NUM_MICRO_BATCHES,
        script=script,
        **parallel,
    )
    driver.patch = (
        COUNT.format(drivers=str(Path(host_reads.__file__).parent), folder=str(tmp_path))
        + driver.patch
    )
    try:
        driver.start(*ranks)
        driver.form(ranks, axes=axes)
        driver.finish(ranks)
    finally:
        driver.close()
    for rank in ranks:
        healed = json.loads((tmp_path / str(rank)).read_text())
        assert len(healed) == NUM_ITERATIONS
        ours, theirs = healed[USUAL], stock[rank][USUAL]
        assert theirs, "Megatron reads the norm of the gradients"
        assert sum(ours.values()) <= sum(theirs.values()), pprint.pformat((ours, theirs))
