"""The mirror of a shard: beside its own, a member steps that of the data-parallel rank before it.

It is Megatron's distributed optimizer a second time, over the same buffers, built as if it stood at
that rank. So it takes the owner's step, with the same code on the same reduced gradients: bit by
bit what the owner has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


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
