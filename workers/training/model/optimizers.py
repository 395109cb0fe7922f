"""What is inside Megatron's optimizer, and what it needs to be one of ours.

It may be one or a chain of several, whole or, as Megatron's distributed optimizer, sharded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# --- The mirror of a shard: beside its own, a member steps that of the data-parallel rank before
# it. ---
#
# It is Megatron's distributed optimizer a second time, over the same buffers, built as if it stood
# at that rank. So it takes the owner's step, with the same code on the same reduced gradients: bit
# by bit what the owner has.


class RankBefore(NamedTuple):
    """All that Megatron asks a buffer's group when it builds a shard."""

    own: int
    num_ranks: int

    def rank(self) -> int:
        return (self.own - 1) % self.num_ranks

    def size(self) -> int:
        return self.num_ranks


@contextmanager
def at_rank_before(ddps: Sequence[Any]) -> Generator[None]:
    """An optimizer that is built within this is the one of the data-parallel rank before."""
    buffers = [buffer for ddp in ddps for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    groups = [buffer.data_parallel_group for buffer in buffers]
    mains = {param: vars(param).get("main_param") for buffer in buffers for param in buffer.params}
    for buffer, group in zip(buffers, groups, strict=True):
        buffer.data_parallel_group = RankBefore(group.rank(), group.size())
    try:
        yield
    finally:
        for buffer, group in zip(buffers, groups, strict=True):
            buffer.data_parallel_group = group
        for param, main in mains.items():  # Megatron's name for the own shard's
            param.main_param = main


def follow(mirror: Any, optimizer: Any) -> None:
    """Have the mirror begin its step with the loss scale, learning rate and decay of this one."""
    for ours, theirs in zip(mirror.chained_optimizers, optimizer.chained_optimizers, strict=True):
        if theirs.grad_scaler is not None and (told := theirs.grad_scaler.state_dict()):
            ours.grad_scaler.load_state_dict({name: value.clone() if hasattr(value, "clone")
                                              else value for name, value in told.items()})
    for mine, other in zip(mirror.param_groups, optimizer.param_groups, strict=True):
        mine["lr"], mine["weight_decay"] = other["lr"], other["weight_decay"]


@contextmanager
def asking_nobody() -> Generator[None]:
    """Megatron asks the world for its groups of parameters, in case a stage lacks one.

    None does: each has a layer, with weights that decay and biases that do not. And whoever builds
    does so when it has to, not when all others do.
    """
    def answer(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    right, dist.all_gather_object = dist.all_gather_object, answer  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = right


def prepare(ddps: Sequence[Any], optimizer: Any) -> None:
    """What is built steps as stepping.py wants it, and has all of its state."""
    if is_sharded(optimizer):
        for ddp in ddps:  # parameters are gathered after the step, not in it
            ddp.overlap_param_gather_with_optimizer_step = True
    if not not_adam(optimizer):
        _materialise(optimizer)


def _materialise(optimizer: Any) -> None:
    """Give Adam its moments and steps now, so that a newcomer has where to receive them.

    Megatron's own init_state_fn leaves out `step`, which torch's AdamW needs.
    """
    for part in parts(optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                if not part.state[param]:
                    part.state[param].update(step=torch.zeros((), dtype=torch.float32),
                                             exp_avg=torch.zeros_like(param),
                                             exp_avg_sq=torch.zeros_like(param))


def chained(optimizer: Any) -> list[Any]:
    """Megatron's optimizers inside of what it calls one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def scalers(optimizer: Any) -> list[Any]:
    """The loss scalers inside Megatron's optimizer: none where nothing is scaled."""
    found = [getattr(part, "grad_scaler", None) for part in chained(optimizer)]
    return [scaler for scaler in found if scaler is not None]


def not_adam(optimizer: Any) -> list[str]:
    """The kinds of torch optimizers in it whose state is not known."""
    kinds = [type(part.optimizer) for part in chained(optimizer) if part.optimizer is not None]
    return [f"{kind.__module__}.{kind.__name__}" for kind in kinds
            if not issubclass(kind, torch.optim.AdamW)]


def parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    found = [part.optimizer for part in chained(optimizer) if part.optimizer is not None]
    assert all(isinstance(part, torch.optim.AdamW) for part in found)
    return found


def shards(optimizer: Any) -> dict[int, Any]:
    """id of a parameter -> the part of it that this member steps, where the optimizer is sharded.

    Flat, and fp32; of parameters that it has a part of. Empty where the optimizer is whole.
    """
    found: dict[int, Any] = {}
    for part in chained(optimizer):
        if isinstance(part, DistributedOptimizer):
            for whole, own in ((part.model_float16_groups, part.shard_fp32_from_float16_groups),
                               (part.model_fp32_groups, part.shard_fp32_groups)):
                for params, owned in zip(whole, own, strict=True):
                    found |= {id(param): shard for param, shard in zip(params, owned, strict=True)}
    return found


def is_sharded(optimizer: Any) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in chained(optimizer))


def ranges(optimizer: Any) -> dict[int, slice]:
    """id of a parameter -> which of its elements this member steps, as `shards` has them."""
    found: dict[int, slice] = {}
    for part in chained(optimizer):
        if isinstance(part, DistributedOptimizer):
            for param in part.model_param_gbuf_map:
                own = part._get_model_param_range_map(param)["param"]
                found[id(param)] = slice(own.start, own.end)
    return found
