"""Simulated checkpoint stores: the in-memory checkpoints that each node holds."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from unicron.events.records.types import CHECKPOINTS_NUM_MAX, MemoryCheckpoint

COPY_BYTES = 16_000


class SimulatedCheckpoint(Struct, frozen=True, kw_only=True):
    """A share of the state of `generation`: its digest after `step_version` steps."""

    generation: int
    step_version: int
    digest: int
    share: int = 0
    num_shares: int = 1

    @property
    def checksum(self) -> str:
        return f"paper:{self.digest:08x}"

    @property
    def version(self) -> tuple[int, int]:
        return self.generation, self.step_version


class SimulatedStores:
    """The checkpoint stores of all nodes that are up."""

    def __init__(self) -> None:
        self._shelves: dict[str, dict[int, list[SimulatedCheckpoint]]] = {}
        """By node and task: the shares, the newest last."""
        self._starts: dict[str, int] = {}
        self._awaited: dict[str, tuple[int, int]] = {}
        """By node: the report behind which its next store begins, and that store's number."""
        self.num_kept = self.num_served = 0

    def open_behind(self, node: str, report: int, start: int) -> None:
        """As `open`, when the log has this report of the node."""
        self.close(node)
        self._awaited[node] = report, start

    def acked(self, node: str, last: int) -> None:
        """The log has the node's reports up to `last`."""
        report, start = self._awaited.get(node, (last + 1, 0))
        if report <= last:
            self.open(node, start)

    def open(self, node: str, start: int) -> None:
        """Start an empty store on the node; `start` is the store's number."""
        self._awaited.pop(node, None)
        self._shelves[node], self._starts[node] = {}, start

    def close(self, node: str) -> None:
        """The node's agent, or its store alone, has ended: its checkpoints are lost."""
        self._shelves.pop(node, None)
        self._awaited.pop(node, None)

    def put(self, node: str, task: int, copy: SimulatedCheckpoint) -> int:
        """Store a checkpoint; the store's number. 0: no store, or it has a later generation."""
        shelf = self._shelves.get(node)
        if shelf is None:
            return 0
        known = shelf.setdefault(task, [])
        if known and max(one.generation for one in known) > copy.generation:
            return 0
        same = [one for one in known if one.share == copy.share and one.version != copy.version]
        shelf[task] = [
            *(one for one in known if one.share != copy.share),
            *same[1 - CHECKPOINTS_NUM_MAX :],
            copy,
        ]
        self.num_kept += 1
        return self._starts[node]

    def forget(self, node: str, task: int) -> None:
        self._shelves.get(node, {}).pop(task, None)

    def find(
        self, task: int, named: Sequence[MemoryCheckpoint]
    ) -> tuple[SimulatedCheckpoint, str] | None:
        """The newest whole checkpoint in the named generations and stores, and the node of its
        first share."""
        found: dict[tuple[int, int, int], dict[int, tuple[SimulatedCheckpoint, str]]] = {}
        for one in named:
            for copy in self._shelves.get(one.node, {}).get(task, []):
                if (
                    copy.generation == one.generation
                    and one.step_version <= copy.step_version
                    and (one.step_version_max < 0 or copy.step_version <= one.step_version_max)
                ):
                    key = (copy.step_version, copy.generation, copy.num_shares)
                    found.setdefault(key, {}).setdefault(copy.share, (copy, one.node))
        whole = [key for key, shares in found.items() if len(shares) == key[-1]]
        if not whole:
            return None
        self.num_served += 1
        return found[max(whole)][0]
