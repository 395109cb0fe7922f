"""The digest of the training state: equal in any layout, with any sharding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model.digest import digest, salt_of
from ..model.optimizers import parts
from ..model.trainee import TrainingModel
from ..model.training_state import MOMENTS
from .regions import cut
from .resharding import parts as split

CHUNK_NUM_MAX = 1 << 16
"""Elements that are read at once: they then stay in a core's cache."""
OF_OPTIMIZER = ("master", "optimizer")
"""Kinds of tensors that are sharded with the optimizer."""


def shard_digests(trainee: TrainingModel) -> Tensor:
    """The digest of each of this member's shards, int64, on the device."""
    return torch.stack(
        [
            torch.stack(
                [
                    digest(
                        cut(tensor, shard.region, part),
                        part.offset,
                        salt_of(f"{shard.key} {shard.kind}"),
                    )
                    for part in split(shard.region, CHUNK_NUM_MAX)
                ]
            ).sum()
            for shard, tensor in trainee.shards.items()
        ]
    )


def counted(trainee: TrainingModel) -> Iterator[bool]:
    """For each shard, whether this member counts it: each element of the state is counted once."""
    named = dict(trainee.named_parameters())
    own = {
        tensor.untyped_storage().data_ptr()
        for part in parts(trainee.optimizer)
        for main, state in part.state.items()
        for tensor in (main, *(state[moment] for moment in MOMENTS))
    }
    for shard, tensor in trainee.shards.items():
        kind, _, name = shard.key.partition(".")
        param = named.get(name.partition(".")[2] if kind == "optimizer" else name)
        is_split = kind != "exponent" and getattr(param, "tensor_model_parallel", False)
        if getattr(param, "shared", False) or (trainee.at.tp and not is_split):
            yield False  # the first stage, or the first tensor-parallel rank counts it
        elif trainee.is_sharded and kind in OF_OPTIMIZER:
            yield tensor.untyped_storage().data_ptr() in own  # not the mirror of another's
        else:
            yield not trainee.at.dp
