"""A bitwise run against a rounded one and Megatron's own loop: gradients, norm, both moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import step_trace
import stock_steps
from nursery import Nursery
from plain_arithmetic import FP32_ERROR_RATIO, norm
from rank_driver import Drive, small_spec
from step_trace import Step
from unicron.events.spec.model import Axes

MICRO_BATCHES, ITERATIONS = 12, 3
RATE = 0.05
EPS = 1e9
SMALL: dict[str, Any] = {
    "iterations": ITERATIONS,
    "model": {"num_layers": 2, "hidden": 32, "num_heads": 4, "sequence": 32},
    # With an eps far above every gradient Adam's step is its first moment times lr / eps: a wrong
    # scale of the gradient stays in it, and a rounding error does not grow.
    "optimizer": {
        "lr": RATE * EPS,
        "min_lr": RATE * EPS,
        "eps": EPS,
        "decay": "constant",
        "clip_grad": 0.0,
        "weight_decay": 0.0,
    },
}
PIPELINE = {"parallel": {"pipeline": [1, 2]}}
OVERLAPPED = {"overlap": True, "bucket_params": 10_000}
FP16 = {"precision": "fp16", "dynamic_loss_scale": {"initial": 2.0**4, "hysteresis": 1}}
CASES: dict[str, tuple[dict[str, Any], Axes]] = {
    "data parallel": ({}, Axes(dp=3)),
    "tied in a pipeline": (PIPELINE, Axes(pp=2)),
    "tensor": ({"parallel": {"tensor": [2]}}, Axes(tp=2)),
    "sharded": ({"parallel": {"optimizer": "sharded"}}, Axes(dp=2)),
    "overlapped": (OVERLAPPED, Axes(dp=2)),
    "bf16": ({"precision": "bf16"}, Axes(dp=2)),
    "fp16": (FP16, Axes(dp=2)),
    "32 bits": ({"reproducible_bits": 32} | PIPELINE, Axes(pp=2)),
    "per micro-batch": ({"loss": "per_micro_batch"}, Axes(dp=2)),
}
SUM_RATIO = MICRO_BATCHES**2 * FP32_ERROR_RATIO
"""The relative error of a sum in fp32: each of n additions rounds a number that is at most n times
as large as the result. (Were it larger, micro-batches would cancel all but 1/n of each other.)"""
PASS_RATIO = 16 * 32 * FP32_ERROR_RATIO
"""What another order within the passes changes (tensor parallelism): one rounding for each of 32
elements of a product, in about eight products forward and eight backward."""
SUM_OF_32_BITS_RATIO = 2.0**-10
"""Of the smallest gradients, which have elements of about 2^-2: 2^-16 is the unit of 32 bits in the
first iteration, and 12 micro-batches are rounded by a half of it each, that is by 2^-12.4 at most;
fourfold, since a few elements have most of a gradient."""
ERROR_RATIO = {"fp32": 0.0, "bf16": 2.0**-9, "fp16": 2.0**-11}
"""One rounding in the model's precision. Stock adds the gradients of the two uses of a tied
embedding in it, and from then on parameters differ, by up to one rounding in each of the 16
products."""
Stock = Callable[[dict[str, Any]], list[Step]]


@pytest.fixture(scope="module")
def stock(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """The steps of Megatron's own loop, for a precision and a loss; each is run once."""
    known: dict[str, list[Step]] = {}

    def run(changes: dict[str, Any]) -> list[Step]:
        wanted = {
            key: changes[key]
            for key in ("precision", "dynamic_loss_scale", "loss")
            if key in changes
        }
        key = str(sorted(wanted.items(), key=str))
        if key not in known:
            folder = tmp_path_factory.mktemp("stock")
            spec = small_spec(folder / "out", **SMALL, **wanted)
            known[key] = stock_steps.run(nursery, spec, folder)
        return known[key]

    return run


def train(drive: Drive, axes: Axes, **changes: Any) -> list[Step]:
    driver = drive(**SMALL | changes)
    step_trace.install(driver.trace_dir)
    ranks = list(range(axes.dp * axes.pp * axes.tp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    driver.finish(ranks)
    return step_trace.steps(driver.trace_dir)


def gaps(mine: Step, theirs: Step) -> dict[str, float]:
    """By kind and parameter: the relative difference of the tensors, as vectors."""
    found = {"norm": abs(mine.norm - theirs.norm) / theirs.norm}
    for kind, tensors in theirs.of.items():
        assert mine.of[kind].keys() == tensors.keys()
        for name, wanted in tensors.items():
            gap = (mine.of[kind][name].double() - wanted.double()).norm().item()
            found[f"{kind} {name}"] = gap / wanted.double().norm().item()
    return found


def tolerance(changes: dict[str, Any], axes: Axes, at: int, what: str) -> float:
    """The largest relative difference that rounding explains, of this tensor in step `at`. A square
    has twice that of its root."""
    ratio = SUM_RATIO + PASS_RATIO * (axes.tp > 1)
    if changes.get("reproducible_bits") == 32:
        ratio += SUM_OF_32_BITS_RATIO
    if at or "word_embeddings" in what or what == "norm":
        ratio += 16 * ERROR_RATIO[changes.get("precision", "fp32")]
    return 2 * ratio


@pytest.mark.parametrize("case", CASES)
def test_gradients_norm_and_moments_are_those_of_stock(
    drive: Drive, stock: Stock, case: str
) -> None:
    changes, axes = CASES[case]
    exact = train(drive, axes, **changes, reproducible="bitwise")
    usual = {key: value for key, value in changes.items() if key != "reproducible_bits"}
    for others in (train(drive, axes, **usual), stock(changes)):
        assert len(exact) == len(others) == ITERATIONS
        for at, (mine, theirs) in enumerate(zip(exact, others, strict=True)):
            found = gaps(mine, theirs)
            most = {what: tolerance(changes, axes, at, what) for what in found}
            print(at, sorted(((gap / most[what], what) for what, gap in found.items()))[-3:])
            assert not {what: gap for what, gap in found.items() if gap > most[what]}


@pytest.mark.parametrize("case", ["data parallel", "32 bits"])
def test_the_norm_is_that_of_the_gradients(drive: Drive, case: str) -> None:
    """Also where it clips: then the moments are of gradients of that norm."""
    changes, axes = CASES[case]
    clipped = SMALL["optimizer"] | {"clip_grad": 0.1, "beta1": 0.0}
    for step in train(drive, axes, **changes, reproducible="bitwise", optimizer=clipped):
        exact = norm(value for of in step.of["gradient"].values() for value in of.view(-1).tolist())
        assert step.norm == pytest.approx(exact, rel=4 * FP32_ERROR_RATIO)
        assert step.norm > 0.5
        moment = [value for of in step.of["exp_avg"].values() for value in of.view(-1).tolist()]
        assert norm(moment) == pytest.approx(0.1, rel=2e-6)


def test_steps_are_those_of_sgd(drive: Drive, nursery: Nursery, tmp_path: Path) -> None:
    """Megatron's SGD has no moments that could hide a scale. Its parameters are those of Adam
    without memory and with an eps far above every gradient."""
    memoryless = SMALL["optimizer"] | {"beta1": 0.0, "beta2": 0.0}
    exact = train(drive, Axes(dp=2), optimizer=memoryless, reproducible="bitwise")
    spec = small_spec(tmp_path / "out", **SMALL)
    stock = stock_steps.run(nursery, spec, tmp_path / "stock", sgd_rate=RATE)
    assert len(exact) == len(stock) == ITERATIONS
    first = stock[0].of["value"]
    for at, (mine, theirs) in enumerate(zip(exact, stock, strict=True)):
        for kind in ("gradient", "value"):
            for name, wanted in theirs.of[kind].items():
                gap = (mine.of[kind][name] - wanted).norm().item()
                assert gap <= tolerance({}, Axes(), at, name) * wanted.norm().item(), (kind, name)
        moved = [(theirs.of["value"][name] - first[name]).norm().item() for name in first]
        assert not at or min(moved) > 100 * FP32_ERROR_RATIO, "a step that shows its scale"
