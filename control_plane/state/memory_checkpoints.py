"""Whole in-memory checkpoints: those of which stores have every share, as far as is reported."""

from collections.abc import Iterable
from typing import NamedTuple

from ...events.records.types import MemoryCheckpoint


class WholeCheckpoint(NamedTuple):
    """An in-memory checkpoint of which every share is in some store, of `step_version` or newer:
    stores may have newer versions of a generation than members have reported."""

    generation: int
    step_version: int
    step_version_max: int
    """State beyond this step version is obsolete; -1: no limit."""
    num_shares: int
    """How many shares it consists of."""
    shares: tuple[MemoryCheckpoint, ...]
    """Every reported share of the generation."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose stores have shares of it or of newer versions, sorted."""
        return tuple(
            sorted({share.node for share in self.shares if share.step_version >= self.step_version})
        )

    @property
    def copy_bytes(self) -> int:
        """The bytes of all shares, each counted once."""
        return sum({share.share: share.copy_bytes for share in self.shares}.values())


def whole_checkpoints(shares: Iterable[MemoryCheckpoint]) -> list[WholeCheckpoint]:
    """The whole checkpoints among these shares, the newest first; one for each generation."""
    groups: dict[tuple[int, int], list[MemoryCheckpoint]] = {}
    for share in shares:
        groups.setdefault((share.generation, share.num_shares), []).append(share)
    found: list[WholeCheckpoint] = []
    for (generation, num_shares), group in groups.items():
        newest: dict[int, int] = {}
        for share in group:
            newest[share.share] = max(newest.get(share.share, -1), share.step_version)
        if len(newest) == num_shares:
            limits = [one.step_version_max for one in group if one.step_version_max >= 0]
            found.append(
                WholeCheckpoint(
                    generation,
                    min(newest.values()),
                    min(limits, default=-1),
                    num_shares,
                    tuple(group),
                )
            )
    return sorted(found, key=lambda one: (-one.step_version, -one.generation, -one.num_shares))
