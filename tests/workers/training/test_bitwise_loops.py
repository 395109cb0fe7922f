"""`reproducible: bitwise` of scripts: the same bits in any layout, through faults, or a reason."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stock_loop
from checkpoint_stores import LocalKeeper
from loop_driver import drive_loop, flagged_example
from matrix.scenes import newest
from nursery import Nursery
from rank_driver import Driver
from reference import difference, differing, read
from unicron.events.spec.model import Axes

ITERATIONS, MICRO_BATCHES, STRUCK = 5, 8, 2
Loops = Callable[..., Driver]


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Loops) -> Loops:
    """Factory of drivers: `loops("overlapped gather", optimizer="sharded")`."""

    def make(*flags: str, **options: Any) -> Driver:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return closed(
            drive_loop(
                folder,
                nursery,
                [],
                iterations=ITERATIONS,
                micro_batches=MICRO_BATCHES,
                slots_max=8,
                script=flagged_example(folder, flags),
                **{"reproducible": "bitwise"} | options,
            )
        )

    return make


def train(driver: Driver, axes: Axes) -> dict[str, Any]:
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    return finish(driver, ranks)


def train_struck(driver: Driver, axes: Axes, event: str, *, loses: bool) -> dict[str, Any]:
    """The last rank dies at this event; a new process takes its place. `loses`: its state with it,
    so that the task goes back to a copy."""
    *others, victim = ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    driver.start(*ranks, axes=axes)
    hold = driver.hold(victim, event, STRUCK)
    driver.form(ranks, axes=axes)
    driver.held(victim, STRUCK)
    driver.kill(victim)
    hold.unlink()
    driver.quiesce(others, "now")
    copies = newest(driver) if loses else ()
    driver.start(victim, attempt=2)
    reports = driver.form(ranks, axes=axes, copies=copies)
    if not loses:
        (settled,) = {each.step_version for each in reports.values()}
        may_have_stepped = event == "step_mid"  # if a survivor was past the barrier
        assert settled in (STRUCK, STRUCK + may_have_stepped)
    return finish(driver, ranks)


def finish(driver: Driver, ranks: list[int]) -> dict[str, Any]:
    driver.finish(ranks)
    assert "not bit for bit" not in "".join(one.log.read_text() for one in driver.started)
    return read(driver.final_checkpoint())


SHARDED: dict[str, Any] = {"optimizer": "sharded", "copy_every": 1}
MIRRORED: dict[str, Any] = {"optimizer": "mirrored"}
CHUNKS: dict[str, Any] = {"pipeline": [2], "chunks": 2}
USUAL = ("bf16", "overlapped gather", "sequence parallel", "recompute")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], Axes, Axes, str]] = {
    "whole": (("dropout", "tied embeddings"), {}, Axes(), Axes(dp=3), "backward"),
    "sharded": (("overlapped gather",), SHARDED, Axes(), Axes(dp=3), "bucket"),
    "to a pipeline": (
        ("overlapped gather",),
        SHARDED | {"pipeline": [1, 2]},
        Axes(dp=3),
        Axes(pp=2, dp=2),
        "gate",
    ),
    "usual": (USUAL, SHARDED | {"tensor": [2]}, Axes(tp=2), Axes(tp=2, dp=2), "bucket_done"),
    "fp16": (("fp16", "overlapped gather"), SHARDED, Axes(), Axes(dp=3), "gate"),
    "mirrored": (("overlapped gather",), MIRRORED, Axes(), Axes(dp=3), "mirror"),
    "mirrored, stepping": (("overlapped gather",), MIRRORED, Axes(), Axes(dp=3), "step_mid"),
    "mirrored, fp16": (("fp16", "overlapped gather"), MIRRORED, Axes(), Axes(dp=3), "gate"),
    "usual, mirrored": (USUAL, MIRRORED | {"tensor": [2]}, Axes(tp=2), Axes(tp=2, dp=2), "gate"),
    "usual, stepping": (
        USUAL,
        MIRRORED | {"tensor": [2]},
        Axes(tp=2),
        Axes(tp=2, dp=2),
        "step_mid",
    ),
    "interleaved": (
        ("overlapped reduction",),
        CHUNKS,
        Axes(pp=2, chunks=2),
        Axes(pp=2, chunks=2, dp=2),
        "stage",
    ),
}
"""Flags, keys of the job file, an undisturbed layout, and one in which a rank dies at an event."""
QUICK = ("sharded",)
STOCK_RATIO = 2.0**-16
"""What rounding explains after five iterations, of losses, parameters and moments: 8 x 8 roundings
of a sum in fp32 (test_bitwise_witness.py), fourfold by the step of Adam."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in CASES],
)
def test_a_loop_ends_with_the_same_bits(loops: Loops, case: str) -> None:
    flags, options, calm, axes, event = CASES[case]
    undisturbed = train(loops(*flags, **options), calm)
    loses = options.get("optimizer") == "sharded"
    struck = train_struck(loops(*flags, **options), axes, event, loses=loses)
    assert differing(struck, undisturbed) == []


@pytest.mark.parametrize("case", ["plain", "pipeline"])
def test_a_loop_trains_as_megatrons_own(
    loops: Loops, nursery: Nursery, tmp_path: Path, case: str
) -> None:
    """Unclipped: Megatron's own schedule, reduction, norm and step find the same moments."""
    axes, depth = (Axes(), 1) if case == "plain" else (Axes(pp=2), 2)
    exact = train(loops("no clipping", pipeline=[depth]), axes)
    words = ["--iterations", str(ITERATIONS), "--micro-batches", str(MICRO_BATCHES)]
    script = flagged_example(tmp_path, ["no clipping"])
    stock = stock_loop.run(nursery, script, words, axes)
    gap = difference(exact, stock)
    print(gap)
    assert gap.num_losses == ITERATIONS
    assert max(gap.loss_rel, gap.param_rel, gap.optimizer_rel) < STOCK_RATIO
