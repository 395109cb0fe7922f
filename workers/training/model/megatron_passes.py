"""Forward and backward of a replica with Megatron, into the local gradients of each member.

Tensor-parallel members run each micro-batch together; pipeline stages run all micro-batches in
Megatron's own schedule (megatron_pipeline.py). This waits only for members of the same replica.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from ..communicators.operations import Operations
from . import megatron_pipeline
from .engine import PADDING, Backward, Begin, NotePass, Passes, Sample
from .losses import Losses
from .trainee import TrainingModel


def run(
    trainee: TrainingModel,
    operations: Operations,
    iteration: int,
    items: Sequence[int],
    sample: Sample,
    note: NotePass,
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
        done = megatron_pipeline.run(
            trainee,
            operations,
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


def evaluate(
    trainee: TrainingModel, operations: Operations, items: Sequence[int], sample: Sample
) -> Losses:
    """Run batches without gradients, with the model in evaluation mode."""
    for ddp in trainee.ddps:
        ddp.eval()
    try:
        with torch.no_grad():
            return run(
                trainee,
                operations,
                PADDING,
                items,
                sample,
                lambda event, item: None,
                forward_only=True,
            ).losses
    finally:
        for ddp in trainee.ddps:
            ddp.train()


def _whole(
    trainee: TrainingModel,
    iteration: int,
    item: int,
    sample: Sample,
    note: NotePass,
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
