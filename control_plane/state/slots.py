"""The roll of slots that a plan may give, by node: called once, then kept up with what changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from ...events.records.types import Seat, Slot
from .node import Node


class Roll:
    """Slots of nodes that take tasks, and not out; and how many there are of others, too."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._by_node: dict[str, tuple[Slot, ...]] = {}
        self.lacking: set[str] = set()
        """Nodes not all of whose slots may be given."""
        self.silent: set[str] = set()
        """Nodes of which nothing is heard."""
        self._there: dict[str, tuple[int, int]] = {}
        """By node: its slots, if it is healthy; if it has not left."""
        self.num_healthy = self.num_here = 0
        """Slots of nodes that are healthy; that have not left."""
        self._every: tuple[Slot, ...] | None = None
        for node in nodes.values():
            self.mark(node)

    @property
    def every(self) -> tuple[Slot, ...]:
        """All that may be given, by name."""
        if self._every is None:
            if list(self._by_node) != (names := sorted(self._by_node)):
                self._by_node = {name: self._by_node[name] for name in names}
            self._every = tuple(chain.from_iterable(self._by_node.values()))
        return self._every

    def mark(self, node: Node) -> None:
        """How it is with this node now."""
        name, slots = node.name, usable(node)
        if self._by_node.get(name) != slots:
            self._by_node[name], self._every = slots, None
        (self.lacking.add if len(slots) < node.num_slots else self.lacking.discard)(name)
        (self.silent.add if node.silent else self.silent.discard)(name)
        healthy, here = self.there(name)
        there = (node.num_slots if node.health == "healthy" else 0,
                 node.num_slots if node.health != "left" else 0)
        self._there[name] = there
        self.num_healthy += there[0] - healthy
        self.num_here += there[1] - here

    def there(self, name: str) -> tuple[int, int]:
        """Slots of a node that is healthy; that has not left."""
        return self._there.get(name, (0, 0))

    def is_whole(self, nodes: Collection[str]) -> bool:
        """Whether all slots of these nodes may be given."""
        return self.lacking.isdisjoint(nodes)

    def has(self, seats: Iterable[Seat]) -> bool:
        """Whether all of these seats are on slots that may be given."""
        lacking, by_node = self.lacking, self._by_node
        return all(seat.slot.node not in lacking or seat.slot in by_node[seat.slot.node]
                   for seat in seats)


def usable(node: Node) -> tuple[Slot, ...]:
    """Its slots that a plan may give."""
    if not node.takes_tasks:
        return ()
    if not node.slots_out and not node.slots_sick:
        return tuple(Slot(node.name, index) for index in range(node.num_slots))
    return tuple(Slot(node.name, index) for index in range(node.num_slots)
                 if not node.is_out(index))
