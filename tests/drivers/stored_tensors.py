"""Whole tensors of a stored state."""

from __future__ import annotations

import torch
from unicron.workers.training.checkpoint.stored_state import StoredState
from unicron.workers.training.recovery.regions import shape_of, torch_dtype
from unicron.workers.training.recovery.resharding import Region, Shard


def whole_tensor(stored: StoredState, key: str) -> torch.Tensor:
    kind = stored.kinds[key]
    sizes = shape_of(kind)
    whole = torch.empty(sizes, dtype=torch_dtype(kind))
    stored.read({Shard(key, kind, Region((0,) * len(sizes), sizes)): whole})
    return whole
