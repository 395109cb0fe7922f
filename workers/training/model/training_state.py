"""The whole state of a training model: all that a new member needs to equal a replica.

Tensors are parameters, buffers, Adam's two moments of each parameter, and the fp32 master of each
16-bit parameter; `Numbers` is the rest. A skipped iteration advances the consumed samples, and not
the schedule. Not state, because derived from the spec and the iteration: the order of the data, the
random generators (random_draws.py), learning rate and weight decay (the schedule's position).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from ..process.history import History
from .optimizers import chained, num_steps, parts, scalers, set_num_steps, shards
from .trainee import TrainingModel

MOMENTS = ("exp_avg", "exp_avg_sq")
OF_OPTIMIZER = ("master", "optimizer")
"""Kinds of tensors that are sharded with the optimizer."""


class LossScale(Struct, kw_only=True):
    """A dynamic loss scale and Megatron's counters for it."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


class Numbers(Struct, kw_only=True):
    """The part of the state that is not tensors. `precision` is the spec's: a model of another
    precision refuses the state. `adam_step` is equal for all parameters. `loss_scales` has an entry
    for each part of the optimizer with dynamic scaling. `auxiliary_losses` are those of routers in
    the last step."""

    precision: str
    step_version: int
    consumed_samples: int
    scheduled_samples: int
    adam_step: float
    loss_scales: list[LossScale]
    first_loss: int
    losses: list[float]
    step_s: list[float]
    auxiliary_losses: dict[str, float] = {}
    digests: dict[int, str] = {}


def tensors(trainee: TrainingModel) -> dict[str, Tensor]:
    """The live tensors of the state by their name in the whole model, in the same order on every
    rank. If the optimizer is sharded, masters and moments are this member's flat shards, without
    those of a mirror."""
    found: dict[str, Tensor] = {}
    for name, param in trainee.named_parameters():
        found[f"model.{name}"] = param.data
    for name, param in trainee.named_parameters():
        if getattr(param, "main_param", None) is not None:
            found[f"master.{name}"] = param.main_param.data
    for name, buffer in trainee.named_buffers():
        found[f"buffer.{name}"] = buffer
    owned = shards(trainee.optimizer)
    by_id = {
        id(owned.get(id(param), getattr(param, "main_param", param))): name
        for name, param in trainee.named_parameters()
    }
    for part in parts(trainee.optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                for moment in MOMENTS:
                    found[f"optimizer.{moment}.{by_id[id(param)]}"] = part.state[param][moment]
    return found


def num_skipped(trainee: TrainingModel, step_version: int) -> int:
    """The number of iterations skipped because the gradient was not finite."""
    scheduled_samples: int = trainee.scheduler.num_steps
    return step_version - scheduled_samples // trainee.train.batch.global_


def numbers(trainee: TrainingModel, step_version: int, history: History) -> Numbers:
    return Numbers(
        precision=trainee.train.precision,
        step_version=step_version,
        consumed_samples=step_version * trainee.train.batch.global_,
        scheduled_samples=trainee.scheduler.num_steps,
        loss_scales=[
            LossScale(**{**scaler.state_dict(), "scale": scaler.scale.item()})
            for scaler in _dynamic(trainee)
        ],
        adam_step=_adam_step(trainee),
        first_loss=history.first,
        losses=list(history.losses),
        step_s=list(history.step_s),
        auxiliary_losses=dict(trainee.experts.losses),
        digests=dict(history.digests),
    )


def load(trainee: TrainingModel, new: Numbers, history: History) -> int:
    """Load the numbers; returns the step version. ValueError: they do not fit, nothing changed."""
    if new.precision != trainee.train.precision:
        raise ValueError(f"numbers of {new.precision}, not {trainee.train.precision}")
    if len(new.loss_scales) != (own_num := len(_dynamic(trainee))):
        raise ValueError(f"{len(new.loss_scales)} loss scales, not {own_num}")
    for optimizer in trainee.optimizers:
        for part in parts(optimizer):
            set_num_steps(part, new.adam_step)
    for scaler, scale in zip(_dynamic(trainee), new.loss_scales, strict=True):
        scaler.load_state_dict({**msgspec.to_builtins(scale), "scale": torch.tensor([scale.scale])})
    trainee.scheduler.num_steps = new.scheduled_samples
    trainee.scheduler.step(0)
    trainee.experts.losses = dict(new.auxiliary_losses)
    history.replace(new.first_loss, new.losses, new.step_s, new.digests)
    return new.step_version


# --- The state of one process as its objects give it, whatever optimizer they have ---


def objects_tree(modules: Sequence[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The state of these modules, of Megatron's optimizer and of the schedule: also the tensors
    that the torch optimizers step (the masters, in 16 bits), and the loss scale."""
    return {
        "modules": [module.state_dict() for module in modules],
        "optimizers": [
            {
                "state": part.optimizer.state_dict(),
                "stepped": [
                    param.data for group in part.optimizer.param_groups for param in group["params"]
                ],
                "scaler": part.grad_scaler.state_dict() if _has_scaler(part) else None,
            }
            for part in _inner(optimizer)
        ],
        "scheduled_samples": scheduler.num_steps,
    }


def load_objects(
    modules: Sequence[Any], optimizer: Any, scheduler: Any, tree: dict[str, Any]
) -> None:
    """Load what `objects_tree` has returned in an earlier process of this place. Raises
    RuntimeError, ValueError or KeyError if it is of another model."""
    for module, state in zip(modules, tree["modules"], strict=True):
        module.load_state_dict(state)
    for part, state in zip(_inner(optimizer), tree["optimizers"], strict=True):
        part.optimizer.load_state_dict(state["state"])
        params = [param for group in part.optimizer.param_groups for param in group["params"]]
        for param, saved in zip(params, state["stepped"], strict=True):
            param.data.copy_(saved)
        if _has_scaler(part):
            part.grad_scaler.load_state_dict(state["scaler"])
    scheduler.num_steps = tree["scheduled_samples"]
    scheduler.step(0)


def _inner(optimizer: Any) -> list[Any]:
    """Megatron's optimizers that have a torch optimizer."""
    return [part for part in chained(optimizer) if part.optimizer is not None]


def _has_scaler(part: Any) -> bool:
    return getattr(part, "grad_scaler", None) is not None


def _dynamic(trainee: TrainingModel) -> list[Any]:
    """Megatron's dynamic loss scalers. A constant scaler has no state."""
    return [scaler for scaler in scalers(trainee.optimizer) if scaler.state_dict()]


def _adam_step(trainee: TrainingModel) -> float:
    steps = {
        num
        for optimizer in trainee.optimizers
        for part in parts(optimizer)
        for num in num_steps(part)
    }
    assert len(steps) == 1, f"parameters have stepped {sorted(steps)} times"
    return steps.pop()
