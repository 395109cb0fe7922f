"""Every precision and loss: a rank dies, a successor joins, and the result equals the twin's.

Three survivors share eight micro-batches unevenly. Embeddings are untied, and dropout is on.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rank_driver import TASK, Drive, Twins
from reference import read
from unicron.events.records.orders import Quiesce
from unicron.events.records.reports import TaskProgressed

STRUCK = 4
"""The iteration in which rank 1 dies. It has micro-batches 1 and 5."""
GROWN = 6
"""The iteration after which the newcomer joins."""
ALL = [0, 1, 2, 3]
LEFT = [0, 2, 3]
SMALL: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden": 32,
        "num_heads": 2,
        "sequence": 32,
        "dropout": 0.1,
        "tie_embeddings": False,
    },
    "batch": {"global": 8, "micro": 1},
    "iterations": 10,
}
BF16 = {"precision": "bf16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16-scaled": BF16 | {"loss_scale": 1024.0},
    "bf16-overlapped": BF16 | {"overlap": True, "bucket_params": 8_000},
    "fp16": {
        "precision": "fp16",
        "dynamic_loss_scale": {"initial": 2.0**11, "window": 2, "hysteresis": 2},
    },
    # The loss scale is too large until after iteration STRUCK, so that step is skipped.
    "fp16-skipped": {
        "precision": "fp16",
        "dynamic_loss_scale": {"initial": 2.0**17, "hysteresis": 1},
    },
}
CONVENTIONS = ("per_token", "per_micro_batch")


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of documents of 0 to 400 bytes, and of long runs of end-of-document bytes.

    Some micro-batches therefore have all their tokens, some half, and some none.
    """
    draw = random.Random(7)
    text = b""
    for length in (3, 9, 400, 0, 30) * 40:
        some = bytes(draw.choices(b"abcdefgh ", k=length))
        text += some + bytes(1 if length else 100)
    file = tmp_path_factory.mktemp("documents") / "text"
    file.write_bytes(text)
    return str(file)


def forwards(driver: Any, iteration: int, *, but: int = -1) -> list[int]:
    """The micro-batches that all ranks except `but` ran in an iteration, with repetitions."""
    return sorted(
        line["micro_batch"]
        for rank in range(4)
        if rank != but
        for line in driver.trace(rank)
        if line["event"] == "forward" and line["iteration"] == iteration
    )


def events(driver: Any, rank: int, iteration: int) -> list[str]:
    return [line["event"] for line in driver.trace(rank) if line["iteration"] == iteration]


def strike_and_replace(driver: Any) -> None:
    """Rank 1 dies with half of its share done. Its successor joins later, with a peer's state."""
    driver.start(*ALL)
    driver.hold(1, "forward", STRUCK, micro_batch=5)
    driver.form(ALL)
    driver.held(1, STRUCK)
    for rank in LEFT:
        driver.strike(rank, iteration=STRUCK, event="reduce")
    driver.kill(1)
    held = driver.quiesce(LEFT, "now")
    grown = driver.hold(0, "forward", GROWN)
    reports = driver.form(LEFT)
    assert (
        {rank: reports[rank].kept_micro_batches for rank in LEFT}
        == {rank: held[rank].micro_batches for rank in LEFT}
        == {0: (0, 4), 2: (2, 6), 3: (3, 7)}
    )
    assert sorted(len(reports[rank].reassigned_micro_batches) for rank in LEFT) == [0, 1, 1]

    driver.held(0, GROWN)
    driver.start(1, attempt=2)
    driver.order(
        Quiesce(
            nodes=("n1",),
            task=TASK,
            generation=driver.generation,
            mode="boundary",
            ranks=tuple(LEFT),
        ),
        LEFT,
    )
    grown.unlink()
    driver.quiesced(LEFT)
    reports = driver.form(ALL)
    assert reports[1].received_bytes == driver.processes[1].ready.state_bytes
    driver.finish(ALL)
    for iteration in range(SMALL["iterations"]):
        assert forwards(driver, iteration, but=1 if iteration == STRUCK else -1) == list(range(8))
    assert sorted(driver.losses()) == list(range(SMALL["iterations"])), "no iteration is lost"


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in ("bf16", "bf16-scaled", "fp16")))
        for name in VARIANTS
    ],
)
def test_a_rank_is_replaced_in_every_precision(drive: Drive, twin: Twins, variant: str) -> None:
    changes = SMALL | VARIANTS[variant]
    driver = drive(**changes)
    strike_and_replace(driver)
    # Neither a constant power-of-two loss scale nor an overlapped reduction changes the result.
    alike = SMALL | BF16 if variant.startswith("bf16") else changes
    assert twin(**alike).is_equal(driver.final_checkpoint())

    end = read(driver.final_checkpoint())
    num_skipped = (end["numbers.consumed_samples"] - end["numbers.scheduled_samples"]) / 8
    assert (num_skipped > 0) == (driver.spec.train.precision == "fp16")
    num_logged = driver.started[0].log.read_text().count("step skipped")
    assert num_logged == num_skipped, "each skipped step is logged"
    assert driver.told(TaskProgressed)[-1].skipped == num_skipped, "the report counts skipped steps"
    stepped = {rank: "step" in events(driver, rank, STRUCK) for rank in LEFT}
    assert set(stepped.values()) == {variant != "fp16-skipped"}, "ranks decided differently"
    scaled = {rank: "scaler" in events(driver, rank, STRUCK) for rank in LEFT}
    assert set(scaled.values()) == {variant not in ("bf16", "bf16-overlapped")}


@pytest.mark.parametrize("loss", CONVENTIONS)
def test_a_rank_is_replaced_with_either_loss(
    drive: Drive, twin: Twins, documents: str, loss: str
) -> None:
    changes = SMALL | {"loss": loss, "data": [documents]}
    driver = drive(**changes)
    strike_and_replace(driver)
    assert twin(**changes).is_equal(driver.final_checkpoint())
    other = CONVENTIONS[1 - CONVENTIONS.index(loss)]
    differs = not twin(**(changes | {"loss": other})).is_equal(driver.final_checkpoint())
    assert differs, "the loss makes a difference"


@pytest.mark.thorough
def test_a_bf16_task_resumes_exactly_from_a_checkpoint(drive: Drive) -> None:
    changes = SMALL | BF16
    driver = drive(**changes, checkpoint_every=4)
    driver.start(0, 1)
    driver.form([0, 1])
    driver.finish([0, 1])
    again = drive(**changes, output=driver.spec.train.output)
    again.start(0, 1)
    again.generation = 1
    reports = again.form([0, 1], checkpoint="gen-1/iter-4")
    assert {report.step_version for report in reports.values()} == {4}
    again.finish([0, 1])
    assert forwards(again, 3) == [], "iteration 3 was repeated"
    one, other = read(driver.final_checkpoint()), read(again.final_checkpoint())
    assert one.keys() == other.keys()
    differing = [
        name
        for name, value in one.items()
        if not (
            value.equal(other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        )
    ]
    assert differing == ["numbers.step_s"]
