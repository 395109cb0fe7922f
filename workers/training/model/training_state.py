"""The whole state of a trainee: what a newcomer needs to be the same as a replica.

Everything that changes while training is named here, once, for the exchange between members and
for checkpoints alike:
- tensors: parameters, buffers, and for each parameter Adam's two moments and, where it has 16 bits,
  its fp32 master;
- numbers: Adam's step count, the loss scale and its trackers, the schedule's position in samples
  (which stands still in an iteration that is skipped), the step version and the consumed samples
  (which do not), and the losses so far.
Not state, because they follow from the spec and the iteration: the data's order, every random
generator (draw.py), learning rate and weight decay (the schedule's position).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ..process.history import History
from .optimizers import parts, scalers, shards
from .trainee import Trainee

MOMENTS = ("exp_avg", "exp_avg_sq")


class LossScale(Struct, kw_only=True):
    """A dynamic loss scale, and what Megatron counts to change it."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


class Numbers(Struct, kw_only=True):
    """The part of the state that is not tensors.

    `adam_step` is Adam's own count, the same for all parameters. `loss_scales` has one for each
    part of the optimizer that scales dynamically. `precision` is the spec's, so that no other takes
    it for its own.
    """

    precision: str
    step_version: int
    consumed_samples: int
    scheduled_samples: int
    adam_step: float
    loss_scales: list[LossScale]
    first_loss: int
    losses: list[float]
    step_s: list[float]


def names(trainee: Trainee, optimizer: Any) -> dict[int, str]:
    """id of a parameter, as the optimizer has it -> its name, the same on every rank."""
    owned = shards(optimizer)
    return {id(owned.get(id(param), getattr(param, "main_param", param))): name
            for name, param in trainee.named_parameters()}


def tensors(trainee: Trainee) -> dict[str, Tensor]:
    """Every tensor of the state, live, by name, in an order that is the same on every rank.

    Names are those of the whole model. Where the optimizer is sharded, masters and moments are this
    member's parts of them, flat.
    """
    found: dict[str, Tensor] = {}
    for name, param in trainee.named_parameters():
        found[f"model.{name}"] = param.data
    for name, param in trainee.named_parameters():
        if getattr(param, "main_param", None) is not None:
            found[f"master.{name}"] = param.main_param.data
    for name, buffer in trainee.named_buffers():
        found[f"buffer.{name}"] = buffer
    for name, _, moments in _moments(trainee, trainee.optimizer):
        for moment in MOMENTS:
            found[f"optimizer.{moment}.{name}"] = moments[moment]
    if trainee.mirror is not None:
        for name, main, moments in _moments(trainee, trainee.mirror):
            if trainee.train.precision != "fp32":
                found[f"mirror.master.{name}"] = main.data
            for moment in MOMENTS:
                found[f"mirror.{moment}.{name}"] = moments[moment]
    return found


def num_skipped(trainee: Trainee, step_version: int) -> int:
    """Iterations whose gradient was not finite: the schedule stood still in them."""
    scheduled_samples: int = trainee.scheduler.num_steps
    return step_version - scheduled_samples // trainee.train.batch.global_


def num_bytes(trainee: Trainee) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(trainee).values())


def numbers(trainee: Trainee, step_version: int, history: History) -> Numbers:
    """The rest of the state, copied."""
    return Numbers(
        precision=trainee.train.precision, step_version=step_version,
        consumed_samples=step_version * trainee.train.batch.global_,
        scheduled_samples=trainee.scheduler.num_steps,
        loss_scales=[LossScale(**{**scaler.state_dict(), "scale": scaler.scale.item()})
                     for scaler in _dynamic(trainee)],
        adam_step=_adam_step(trainee),
        first_loss=history.first, losses=list(history.losses), step_s=list(history.step_s),
    )


def check(trainee: Trainee, told: Numbers) -> None:
    """Raises ValueError where `adopt` could not take all of it over."""
    if told.precision != trainee.train.precision:
        raise ValueError(f"numbers of {told.precision}, not {trainee.train.precision}")
    if len(told.loss_scales) != (own_num := len(_dynamic(trainee))):
        raise ValueError(f"{len(told.loss_scales)} loss scales, not {own_num}")


def adopt(trainee: Trainee, told: Numbers, history: History) -> int:
    """Take over the numbers; the step version. Raises ValueError before anything is changed."""
    check(trainee, told)
    for optimizer in trainee.optimizers:
        for _, _, moments in _moments(trainee, optimizer):
            moments["step"].fill_(told.adam_step)
    for scaler, scale in zip(_dynamic(trainee), told.loss_scales, strict=True):
        scaler.load_state_dict({**msgspec.to_builtins(scale), "scale": torch.tensor([scale.scale])})
    trainee.scheduler.num_steps = told.scheduled_samples
    trainee.scheduler.step(0)
    history.replace(told.first_loss, told.losses, told.step_s)
    return told.step_version


def encode(told: Numbers) -> bytes:
    return msgspec.msgpack.encode(told)


def decode(data: bytes) -> Numbers:
    return msgspec.msgpack.decode(data, type=Numbers)


def _dynamic(trainee: Trainee) -> list[Any]:
    """Megatron's scalers that have a state: not the constant one."""
    return [scaler for scaler in scalers(trainee.optimizer) if scaler.state_dict()]


def _adam_step(trainee: Trainee) -> float:
    """All parameters have stepped together, so that one number is all of theirs."""
    found = {float(moments["step"]) for optimizer in trainee.optimizers
             for _, _, moments in _moments(trainee, optimizer)}
    assert len(found) == 1, f"parameters have stepped {sorted(found)} times"
    return found.pop()


def _moments(trainee: Trainee, optimizer: Any) -> Iterator[tuple[str, Any, dict[str, Tensor]]]:
    """Each parameter that this optimizer steps: its name, what is stepped, its moments."""
    by_id = names(trainee, optimizer)
    for part in parts(optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                yield by_id[id(param)], param, part.state[param]
