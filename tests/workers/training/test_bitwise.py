"""`reproducible: bitwise`: a run through faults ends with the bits of the run without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import reference
from rank_driver import Drive, Driver, Twins
from reference import differing
from unicron.events.records import reports as r
from unicron.events.spec.model import Axes

NUM_ITERATIONS, STRUCK = 5, 2
MODEL = {"num_layers": 4, "hidden": 32, "num_heads": 4, "sequence": 32}
BITWISE: dict[str, Any] = {
    "iterations": NUM_ITERATIONS,
    "model": MODEL,
    "reproducible": "bitwise",
    # Clipping would hide a wrong scale of the gradient and of its norm.
    "optimizer": {"lr": 3e-3, "warmup_iterations": 2, "clip_grad": 0.0},
}
CLIPPED = {"optimizer": {"lr": 3e-3, "warmup_iterations": 2, "clip_grad": 1.0}}
APART = ("parallel", "overlap", "bucket_params", "kept_sum")
"""What the reference run, in one process, does not have."""


def train(drive: Drive, axes: Axes, **changes: Any) -> dict[str, Any]:
    driver = drive(**BITWISE | changes)
    ranks = list(range(axes.dp * axes.pp * axes.tp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    driver.finish(ranks)
    return state(driver)


def state(driver: Driver) -> dict[str, Any]:
    return reference.read(driver.final_checkpoint())


def near_rounded(twin: Twins, found: dict[str, Any], changes: dict[str, Any]) -> None:
    """Losses, parameters and both moments are those of Megatron's own rounded sum, but for what
    another order of its micro-batches changes too."""
    changes = {name: value for name, value in changes.items() if name not in APART}
    usual = twin(**BITWISE | changes | {"reproducible": "rounding"})
    orders = [reference.read(usual.path.parents[1] / str(at) / "final") for at in (0, 1, 2)]
    noises = [reference.difference(other, orders[0]) for other in orders[1:]]
    gap = reference.difference(found, orders[0])
    print(gap, noises)
    for name in ("loss_rel", "param_rel", "optimizer_rel"):
        most = reference.tolerance([getattr(noise, name) for noise in noises])
        assert getattr(gap, name) <= most, name


PIPELINE, CHUNKS = {"pipeline": [1, 2]}, {"pipeline": [2], "chunks": 2}
TENSOR = {"tensor": [2]}
OVERLAPPED = {"overlap": True, "bucket_params": 10_000}
FP16 = {"precision": "fp16", "dynamic_loss_scale": {"initial": 2.0**12, "hysteresis": 1}}
"""Its first iterations are skipped, the others not."""
LAYOUTS: dict[str, tuple[dict[str, Any], list[Axes]]] = {
    "dropout": ({"dropout": 0.1}, [Axes(dp=3), Axes(), Axes(dp=2)]),
    "pipeline": ({"parallel": PIPELINE}, [Axes(dp=3), Axes(pp=2), Axes(pp=2, dp=2)]),
    "interleaved": ({"parallel": CHUNKS}, [Axes(pp=2, chunks=2), Axes(pp=2, chunks=2, dp=2)]),
    "tensor": ({"parallel": TENSOR}, [Axes(tp=2), Axes(tp=2, dp=2)]),
    "sharded": (
        {"parallel": PIPELINE | {"optimizer": "sharded"}},
        [Axes(), Axes(dp=3), Axes(pp=2, dp=2)],
    ),
    "mirrored": ({"parallel": {"optimizer": "mirrored"}}, [Axes(), Axes(dp=3)]),
    "overlapped": (OVERLAPPED, [Axes(dp=2), Axes(), Axes(dp=3)]),
    "bf16": ({"precision": "bf16", "parallel": PIPELINE}, [Axes(dp=3), Axes(), Axes(pp=2)]),
    "fp16": (FP16, [Axes(dp=2), Axes(dp=3)]),
    "32 bits": (
        {"reproducible_bits": 32, "parallel": PIPELINE},
        [Axes(dp=3), Axes(pp=2), Axes(), Axes(pp=2, dp=2)],
    ),
    "per micro-batch": ({"loss": "per_micro_batch"}, [Axes(), Axes(dp=3)]),
}


OTHER_NOISE = ("tensor", "32 bits", "bf16", "fp16")
"""Rounded in more than the order of micro-batches: test_bitwise_witness.py compares them."""
QUICK = ("pipeline", "to another depth")
"""The cases that `make test` runs too."""


def _cases(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in names
    ]


@pytest.mark.parametrize("case", _cases(LAYOUTS))
def test_every_layout_trains_the_same_bits(drive: Drive, twin: Twins, case: str) -> None:
    changes, layouts = LAYOUTS[case]
    one, *others = [train(drive, axes, **changes) for axes in layouts]
    for axes, other in zip(layouts[1:], others, strict=True):
        assert differing(other, one) == [], axes
    assert (one["numbers.adam_step"] < NUM_ITERATIONS) == (case == "fp16")
    assert one["numbers.adam_step"] > 0
    if case not in OTHER_NOISE:
        near_rounded(twin, one, changes)


FAULTS: dict[str, tuple[dict[str, Any], Axes, str, Axes, list[int]]] = {
    "data parallel": ({}, Axes(dp=3), "backward", Axes(dp=2), [0, 1]),
    "in the reduction": (CLIPPED | {"dropout": 0.1}, Axes(dp=3), "bucket", Axes(dp=2), [0, 1]),
    "at the barrier": ({}, Axes(dp=3), "gate", Axes(dp=2), [0, 1]),
    "without a kept sum": ({"kept_sum": False}, Axes(dp=3), "bucket", Axes(dp=2), [0, 1]),
    "pipeline": ({"parallel": PIPELINE}, Axes(pp=2, dp=2), "gate", Axes(pp=2), [0, 2]),
    "to another depth": (
        {"parallel": PIPELINE},
        Axes(pp=2, dp=2),
        "backward",
        Axes(dp=3),
        [0, 1, 2],
    ),
    "overlapped": (OVERLAPPED, Axes(dp=3), "bucket", Axes(dp=2), [0, 1]),
}


@pytest.mark.parametrize("case", _cases(FAULTS))
def test_a_killed_rank_changes_no_bit(drive: Drive, twin: Twins, case: str) -> None:
    changes, axes, event, after, left = FAULTS[case]
    driver = drive(**BITWISE | changes)
    ranks = list(range(axes.dp * axes.pp))
    driver.start(*ranks, axes=axes)
    driver.hold(ranks[-1], event, STRUCK)
    driver.form(ranks, axes=axes)
    driver.held(ranks[-1], STRUCK)
    driver.kill(ranks[-1])
    driver.quiesce(ranks[:-1], "now")
    driver.form(left, axes=after)
    driver.finish(left)
    near_rounded(twin, state(driver), changes)
    changes = {name: value for name, value in changes.items() if name not in APART}
    assert twin(**BITWISE | changes).is_equal(driver.final_checkpoint())


LOW = """
from unicron.workers.training.model import exact_sum
exact_sum.FIRST_BITS, exact_sum.HEADROOM_BITS = -3, 1
"""
"""Exponents so small that gradients are often out of range."""


def test_a_gradient_out_of_range_repeats_the_iteration(drive: Drive) -> None:
    found = []
    for dp in (1, 3):
        driver = drive(**BITWISE)
        driver.patch = LOW
        ranks = list(range(dp))
        driver.start(*ranks)
        driver.form(ranks)
        driver.finish(ranks)
        log = next(iter(driver.processes.values())).log.read_text()
        found.append((state(driver), log.count("which is done again")))
    (one, num), (other, other_num) = found
    assert num == other_num
    assert 1 <= num <= 20
    assert differing(other, one) == []


def test_a_checkpoint_without_exponents_is_refused(drive: Drive) -> None:
    first = drive(**BITWISE | {"reproducible": "rounding", "checkpoint_every": 2})
    first.start(0)
    first.form([0])
    first.finish([0])
    saved = next(one for one in first.told(r.CheckpointSaved) if not one.final)
    driver = drive(**BITWISE, output=first.work.output)
    driver.start(0, attempt=2)
    driver.reconfigure([0], checkpoint=saved.path)
    assert "has no exponents of exact sums" in driver.wait(r.RankErrored, 0).text


def test_a_gradient_that_is_not_finite_ends_the_task(drive: Drive) -> None:
    driver = drive(**BITWISE | {"optimizer": {"lr": 1e30, "clip_grad": 0.0}})
    driver.start(0, 1)
    driver.reconfigure([0, 1])
    driver.reconfigured([0, 1])
    driver.resume([0, 1])
    assert "which an exact sum cannot hold" in driver.wait(r.RankErrored, 0).text


def test_the_comparison_finds_rounding(drive: Drive) -> None:
    one, other = [train(drive, Axes(dp=dp), reproducible="rounding") for dp in (1, 3)]
    assert any(name.startswith("model.") for name in differing(one, other))
