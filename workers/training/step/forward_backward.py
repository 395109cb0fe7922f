"""Forward and backward of a replica of several members, into each member's local gradients.

Tensor-parallel members run each micro-batch together; pipeline stages run all micro-batches in
Megatron's own schedule (pipeline.py). This module waits only for other members of the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.trainee import TrainingModel
from . import pipeline
from .pipeline import PADDING, Note, Passes, Sample


def run(trainee: TrainingModel, groups: Any, iteration: int, items: Sequence[int], sample: Sample,
        note: Note, *, must_stop: Callable[[], bool] | None = None, forward_only: bool = False
        ) -> Passes:
    """Run these micro-batches of an iteration, in a pipeline only until `must_stop` is True.

    All members of the replica call it with the same items, and have run the same number of them.
    Raises RuntimeError if another member is gone: the local gradients are then worthless.
    """
    if not items:
        return Passes(0)
    if trainee.axes.pp > 1:
        done = pipeline.run(trainee, groups, iteration, items, sample, note, must_stop=must_stop,
                            forward_only=forward_only)
    else:
        each = [_whole(trainee, iteration, item, sample, note, forward_only=forward_only)
                for item in items]
        done = Passes(len(items), sum(loss for loss, _ in each), sum(num for _, num in each))
    return Passes(done.num_done) if trainee.at.tp else done


def evaluate(trainee: TrainingModel, groups: Any, items: Sequence[int], sample: Sample
             ) -> tuple[float, int]:
    """Run batches for evaluation: no gradients, the model in evaluation mode. Returns the sums of
    the losses and of the tokens, as in Passes."""
    for ddp in trainee.ddps:
        ddp.eval()
    try:
        with torch.no_grad():
            done = run(trainee, groups, PADDING, items, sample, _ignore, forward_only=True)
            return done.loss_sum, done.num_tokens
    finally:
        for ddp in trainee.ddps:
            ddp.train()


def _ignore(event: str, item: int) -> None:
    pass


def _whole(trainee: TrainingModel, iteration: int, item: int, sample: Sample, note: Note, *,
           forward_only: bool) -> tuple[float, int]:
    trainee.draw.at(iteration, item)
    batch = sample(item)
    note("forward", item)
    loss = trainee.loss(batch)
    if not forward_only:
        note("backward", item)
        trainee.optimizer.scale_loss(loss).backward()
    return loss.item(), trainee.num_tokens(batch)
