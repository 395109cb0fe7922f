"""Forward and backward of a replica, into the local gradients of each of its members.

Tensor-parallel members run each micro-batch together; pipeline stages run all micro-batches in
Megatron's own schedule (pipeline.py). This module waits only for other members of the same replica.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..model.trainee import TrainingModel
from . import pipeline
from .losses import Losses
from .pipeline import PADDING, Begin, Note, Passes, Sample

Backward = Callable[[], AbstractContextManager[None]]
"""The context of the backward of a micro-batch, outside a pipeline."""


def run(
    trainee: TrainingModel,
    groups: Any,
    iteration: int,
    items: Sequence[int],
    sample: Sample,
    note: Note,
    *,
    must_stop: Callable[[], bool] | None = None,
    forward_only: bool = False,
    begin: Begin | None = None,
    backward: Backward = nullcontext,
) -> Passes:
    """Run these micro-batches of an iteration, in a pipeline only until `must_stop` is True. All
    members of the replica call it with the same items, and have run the same number of them; each
    calls `begin` before its last backward. Raises RuntimeError if another member is gone: the local
    gradients are then worthless."""
    if not items:
        return Passes(0, Losses())
    if begin is not None and trainee.at.tp:
        begin = partial(_begin_without_losses, begin)
    if trainee.axes.pp > 1:
        done = pipeline.run(
            trainee,
            groups,
            iteration,
            items,
            sample,
            note,
            must_stop=must_stop,
            forward_only=forward_only,
            begin=begin,
        )
    else:
        losses = Losses()
        for item in items:
            _whole(
                trainee,
                iteration,
                item,
                sample,
                note,
                losses,
                forward_only=forward_only,
                begin=begin,
                backward=backward,
            )
        done = Passes(len(items), losses)
    return Passes(done.num_done, Losses()) if trainee.at.tp else done


def _begin_without_losses(begin: Begin, losses: Losses) -> None:
    """One tensor-parallel member counts the losses of all."""
    begin(Losses())


def evaluate(trainee: TrainingModel, groups: Any, items: Sequence[int], sample: Sample) -> Losses:
    """Run batches without gradients, with the model in evaluation mode."""
    for ddp in trainee.ddps:
        ddp.eval()
    try:
        with torch.no_grad():
            return run(
                trainee, groups, PADDING, items, sample, lambda event, item: None, forward_only=True
            ).losses
    finally:
        for ddp in trainee.ddps:
            ddp.train()


def _whole(
    trainee: TrainingModel,
    iteration: int,
    item: int,
    sample: Sample,
    note: Note,
    losses: Losses,
    *,
    forward_only: bool,
    begin: Begin | None,
    backward: Backward,
) -> None:
    note("micro_batch", item)
    trainee.draw.at(iteration, item)
    batch = sample(item)
    note("forward", item)
    loss = trainee.loss(batch)
    losses.add(item, loss, trainee.num_tokens(batch))
    if not forward_only:
        if begin is not None:
            begin(losses)
        note("backward", item)
        with backward():
            trainee.optimizer.scale_loss(loss).backward()
