"""The two losses: what a micro-batch adds; not even an empty one divides by zero."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from unicron.events.spec.job import Batch, Model, Train
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.model import trainee as model
from unicron.workers.training.process.history import History
from unicron.workers.training.reference import compare
from unicron.workers.training.step.optimizer_step import step

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TRAIN = Train(model=Model(num_layers=1, hidden=32, num_heads=2, sequence=4),
              batch=Batch(global_=6, micro=2), iterations=10, output="unused")
TOKENS = torch.tensor([[97, 98, 0, 99, 100], [0, 0, 97, 98, 0]])
"""Five of its eight targets carry loss."""
EMPTY = torch.zeros(2, 5, dtype=torch.int64)


def built(alone: Any, loss: str) -> model.TrainingModel:
    return model.build(replace(TRAIN, loss=loss), torch.device("cpu"), alone)


def test_targets_after_the_end_of_a_document_count_nowhere(alone: Any) -> None:
    trainee = built(alone, "per_token")
    assert trainee.num_tokens(TOKENS) == 5
    before = trainee.loss(TOKENS).item()
    other = TOKENS.clone()
    other[0, 3] = 0  # a target that counts nowhere; as an input it takes the next one out as well
    others = trainee.loss(other)
    assert trainee.num_tokens(other) == 4
    each = trainee.ddps[0](TOKENS[:, :-1].contiguous(), trainee.positions, None,
                       labels=TOKENS[:, 1:].contiguous())
    assert others.item() == pytest.approx(before - each[0, 3].item(), rel=1e-5)


def test_a_micro_batch_adds_its_sum_or_its_share_of_the_mean(alone: Any) -> None:
    summed = built(alone, "per_token").loss(TOKENS)
    mean = built(alone, "per_micro_batch").loss(TOKENS)
    assert mean.item() == pytest.approx(summed.item() / 5 / 3, rel=1e-6)
    assert built(alone, "per_token").divisor(5 + 8) == 13
    assert built(alone, "per_micro_batch").divisor(5 + 8) == 1


@pytest.mark.parametrize("loss", ["per_token", "per_micro_batch"])
def test_an_iteration_without_any_token_is_finite(alone: Any, loss: str) -> None:
    trainee = built(alone, loss)
    trainee.draw.at(0, 0)
    nothing = trainee.loss(EMPTY)
    assert nothing.item() == 0
    trainee.optimizer.scale_loss(nothing).backward()
    assert step(trainee, trainee.num_tokens(EMPTY), lambda event: None)
    assert all(param.isfinite().all() for param in trainee.modules[0].parameters())


def test_a_loss_of_zero_can_be_compared(alone: Any, tmp_path: Path) -> None:
    trainee = built(alone, "per_token")
    for name, first in (("zero", 0.0), ("other", 0.5)):
        history = History()
        history.add(0, first, 0.1)
        history.add(1, 2.0, 0.1)
        checkpoint.save(str(tmp_path / name), trainee, 2, history)
    zero, other = tmp_path / "zero", tmp_path / "other"
    assert compare(zero, zero).loss_rel == 0
    assert compare(other, zero).loss_rel == math.inf
    assert compare(zero, other).loss_rel == 1
