"""Bytes of a task's state that a process elsewhere has to receive or read."""

from ...events.records.types import CHECKPOINTS_NUM_MAX
from ...events.spec.job import JobSpec, Loop, Train
from ...events.spec.model import Axes
from ...events.spec.parallelism import replica
from ..state.memory_checkpoints import whole_checkpoints
from ..state.task import Task
from .flops import parameters
from .training_layouts import layout_within, megatron_model

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}
"""Bytes per parameter: two fp32 moments, and the fp32 master copy of 16-bit weights."""
STATE_BYTES = WEIGHT_BYTES["bf16"] + OPTIMIZER_BYTES["bf16"]
"""Bytes per parameter of a model in 16 bits."""
NUM_STORES_MAX = 2
"""The checkpoint stores that receive each member's share of the state."""


def seat_bytes(task: Task, count: int) -> int:
    """Bytes of state on one of `count` slots: of a rank's part of the model; for a command an equal
    share of the state of its `model`; 0 if the model is not known."""
    train, loop = task.spec.train, task.spec.loop
    if train is not None:
        return trained_bytes(train, count)
    model = task.spec.model if loop is None else loop.model
    if model is None or not count:
        return 0
    if loop is None:
        return STATE_BYTES * parameters(model).total // count
    axes = layout_within(loop, count) or Axes(dp=count)
    held = _held_shards(loop, axes)
    return int(
        (WEIGHT_BYTES["bf16"] + OPTIMIZER_BYTES["bf16"] * held / axes.dp) * parameters(model).total
    ) // len(replica(axes, 0))


def share_bytes(task: Task, count: int) -> int:
    """Bytes of one of `count` equal shares of the task's whole state: what each member stores in
    memory. From the last reported in-memory checkpoint, else from the spec; 0: not known yet."""
    whole = next(iter(whole_checkpoints(task.copies)), None)
    if whole is not None:
        return -(-whole.copy_bytes // count)
    return _trained_state_bytes(task.spec.train) // count if task.spec.train is not None else 0


def copies_bytes(spec: JobSpec) -> int:
    """Host memory of a task's in-memory checkpoints, all nodes together; 0: none, or not known."""
    if spec.training is None or not spec.training.copy_every:
        return 0
    return NUM_STORES_MAX * CHECKPOINTS_NUM_MAX * state_bytes(spec)


def state_bytes(spec: JobSpec) -> int:
    """Bytes of the whole state of a task, about those of a checkpoint; 0: not known."""
    if spec.train is not None:
        return _trained_state_bytes(spec.train)
    if spec.loop is not None and spec.loop.model is not None:
        return STATE_BYTES * parameters(spec.loop.model).total
    return 0


def trained_bytes(train: Train, count: int) -> int:
    """Bytes of state of one of `count` ranks: its part of the GPT and of the optimizer state."""
    axes = layout_within(train, count) or Axes()
    bytes_of_each = (
        WEIGHT_BYTES[train.precision]
        + OPTIMIZER_BYTES[train.precision] * _held_shards(train, axes) / axes.dp
    )
    return int(bytes_of_each * _num_params(train)) // len(replica(axes, 0))


def _held_shards(train: Train | Loop, axes: Axes) -> int:
    """The shards of the optimizer that a rank holds, of one for each replica."""
    return {"whole": axes.dp, "sharded": 1, "mirrored": min(2, axes.dp)}[train.parallel.optimizer]


def _trained_state_bytes(train: Train) -> int:
    """Bytes of the whole state of a `train:` job."""
    return (WEIGHT_BYTES[train.precision] + OPTIMIZER_BYTES[train.precision]) * _num_params(train)


def _num_params(train: Train) -> int:
    model = train.model
    # `parameters` counts neither learned positions nor biases nor the last norm.
    more = model.hidden * (model.sequence + 9 * model.num_layers + 2)
    return parameters(megatron_model(train)).total + more
