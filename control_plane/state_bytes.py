"""Bytes of a task's state: what a process that begins elsewhere has to be sent, or has to read."""

from __future__ import annotations

from ..events.places import replica
from ..events.spec import Train
from .model_flops import parameters
from .state import Task
from .train_layouts import layout_within, megatron_model

BYTES_BY_PRECISION = {"fp32": 12, "bf16": 14, "fp16": 14}
"""Of one parameter: masters and two moments in fp32, and the parameter where that has 16 bits."""


def seat_bytes(task: Task, count: int) -> int:
    """What one of `count` seats holds. A rank of a training task holds its part of the model, one
    of a command its share of what its model describes; 0 without one."""
    train = task.spec.train
    if train is not None:
        axes = layout_within(train, count)
        return trained_bytes(train) // (len(replica(axes, 0)) if axes is not None else 1)
    model = task.spec.model
    return BYTES_BY_PRECISION["bf16"] * parameters(model).total // count if model and count else 0


def trained_bytes(train: Train) -> int:
    """Of a GPT with learned positions; `parameters` counts neither its biases nor its last norm."""
    model = train.model
    found = parameters(megatron_model(train))
    more = model.hidden * (model.sequence + 9 * model.num_layers + 2)
    return BYTES_BY_PRECISION[train.precision] * (found.total + more)
