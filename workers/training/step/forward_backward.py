"""Forward and backward of a replica of several members, into each member's local gradients.

Tensor-parallel members run each micro-batch together; pipeline stages run all micro-batches in
Megatron's own schedule (pipeline.py). This module waits only for other members of the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..model.trainee import TrainingModel
from . import pipeline
from .pipeline import PADDING, Begin, Note, Passes, Sample

Backward = Callable[[], AbstractContextManager[None]]
"""The context of the backward of a micro-batch, outside a pipeline."""


def run(trainee: TrainingModel, groups: Any, iteration: int, items: Sequence[int], sample: Sample,
        note: Note, *, must_stop: Callable[[], bool] | None = None, forward_only: bool = False,
        begin: Begin | None = None, backward: Backward = nullcontext) -> Passes:
    """Run these micro-batches of an iteration, in a pipeline only until `must_stop` is True.

    All members of the replica call it with the same items, and have run the same number of them.
    Each calls `begin` before its last backward of an iteration, with its part of the sums over
    `items`. Raises RuntimeError if another member is gone: the local gradients are then worthless.
    """
    if not items:
        return Passes(0)
    if begin is not None and trainee.at.tp:
        begin = partial(_begin_without_sums, begin)
    if trainee.axes.pp > 1:
        done = pipeline.run(trainee, groups, iteration, items, sample, note, must_stop=must_stop,
                            forward_only=forward_only, begin=begin)
    else:
        each = [_whole(trainee, iteration, item, sample, note, forward_only=forward_only,
                       begin=begin, backward=backward) for item in items]
        done = Passes(len(items), sum(loss for loss, _ in each), sum(num for _, num in each))
    return Passes(done.num_done) if trainee.at.tp else done


def _begin_without_sums(begin: Begin, loss_sum: float, num_tokens: int) -> None:
    """One tensor-parallel member counts the sums of all."""
    begin(0.0, 0)


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
           forward_only: bool, begin: Begin | None, backward: Backward) -> tuple[float, int]:
    trainee.draw.at(iteration, item)
    batch = sample(item)
    note("forward", item)
    loss = trainee.loss(batch)
    if not forward_only:
        if begin is not None:
            begin(loss.item(), trainee.num_tokens(batch))
        note("backward", item)
        with backward():
            trainee.optimizer.scale_loss(loss).backward()
    return loss.item(), trainee.num_tokens(batch)
