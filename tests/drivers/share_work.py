"""The work of the members in test_share.py: shares of the state in every layout."""

from __future__ import annotations

from collections.abc import Collection

import torch
from msgspec.structs import replace
from reshard_work import LIMIT_S, Layout, _step
from unicron.events.spec.job import Train
from unicron.events.spec.parallelism import Parallel
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from unicron.workers.training.checkpoint.share import own_share
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.model import trainee as model
    from unicron.workers.training.recovery import state_shards
    from unicron.workers.training.recovery.resharding import Shard

Share = tuple[int, list[tuple[Shard, bytes]]]
"""The bytes of what a member holds, and each shard of its share with a digest of its values."""


def build(place: int, train: Train, layout: Layout) -> model.TrainingModel:
    """The model at a position of the layout, after one step."""
    train = replace(train, parallel=Parallel(optimizer=layout.optimizer))
    made = process_groups.build(layout.axes, LIMIT_S)
    trainee = model.build(train, torch.device("cpu"), made, layout.axes, place)
    trainee.shards = state_shards.list_shards(trainee)
    _step(trainee, trainee.shards, 0)
    return trainee


def shares(place: int, train: Train, layout: Layout, lives: Collection[Collection[int] | None]
           ) -> list[Share]:
    """The member's share for each set of positions that save."""
    trainee = build(place, train, layout)
    held_bytes = sum(tensor.nbytes for tensor in trainee.shards.values())
    return [(held_bytes, [(shard, bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
                          for shard, tensor in own_share(trainee, saving).items()])
            for saving in lives]
