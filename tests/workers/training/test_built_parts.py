"""A process builds only its own part of the model, once, with the weights of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import world_work
import worlds
from msgspec.structs import replace
from rank_driver import Drive, Driver, Twins
from unicron.events.spec.job import Batch, DynamicLossScale, Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel

WIDE = Train(
    model=Model(num_layers=4, hidden=160, num_heads=4, sequence=16),
    batch=Batch(global_=10, micro=2),
    iterations=20,
    output="unused",
    optimizer=Optimizer(lr=1e-3),
)
"""Its matrices have several blocks, and boundaries of parts inside blocks."""
LAYOUTS = [Axes(), Axes(tp=2), Axes(tp=4), Axes(pp=4), Axes(pp=2, chunks=2), Axes(tp=2, pp=2, dp=2)]
BF16 = replace(WIDE, precision="bf16")
FP16 = replace(WIDE, precision="fp16", dynamic_loss_scale=DynamicLossScale(initial=2.0**13))
UNTIED = replace(WIDE, model=replace(WIDE.model, tie_embeddings=False))
ZERO = replace(WIDE, parallel=Parallel(optimizer="mirrored"))


@pytest.mark.parametrize(
    "train", [WIDE, UNTIED, BF16, FP16, ZERO], ids=["fp32", "untied", "bf16", "fp16", "mirrored"]
)
def test_every_part_begins_like_the_reference_run(train: Train) -> None:
    layouts = LAYOUTS if train is not ZERO else [Axes(dp=3), Axes(tp=2, dp=2)]
    assert worlds.run(1, world_work.differing_parts, train, layouts) == [[]]


# --- real ranks ---------------------------------------------------------------------------------
NUM_ITERATIONS = 6
MODEL = {"num_layers": 4, "hidden": 64, "num_heads": 4, "sequence": 64, "dropout": 0.0}
ANY = {"tensor": [1, 2], "pipeline": [1, 2]}


def num_built(driver: Driver, rank: int) -> int:
    """How often the processes of this rank have built a part of the model."""
    return sum(line["event"] == "build" for line in driver.trace(rank))


def finish(driver: Any, ranks: list[int], twin: Any) -> None:
    driver.finish(ranks)
    gap = twin.difference(driver.final_checkpoint())
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.param_rel < 1e-5


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(Axes(tp=2, dp=2), marks=pytest.mark.thorough),
        pytest.param(Axes(pp=2, dp=2), marks=pytest.mark.thorough),
        Axes(dp=4),
    ],
    ids=["tp2dp2", "pp2dp2", "dp4"],
)
def test_each_process_of_a_start_and_a_restart_builds_once(
    drive: Drive, twin: Twins, axes: Axes
) -> None:
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    ranks = [0, 1, 2, 3]
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    hold = driver.hold(3, "forward", 3)
    driver.held(3, 3)
    driver.kill(3)
    driver.left_by_themselves([0, 1, 2])
    driver.quiesced([0, 1, 2])
    hold.unlink()
    driver.start(3, attempt=2, axes=axes)
    reports = driver.form(ranks, axes=axes)
    assert reports[3].received_bytes
    finish(driver, ranks, twin(iterations=NUM_ITERATIONS, model=MODEL))
    assert [num_built(driver, rank) for rank in ranks] == [1, 1, 1, 2]


@pytest.mark.thorough
def test_each_process_of_a_growth_builds_once(drive: Drive, twin: Twins) -> None:
    """The shape of a replica stays. The newcomers build their parts before they are members."""
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    old, new = Axes(tp=2), Axes(tp=2, dp=2)
    driver.start(0, 1, axes=old)
    driver.form([0, 1], axes=old)
    hold = driver.hold(0, "forward", 2)
    driver.held(0, 2)
    driver.start(2, 3, axes=new)
    driver.quiesce([0, 1], "boundary", hold)
    driver.form([0, 1, 2, 3], axes=new)
    finish(driver, [0, 1, 2, 3], twin(iterations=NUM_ITERATIONS, model=MODEL))
    assert [num_built(driver, rank) for rank in range(4)] == [1, 1, 1, 1]


def test_a_wrong_expectation_costs_a_second_build(drive: Drive, twin: Twins) -> None:
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    driver.start(0, 1, axes=Axes(pp=2))
    driver.form([0, 1], axes=Axes(tp=2))
    finish(driver, [0, 1], twin(iterations=NUM_ITERATIONS, model=MODEL))
    assert [num_built(driver, rank) for rank in range(2)] == [2, 2]


@pytest.mark.thorough
def test_restarted_ranks_without_any_state_begin_from_the_seed(drive: Drive, twin: Twins) -> None:
    """A restarted process draws no weights, since it usually receives its state. Here it must."""
    driver = drive(iterations=NUM_ITERATIONS, model=MODEL, parallel=ANY)
    driver.start(0, 1, attempt=2, axes=Axes(tp=2))
    reports = driver.form([0, 1], axes=Axes(tp=2))
    assert {report.origin for report in reports.values()} == {"seed"}
    finish(driver, [0, 1], twin(iterations=NUM_ITERATIONS, model=MODEL))
