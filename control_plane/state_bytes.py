"""Bytes of a task's state: what a process that begins elsewhere has to be sent, or has to read."""

from __future__ import annotations

from ..events.model_spec import MegatronModel
from ..events.spec import Train
from .model_flops import parameters
from .state import Task

BYTES_BY_PRECISION = {"fp32": 12, "bf16": 14, "fp16": 14}
"""Of one parameter: masters and two moments in fp32, and the parameter where that has 16 bits."""
_VOCABULARY = 256


def seat_bytes(task: Task, count: int) -> int:
    """What one of `count` seats holds. A rank of a training task holds the whole state, one of a
    command its share of what its model describes; 0 without one."""
    if task.spec.train is not None:
        return trained_bytes(task.spec.train)
    model = task.spec.model
    return BYTES_BY_PRECISION["bf16"] * parameters(model).total // count if model and count else 0


def trained_bytes(train: Train) -> int:
    """Of a GPT with learned positions; `parameters` counts neither its biases nor its last norm."""
    model = train.model
    found = parameters(MegatronModel(
        num_layers=model.num_layers, hidden=model.hidden, num_heads=model.num_heads,
        sequence=model.sequence, vocabulary=_VOCABULARY, tie_embeddings=model.tie_embeddings,
        gpu="A100-80", global_batch=train.batch.global_))
    more = model.hidden * (model.sequence + 9 * model.num_layers + 2)
    return BYTES_BY_PRECISION[train.precision] * (found.total + more)
