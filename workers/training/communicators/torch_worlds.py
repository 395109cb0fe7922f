"""The process groups that torch knows: all taken out at once, or a temporary set beside them.

torch keeps its groups in one object of `distributed_c10d`, which its own tests replace in the same
way.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import distributed_c10d

SEPARATE_NUM_MIN = 1_000_000
"""Groups are named by a count. Two groups of a process must not have the same name."""


@dataclass
class _World:
    """The attributes of torch's `_World`."""

    group_count: int
    pg_names: dict[Any, Any]
    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)
    pg_config_info: list[Any] = field(default_factory=list)


@contextmanager
def separate() -> Generator[None]:
    """Within this context no process group exists at first, and new ones do not touch the live
    ones. At the end they are no longer usable."""
    live: Any = distributed_c10d._world
    # The number of names is part of the name of a group whose members alone create it.
    world: Any = _World(live.group_count + SEPARATE_NUM_MIN, dict(live.pg_names))
    distributed_c10d._world = world
    try:
        yield
    finally:
        distributed_c10d._world = live
        for group, name in world.pg_names.items():
            if group not in live.pg_names:
                distributed_c10d._unregister_process_group(name)


def take_groups() -> list[Any]:
    """Take all groups out of torch, which then has none; as torch's `_abort_process_group` does
    after an abort. Returns them, the newest first."""
    world: Any = distributed_c10d._world
    groups = sorted(world.pg_names, key=world.pg_names.__getitem__, reverse=True)
    distributed_c10d._update_default_pg(None)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
                  world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):
        table.clear()
    distributed_c10d._unregister_all_process_groups()
    world.group_count = 0
    return groups
