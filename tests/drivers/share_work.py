"""The work of the members in test_share.py: shares of the state in every layout."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from msgspec.structs import replace
from reshard_work import LIMIT_S, Layout, _step
from unicron.events.errors import UsageError
from unicron.events.spec.job import Train
from unicron.events.spec.parallelism import Parallel, num_positions
from unicron.workers.host import checkpoint_index
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from unicron.workers.training.checkpoint import checkpoint, share_files
    from unicron.workers.training.checkpoint.folder import Folder
    from unicron.workers.training.checkpoint.share import own_share
    from unicron.workers.training.checkpoint.snapshot import Snapshot
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.model import trainee as model
    from unicron.workers.training.model import training_state
    from unicron.workers.training.process.history import History
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
    trainee.clear()
    _step(trainee, trainee.shards, 0)
    return trainee


def shares(
    place: int, train: Train, layout: Layout, lives: Collection[Collection[int] | None]
) -> list[Share]:
    """The member's share for each set of positions that save."""
    trainee = build(place, train, layout)
    held_bytes = sum(tensor.nbytes for tensor in trainee.shards.values())
    return [
        (
            held_bytes,
            [
                (shard, bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
                for shard, tensor in own_share(trainee, saving).items()
            ],
        )
        for saving in lives
    ]


def save(place: int, train: Train, layout: Layout, folder: str, lost: Collection[int] = ()) -> None:
    """Save in parts: all members but those at `lost` write, and the first completes."""
    trainee = build(place, train, layout)
    saving = tuple(each for each in range(num_positions(layout.axes)) if each not in lost)
    target = Folder(folder, "token")
    if place in saving:
        taken = Snapshot(own_share(trainee, saving), None)
        values = (
            share_files.plain(training_state.numbers(trainee, 1, History()))
            if place == saving[0]
            else {}
        )
        share_files.write_share(target, place, 1, taken.read(), values)
    dist.barrier()
    if place == saving[0]:
        indexes = [
            checkpoint_index.read_index(target.read(target.index_name(each))) for each in saving
        ]
        share_files.complete(
            target, [index for index in indexes if index is not None], model=trainee.description
        )
    dist.barrier()


def load(place: int, train: Train, layout: Layout, folder: str) -> list[str]:
    """Read the state into a model of another state; returns what is then wrong."""
    trainee = build(place, train, layout)
    expected = {shard: tensor.clone() for shard, tensor in trainee.shards.items()}
    numbers = training_state.numbers(trainee, 1, History())
    for tensor in trainee.shards.values():
        tensor.fill_(7)
    trainee.scheduler.step(12)
    assert checkpoint.load(folder, trainee, History()) == 1
    assert training_state.numbers(trainee, 1, History()) == numbers
    return [
        str(shard) for shard, tensor in trainee.shards.items() if not tensor.equal(expected[shard])
    ]


def refuse(place: int, train: Train, layout: Layout, folder: str) -> tuple[str, bool]:
    """Try to read a checkpoint: the error, and whether the state is unchanged."""
    trainee = build(place, train, layout)
    before = {shard: tensor.clone() for shard, tensor in trainee.shards.items()}
    try:
        checkpoint.load(folder, trainee, History())
    except (UsageError, RuntimeError) as error:
        return f"{error}; {getattr(error, 'hint', '')}", all(
            tensor.equal(before[shard]) for shard, tensor in trainee.shards.items()
        )
    return "", False
