"""Bytes of a task's state that a process elsewhere has to receive or read."""

from __future__ import annotations

from ...events.spec.job import Train
from ...events.spec.model import Axes
from ...events.spec.parallelism import replica
from ..state.task import Task
from .flops import parameters
from .training_layouts import layout_within, megatron_model

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}
"""Bytes per parameter: two fp32 moments, and the fp32 master copy of 16-bit weights."""


def seat_bytes(task: Task, count: int) -> int:
    """Bytes of state on one of `count` slots: a rank's part of the model, if the task trains in
    memory and its model is known. For a command, it is an equal share of the state of its `model`;
    0 without a model."""
    train, loop = task.spec.train, task.spec.loop
    if train is not None:
        return trained_bytes(train, count)
    model = task.spec.model if loop is None else loop.model
    if model is None or not count:
        return 0
    if loop is None:
        bytes_of_each = WEIGHT_BYTES["bf16"] + OPTIMIZER_BYTES["bf16"]
        return bytes_of_each * parameters(model).total // count
    axes = layout_within(loop, count) or Axes(dp=count)
    shards = axes.dp if loop.parallel.optimizer == "sharded" else 1
    return int((WEIGHT_BYTES["bf16"] + OPTIMIZER_BYTES["bf16"] / shards)
               * parameters(model).total) // len(replica(axes, 0))


def trained_bytes(train: Train, count: int) -> int:
    """Bytes of state of one of `count` ranks: its part of the GPT and of the optimizer state."""
    axes = layout_within(train, count) or Axes()
    shards = {"whole": axes.dp, "sharded": 1, "mirrored": min(2, axes.dp)}[train.parallel.optimizer]
    bytes_of_each = (WEIGHT_BYTES[train.precision]
                     + OPTIMIZER_BYTES[train.precision] * shards / axes.dp)
    model = train.model
    # `parameters` counts neither learned positions nor biases nor the last norm.
    more = model.hidden * (model.sequence + 9 * model.num_layers + 2)
    total = parameters(megatron_model(train)).total + more
    return int(bytes_of_each * total) // len(replica(axes, 0))
