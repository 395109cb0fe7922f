"""The digest of the training state: equal in any layout, with any sharding."""

import torch
from torch import Tensor

from ..model.digest import digest, salt_of
from ..model.engine import Engine
from .regions import cut
from .resharding import parts as split

CHUNK_NUM_MAX = 1 << 16
"""Elements that are read at once: they then stay in a core's cache."""


def shard_digests(engine: Engine) -> Tensor:
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
            for shard, tensor in engine.shards.items()
        ]
    )
