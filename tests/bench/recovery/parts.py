"""The state of each member of a layout, built by the ranks' own code with a fake backend.

A program. Input: `spec` and `layouts` (axes, as in the log). Output, by layout and position: the
`pieces` of the state (key, kind, offset and shape) and the bytes that hold it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from msgspec import convert
from torch.testing._internal.distributed.fake_pg import FakeStore
from unicron.events.spec.job import Train, parse
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions
from unicron.workers.training import rank
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from unicron.workers.training.communicators import process_groups
    from unicron.workers.training.dependencies import private_megatron
    from unicron.workers.training.model import trainee as model
    from unicron.workers.training.recovery import state_shards

LIMIT_S = 10.0


def built(train: Train, axes: Axes, place: int) -> dict[str, Any]:
    """One member: its state pieces, and the bytes of its parameters, gradients and optimizer."""
    # torch's fake backend: collectives return at once, and nothing is sent.
    dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=num_positions(axes))
    try:
        trainee = model.build(
            train, cpu_device.prepare_device(), process_groups.build(axes, LIMIT_S), axes, place
        )
        trainee.clear()  # allocates the gradients
        found = state_shards.list_shards(trainee)
        params = [param.data for _, param in trainee.named_parameters()]
        # fp32 master weights are the parameters themselves, not separate pieces.
        others = [tensor for piece, tensor in found.items() if not piece.key.startswith("model.")]
        return {
            "pieces": [[piece.key, piece.kind, *piece.region] for piece in found],
            "param_bytes": num_bytes(params),
            "gradient_bytes": num_bytes(trainee.gradients),
            "optimizer_bytes": num_bytes(others),
        }
    finally:
        private_megatron.clear_globals()
        dist.destroy_process_group()


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory under these tensors. Storage shared by several tensors counts once."""
    stores = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(stores.values())


def main() -> None:
    """Build each position of each layout, one after the other."""
    rank.ignore_warnings()
    asked = json.load(sys.stdin)
    train = parse(asked["spec"]).train
    assert train is not None
    layouts = [convert(axes, Axes) for axes in asked["layouts"]]
    json.dump(
        [[built(train, axes, place) for place in range(num_positions(axes))] for axes in layouts],
        sys.stdout,
    )


if __name__ == "__main__":
    main()
