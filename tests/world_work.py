"""What the members of a test's world do (worlds.py). Loads Megatron, as a rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from unicron.events.model_spec import Axes
from unicron.events.spec import Train
from unicron.workers.training import cpu, rank

with cpu.uncompiled():
    from unicron.workers.training import groups, model, state

rank.quiet()
LIMIT_S = 60.0


def members_by_role(place: int, axes: Axes | None) -> tuple[dict[str, list[int]], int]:
    """Of each role the members that met in it, and how many groups serve all roles."""
    found = groups.by_role(groups.build(axes, LIMIT_S))
    met: dict[str, list[int]] = {}
    for role, group in found.items():
        seen = [torch.zeros(1) for _ in range(group.size())]
        dist.all_gather(seen, torch.tensor([float(place)]), group=group)
        met[role] = [int(one.item()) for one in seen]
    return met, len({id(group) for group in found.values()})


def roles_of_one_group(place: int, axes: Axes) -> set[tuple[str, ...]]:
    shared: dict[int, list[str]] = {}
    for role, group in groups.by_role(groups.build(axes, LIMIT_S)).items():
        shared.setdefault(id(group), []).append(role)
    return {tuple(roles) for roles in shared.values()}


def built(place: int, train: Train, axes: Axes) -> dict[str, Any]:
    """What a place of the layout has, as arrays by global name."""
    trainee = model.build(train, torch.device("cpu"), groups.build(axes, LIMIT_S), axes, place)
    return {name: tensor.detach().float().numpy()
            for name, tensor in state.tensors(trainee).items()}
