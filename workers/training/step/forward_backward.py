"""Forward and backward of a replica of several members, into each member's local gradients.

Tensor-parallel members run each micro-batch together; pipeline stages run all micro-batches in
Megatron's own schedule. This module waits only for other members of the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from ..model.trainee import TrainingModel

PADDING = -1
"""A micro-batch without tokens: it adds zeros."""
Sample = Callable[[int], Any]
"""A micro-batch by its number: tokens [rows, sequence + 1], or input of a script's `forward`."""
Note = Callable[[Literal["forward", "backward", "stage"], int], None]
"""Called when a pass of a micro-batch begins, or when a stage communicates with another."""


def run(trainee: TrainingModel, groups: Any, iteration: int, items: Sequence[int], sample: Sample,
        note: Note, *, forward_only: bool = False) -> tuple[float, int]:
    """Run these micro-batches of an iteration; returns the sum of the losses and of the tokens.

    All members of the replica call it with the same items. Only one member, on the last stage,
    returns the values; the others return 0. Raises RuntimeError if another member is gone: the
    local gradients are then worthless.
    """
    axes = trainee.axes
    if axes.pp > 1:
        results = _schedule(trainee, groups, iteration, padded(items, axes.pp, axes.chunks), sample,
                            note, forward_only=forward_only) if items else []
    else:
        results = [_whole(trainee, iteration, item, sample, note, forward_only=forward_only)
                   for item in items]
    if trainee.at.tp:
        return 0.0, 0
    return sum(loss for loss, _ in results), sum(num_tokens for _, num_tokens in results)


def padded(items: Sequence[int], num_stages: int, num_chunks: int) -> list[int]:
    """The items, padded for Megatron's interleaved schedule, which runs groups of `num_stages`."""
    num_more = -len(items) % num_stages if num_chunks > 1 else 0
    return [*items, *[PADDING] * num_more]


def evaluate(trainee: TrainingModel, groups: Any, items: Sequence[int], sample: Sample
             ) -> tuple[float, int]:
    """Run batches for evaluation: no gradients, the model in evaluation mode."""
    for ddp in trainee.ddps:
        ddp.eval()
    try:
        with torch.no_grad():
            return run(trainee, groups, PADDING, items, sample, _ignore, forward_only=True)
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


def _schedule(trainee: TrainingModel, groups: Any, iteration: int, items: list[int], sample: Sample,
              note: Note, *, forward_only: bool) -> list[tuple[float, int]]:
    """Megatron's 1F1B schedule, interleaved with chunks. Only the last stage returns values."""
    axes, train = trainee.axes, trainee.train
    config = trainee.ddps[0].config
    config.grad_scale_func = trainee.optimizer.scale_loss
    is_chunked = axes.chunks > 1
    results: list[tuple[float, int]] = get_forward_backward_func(
        pp_size=axes.pp, vp_size=axes.chunks if is_chunked else None)(
        forward_step_func=partial(_forward, trainee, iteration, sample, note),
        data_iterator=[iter(items) for _ in trainee.ddps] if is_chunked else iter(items),
        model=trainee.ddps, num_microbatches=len(items), seq_length=train.model.sequence,
        micro_batch_size=train.batch.micro, forward_only=forward_only,
        p2p_communicator=_Stages(groups.pp, config, note), pg_collection=groups,
    )
    return results


class _Stages(P2PCommunicator):  # type: ignore[misc, unused-ignore]
    """Megatron's sends and receives between stages; each is noted as it begins."""

    def __init__(self, group: Any, config: Any, note: Note) -> None:
        super().__init__(group, config)
        self._note = note

    def _communicate(self, **options: Any) -> Any:
        self._note("stage", PADDING)
        return super()._communicate(**options)


def _forward(trainee: TrainingModel, iteration: int, sample: Sample, note: Note,
             items: Iterator[int], ddp: Any) -> tuple[Tensor, Any]:
    """Run one micro-batch in one chunk, for Megatron's schedule. Returns the output and a loss
    function. Dropout does not depend on the other micro-batches in the pipeline."""
    item = next(items)
    trainee.draw.at(iteration, item)
    if item == PADDING:
        batch = trainee.padding(sample(0))
    else:
        batch = sample(item)
        note("forward", item)
    batch = trainee.given(batch)

    def loss_of_output(per_token: Tensor) -> tuple[Tensor, Tensor, tuple[float, int]]:
        loss, num_tokens = trainee.loss_of(per_token, batch), trainee.num_tokens(batch)
        return loss, torch.tensor(num_tokens, dtype=torch.int), (loss.item(), num_tokens)

    def backward_begins(gradient: Tensor) -> None:
        note("backward", item)

    out = trainee.forward(ddp, batch)
    if item != PADDING and out.requires_grad:
        out.register_hook(backward_begins)  # type: ignore[no-untyped-call, unused-ignore]
    return out, loss_of_output
