"""Layouts of a training task: the fastest one on a number of slots, and its speed.

The speed comes from the analytical model, so T(t, x) has the same shape as for a command with a
`model`; the level is measured. The spec names no GPU, so the shape is that of an A100. The model of
a custom loop is unknown: only micro-batches and bubbles distinguish its layouts.
"""

from __future__ import annotations

from functools import lru_cache

from ...events.spec.job import Loop, Train
from ...events.spec.model import Axes, MegatronModel
from ...events.spec.parallelism import VOCABULARY
from .layouts import Layout
from .step_time import constants_of, iteration_s

_SPEEDS_NUM = 4096


def megatron_model(train: Train) -> MegatronModel:
    """The trained model as input of the analytical model."""
    model = train.model
    return MegatronModel(
        num_layers=model.num_layers, hidden=model.hidden, num_heads=model.num_heads,
        sequence=model.sequence, vocabulary=VOCABULARY, tie_embeddings=model.tie_embeddings,
        dropout=model.dropout, gpu="A100-80", global_batch=train.batch.global_,
        micro_batch=train.batch.micro, zero1=train.parallel.optimizer != "whole",
        overlap=train.overlap)


def speed(train: Train | Loop, num_slots: int) -> float:
    """Speed of `num_slots` slots relative to one; 0 if there is no layout. In a data-parallel task,
    an iteration takes the time of ceil(micro-batches / slots) micro-batches."""
    if train.parallel.is_plain:
        num = train.num_micro_batches
        return num / -(-num // num_slots)
    return _fastest(train, num_slots)[0]


def layout_of(train: Train | Loop, num_slots: int) -> Axes | None:
    """The fastest permitted layout of exactly `num_slots`, of equals the first; None if none."""
    return None if train.parallel.is_plain else _fastest(train, num_slots)[1]


@lru_cache(maxsize=_SPEEDS_NUM)
def layout_within(train: Train | Loop, num_slots: int) -> Axes | None:
    """The fastest permitted layout of at most `num_slots` slots; of equals, the smallest."""
    if train.parallel.is_plain:
        return None
    best = max(range(num_slots + 1), key=lambda num: (_fastest(train, num)[0], -num))
    return layout_of(train, best)


@lru_cache(maxsize=_SPEEDS_NUM)
def _fastest(train: Train | Loop, num_slots: int) -> tuple[float, Axes | None]:
    alone_s = _iteration_s(train, Axes())
    best: tuple[float, Axes | None] = (0.0, None)
    for axes in train.parallel.layouts(num_slots, train.num_micro_batches):
        times = alone_s / _iteration_s(train, axes)
        if times > best[0]:
            best = times, axes
    return best


def _iteration_s(train: Train | Loop, axes: Axes) -> float:
    if isinstance(train, Loop):  # its model is unknown
        num = -(-train.num_micro_batches // axes.dp)
        return (num + (axes.pp - 1) / axes.chunks) / (axes.tp * axes.pp)
    model = megatron_model(train)
    layout = Layout(tp=axes.tp, pp=axes.pp, dp=axes.dp, micro=train.batch.micro,
                    chunks=axes.chunks, sequence_parallel=False,
                    shards="none" if train.parallel.optimizer == "whole" else "optimizer")
    return iteration_s(model, layout, constants_of(model))
