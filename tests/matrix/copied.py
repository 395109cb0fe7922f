"""The copies that a task may go back to, as the control plane would name them."""

from __future__ import annotations

from checkpoint_stores import named
from rank_driver import TASK, Driver
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.records.types import MemoryCheckpoint


def newest(driver: Driver) -> tuple[MemoryCheckpoint, ...]:
    """Those that were told of, the newest first. A keeper gives a newer one if it has one."""
    by_node = {one.keeper.node: one for one in driver.keepers}
    told = sorted(driver.told(MemoryCheckpointStored),
                  key=lambda kept: (-kept.step_version, kept.node))
    return tuple(named(by_node[kept.node], kept) for kept in told)


def steps(driver: Driver) -> set[int]:
    """Of the newest that each keeper has."""
    return {one.stored(TASK)[-1].offer.step_version for one in driver.keepers
            if one.stored(TASK)}
