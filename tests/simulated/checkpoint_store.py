"""Simulated checkpoint stores: the in-memory checkpoints that each node holds."""

from __future__ import annotations

from msgspec import Struct
from unicron.events.records.types import CHECKPOINTS_NUM_MAX, MemoryCheckpoint
from unicron.workers.checkpoint_store.protocol import CheckpointRequest

COPY_BYTES = 16_000


class SimulatedCheckpoint(Struct, frozen=True, kw_only=True):
    """The state of a member of `generation`: its digest after `step_version` steps."""

    generation: int
    step_version: int
    digest: int

    @property
    def checksum(self) -> str:
        return f"paper:{self.digest:08x}"


class SimulatedStores:
    """The checkpoint stores of all nodes that are up."""

    def __init__(self) -> None:
        self._shelves: dict[str, dict[int, list[SimulatedCheckpoint]]] = {}
        self._starts: dict[str, int] = {}
        self.num_kept = self.num_served = 0

    def open(self, node: str, start: int) -> None:
        """Start an empty store on the node; `start` is the store's number."""
        self._shelves[node], self._starts[node] = {}, start

    def close(self, node: str) -> None:
        """The node's agent, or its store alone, has ended: its checkpoints are lost."""
        self._shelves.pop(node, None)

    def put(self, node: str, task: int, copy: SimulatedCheckpoint) -> int:
        """Store a checkpoint; the store's number. 0: no store, or it has a later generation."""
        shelf = self._shelves.get(node)
        if shelf is None:
            return 0
        known = shelf.setdefault(task, [])
        if known and known[-1].generation > copy.generation:
            return 0
        shelf[task] = [*known, copy][-CHECKPOINTS_NUM_MAX:]
        self.num_kept += 1
        return self._starts[node]

    def forget(self, node: str, task: int) -> None:
        self._shelves.get(node, {}).pop(task, None)

    def find(self, task: int, wanted: MemoryCheckpoint) -> SimulatedCheckpoint | None:
        """The newest checkpoint of the wanted generation and node that fits the step versions."""
        wish = CheckpointRequest(task=task, generation=wanted.generation,
                    step_version=wanted.step_version,
                    step_version_max=wanted.step_version_max)
        for copy in reversed(self._shelves.get(wanted.node, {}).get(task, [])):
            if wish.fits(copy.generation, copy.step_version):
                self.num_served += 1
                return copy
        return None
