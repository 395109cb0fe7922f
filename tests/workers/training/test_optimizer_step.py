"""The optimizer step with a gradient norm and an overflow flag that other members computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from unicron.events.spec.job import DynamicLossScale, Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel
from unicron.workers.training.communicators.operations import Operations
from unicron.workers.training.model import (
    megatron_passes,
    megatron_pipeline,
    megatron_step,
    training_state,
)
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.engine import PADDING

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16),
    iterations=10,
    output="unused",
    optimizer=Optimizer(lr=1e-2, clip_grad=1.0),
)
FP16 = replace(
    TRAIN, precision="fp16", dynamic_loss_scale=DynamicLossScale(initial=2.0**8, hysteresis=1)
)


def built(train: Train, groups: Any) -> model.TrainingModel:
    """A model after one backward pass."""
    trainee = model.build(train, torch.device("cpu"), groups)
    trainee.clear()  # allocates the gradients
    tokens = torch.arange(2 * 17).reshape(2, 17) + 1
    megatron_passes.run(
        trainee, Operations(groups), 0, [0], lambda item: tokens, lambda event, item: None
    )
    return trainee


def step(trainee: model.TrainingModel, **options: Any) -> bool:
    return megatron_step.step(trainee, 32, lambda event: None, **options) is not None


@pytest.mark.parametrize("optimizer", ["whole", "sharded"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_given_norm_is_the_one_that_megatron_clips_by(
    alone: Any, precision: str, optimizer: Any
) -> None:
    train = replace(FP16, precision=precision, parallel=Parallel(optimizer=optimizer))
    one, other, clipped = (built(train, alone) for _ in range(3))
    found = megatron_step.norm_square(one).item()
    scale = one.optimizer.get_loss_scale().item()
    assert step(one)
    assert step(other, norm_square=found)
    assert step(clipped, norm_square=1e6 * found)
    moments = [
        training_state.tensors(each)["optimizer.exp_avg.decoder.final_layernorm.weight"]
        .norm()
        .item()
        for each in (one, other, clipped)
    ]
    assert moments[1] == pytest.approx(moments[0], rel=1e-5)
    assert math.sqrt(found) / 32 / scale > 1, "the gradient was not clipped"
    assert moments[2] == pytest.approx(moments[0] / 1e3, rel=1e-3), "norm times 1000"


@pytest.mark.parametrize("optimizer", ["whole", "sharded"])
def test_an_overflow_on_another_member_skips_the_step(alone: Any, optimizer: Any) -> None:
    trainee = built(replace(FP16, parallel=Parallel(optimizer=optimizer)), alone)
    before = {name: tensor.clone() for name, tensor in training_state.tensors(trainee).items()}
    assert not megatron_step.has_inf(trainee)
    assert not step(trainee, norm_square=math.inf, found_inf=True)
    assert megatron_step.has_inf(trainee)
    assert all(
        tensor.equal(before[name]) for name, tensor in training_state.tensors(trainee).items()
    )
    assert trainee.optimizer.get_loss_scale().item() == 2.0**7
    assert trainee.scheduler.num_steps == 0


@pytest.mark.parametrize(
    ("axes", "num_items", "num_passes"),
    [
        (Axes(pp=2), 3, 3),
        (Axes(pp=2, chunks=2), 3, 4),
        (Axes(pp=2, chunks=2), 4, 4),
        (Axes(pp=4, chunks=2), 1, 4),
        (Axes(pp=4, chunks=2), 9, 12),
    ],
)
def test_chunks_pad_micro_batches_to_whole_groups(
    axes: Axes, num_items: int, num_passes: int
) -> None:
    padded = megatron_pipeline.padded(range(num_items), axes.pp, axes.chunks)
    assert padded == [*range(num_items), *[PADDING] * (num_passes - num_items)]
